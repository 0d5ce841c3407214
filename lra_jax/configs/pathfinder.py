"""Pathfinder presets: pathfinder (32 pixels a side), pathfinder64, pathx, path256.

Task: does one dashed path join the two circles? 160,000 / 20,000 / 20,000 grey images,
two classes, level hard. Chance is 50 %; most published models without a convolution or
a state-space layer stay there from 128 pixels on. No accuracy of ours is given, because
none was measured with training this long (docs/learning.md has shorter runs).

official: LRA's config files (see ``families``), 200 epochs (100 for 256 pixels). For 32
pixels these sizes are the Transformer's; mechanisms with other sizes, from LRA or their
authors, have them in ``mechanisms``. Its maintainer says that the files are not those
of the published results, and gives Performer's sizes (issue 37), which we use; in issue
60 the Transformer's file stays at 50 %. LRA scores the last checkpoint: read
`test_accuracy_last`.
  Command: python -m lra_jax.train --task=pathfinder --preset=official

compact: the PyTorch code bases' model with Skyformer's settings for Pathfinder. On
larger images we keep everything but the batch size.
  Command: python -m lra_jax.train --task=pathfinder
  Time: 23 hours on one CPU core, at the 80,000 tokens/s of a ListOps run (an estimate);
  46 hours on larger images.

modern: the value of a pixel through a linear layer, a learned vector for its row plus
one for its column.
  Command: python -m lra_jax.train --task=pathfinder --preset=modern

Every preset needs an accelerator for its full number of steps; `--train.steps` and
`--data.num_train` shorten it.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from lra_jax.configs import families
from lra_jax.configs.base import Config, GeneratedData
from lra_jax.errors import Count, Size, expected

_LEVELS = ("short", "easy", "intermediate", "hard")


@dataclasses.dataclass(frozen=True)
class PathfinderData(GeneratedData):
    """Where images come from, how many are generated and how they are batched."""

    num_train: Size = 160_000
    """Generated training images."""
    num_valid: Size = 20_000
    """Generated validation images."""
    num_test: Size = 20_000
    """Generated test images."""
    level: Literal["short", "easy", "intermediate", "hard"] = "hard"
    """Paths of 3, 6, 9 or 14 dashes. LRA's results are for hard; short is ours."""
    levels: str = ""
    """Easier levels first: `easy:0.3,intermediate:0.5` trains on images of the level
    easy for 30 % of the steps, on intermediate ones up to 50 %, then on `level`."""
    num_distractors: Count | None = None
    """Number of distractors in a generated image; by default LRA's."""

    generator_fields: ClassVar[tuple[str, ...]] = (
        *GeneratedData.generator_fields,
        "num_distractors",
    )

    @property
    def reader_arguments(self) -> dict[str, Any]:
        """See the base class; the reader needs only the names of the easier levels."""
        settings = super().reader_arguments
        del settings["levels"]
        return settings | {"easier": tuple(name for name, _ in self._stages)}

    @property
    def groups(self) -> tuple[float, ...]:
        """See the base class; a group for each level."""
        return tuple(float(share) for _, share in self._stages)

    @property
    def shown(self) -> tuple[str, ...]:
        return (f"easier levels first ({self.levels})",) if self.levels else ()

    @property
    def _stages(self) -> list[tuple[str, str]]:
        """The pairs in ``levels``."""
        parts = (part.partition(":") for part in self.levels.split(","))
        return [(name.strip(), share) for name, _, share in parts if self.levels]

    def check(self) -> None:
        super().check()
        if not self.levels:
            return
        easier = _LEVELS[: _LEVELS.index(self.level)]
        names = [name for name, _ in self._stages]
        try:
            shares = [0.0, *self.groups, 1.0]
        except ValueError:
            shares = []
        rising = all(a < b for a, b in itertools.pairwise(shares))
        if not shares or not rising or names != [n for n in easier if n in names]:
            needed = (
                "LEVEL:FRACTION,... with levels easier than --data.level and fractions "
                "of the steps, both increasing, as in easy:0.3,intermediate:0.5"
            )
            raise expected("--data.levels", needed, f"{self.levels!r}")
        if not self.is_own:
            needed = "nothing with --data.path, which is one level"
            raise expected("--data.levels", needed, f"{self.levels!r}")


SIZES = {"pathfinder": 32, "pathfinder64": 64, "pathx": 128, "path256": 256}
"""Side of the images of each task."""

# num_layers, embed_dim, num_heads, qkv_dim; pooling; batch, steps, steps of an epoch.
_OFFICIAL: dict[str, tuple[int, int, int, int, Any, int, int, int]] = {
    "pathfinder": (4, 32, 4, 16, "mean", 512, 62_400, 312),
    "pathfinder64": (2, 32, 4, 32, "cls", 256, 125_000, 625),
    "pathx": (1, 32, 2, 16, "mean", 64, 500_000, 2_500),
    "path256": (2, 32, 4, 32, "cls", 32, 500_000, 5_000),
}

_DATA = PathfinderData(buckets="none")

_COMPACT_BATCH = {"pathfinder": 128, "pathfinder64": 64, "pathx": 16, "path256": 4}


def presets(task: str) -> dict[str, Callable[[str], Config]]:
    """The presets of one of the four tasks."""
    return families.presets(
        task, compact=_compact(task), official=_official(task), modern=_modern(task)
    )


def _compact(task: str) -> families.Preset:
    """The PyTorch code bases' small model with Skyformer's settings."""
    batch = _COMPACT_BATCH[task]
    train = families.compact_train(
        steps=50_000,
        batch_size=batch,
        learning_rate=2e-4,
        warmup=312,
        eval_every=1_250,
        eval_batch_size=batch,
    )
    model = families.encoder(max_length=SIZES[task] ** 2)
    return families.Preset(train, model, _DATA)


def _official(task: str) -> families.Preset:
    """Google's config files; the mechanisms' own sizes are in their entries."""
    layers, width, heads, qkv, pooling, batch, steps, epoch = _OFFICIAL[task]
    train = families.official_train(
        steps=steps,
        batch_size=batch,
        learning_rate=1e-3,
        schedule="lra_cosine",
        warmup=epoch,
        clip_norm=1.0 if task == "pathx" else 0.0,
        eval_every=epoch,
        eval_batch_size=batch,
    )
    model = families.official_model(
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        qkv_dim=qkv,
        mlp_dim=32,
        dropout=0.2 if task == "pathfinder" else 0.1,
        max_length=SIZES[task] ** 2,
        pooling=pooling,
        positions="sinusoidal" if task == "pathfinder" else "learned",
    )
    return families.Preset(train, model, _DATA)


def _modern(task: str) -> families.Preset:
    """Pixel values, two-dimensional positions, AdamW with a cosine."""
    train = families.modern_train(
        steps=200_000,
        batch_size=_COMPACT_BATCH[task] // 2,
        learning_rate=1e-3,
        warmup=10_000,
        eval_every=2_500,
        eval_batch_size=_COMPACT_BATCH[task],
    )
    model = families.modern_model(
        num_heads=8,
        embed_dim=128,
        mlp_dim=256,
        max_length=SIZES[task] ** 2,
        inputs="linear",
        positions="learned_2d",
    )
    return families.Preset(train, model, _DATA)
