"""Pathfinder: does one dashed path join the two circles? 32 to 256 pixels a side.

Generated with a seed, or read from the released folders:

    dataset = prepare(data_dir, size=32, level="hard", seed=0)
    dataset = prepare(data_dir, size=32, path="lra_release")

Pixels are `uint8`, row by row, black 0. LRA's results are for the level `hard`; it
calls the images of 128 pixels Path-X.

Splits of generated images follow one another, 80 / 10 / 10 by default. The released
images are first shuffled with the seed, then split the same way: LRA splits the order
in which tfds once happened to store them, and the PyTorch code bases shuffle each in
its own way, so published test sets also differ from one another.
"""

import itertools
import logging
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lra_jax.data import builder, checks, pathfinder_files, pathfinder_images
from lra_jax.data.dataset import SPLITS, SequenceDataset
from lra_jax.data.pathfinder_shapes import GEOMETRIES, LEVELS, Settings
from lra_jax.errors import expected

__all__ = ["GEOMETRIES", "LEVELS", "Settings", "prepare"]

_LEAST_FILES = 10
_logger = logging.getLogger(__name__)


class GeneratedPathfinder(builder.SequenceBuilder):
    """Pathfinder of the Long-Range Arena, generated."""

    name = "lra_pathfinder"
    VOCAB_SIZE = 256
    NUM_CLASSES = 2


class PathfinderFiles(GeneratedPathfinder):
    """Pathfinder of the Long-Range Arena, from its files."""

    name = "lra_pathfinder_files"


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    size: int = 32,
    level: str = "hard",
    seed: int = 0,
    num_train: int = 160_000,
    num_valid: int = 20_000,
    num_test: int = 20_000,
    num_distractors: int | None = None,
    processes: int | None = None,
    path: str | os.PathLike | None = None,
    easier: Sequence[str] = (),
) -> SequenceDataset:
    """Opens Pathfinder, preparing it first if necessary.

    Images do not depend on the number of processes. With a path, see
    `pathfinder_files.find`, only `size`, `level`, and `seed` apply, which then fixes
    the order before splitting.

    Args:
      data_dir: see `builder.prepare`.
      size: side of the images: 32, 64, 128 (Path-X) or 256.
      level, num_distractors: see `Settings`. For 128 pixels LRA has 8, while others use
        17 (issue 38 of its repository).
      seed, num_train, num_valid, num_test, processes, path: see
        `lra_jax.configs.pathfinder.PathfinderData`.
      easier: levels of which `num_train` further images each are put before the
        training images, in this order; only for generated images.

    Returns:
      Splits of `tokens`, `uint8 [size * size]`, and `label`, 1 if one path joins the
      circles; for errors, see `pathfinder_files`, `Settings` and `builder.prepare`.
    """
    settings = Settings(size, level, num_distractors)
    if path is not None:
        return _from_files(path, settings, seed, data_dir)
    sizes = {"train": num_train, "valid": num_valid, "test": num_test}
    counts = "-".join(map(str, sizes.values()))
    total = sum(sizes.values())
    before = [Settings(size, name, num_distractors) for name in easier]
    first = len(before) * num_train

    def examples(root: pathlib.Path) -> builder.Splits:
        del root
        images = itertools.chain(
            *(_images(other, seed, num_train, processes) for other in before),
            _images(settings, seed, total, processes),
        )
        counts = sizes | {"train": first + num_train}
        return {split: (count, images) for split, count in counts.items()}

    name = f"size{size}-{level}-distractors{settings.distractors}-seed{seed}-{counts}"
    if before:
        name += f"-after-{'-'.join(easier)}"
        if num_distractors is not None:  # Otherwise each level has its own number.
            name += "-with-as-many"
    config = _config(name, size, first + total, examples)
    return builder.prepare(GeneratedPathfinder, config, data_dir)


def _config(name: str, size: int, count: int, examples: Any) -> builder.SequenceConfig:
    return builder.SequenceConfig(
        name=name,
        max_length=size**2,
        expected_bytes=(size**2 + 40) * count,
        image_shape=(size, size),
        examples=examples,
    )


def _from_files(
    path: str | os.PathLike,
    settings: Settings,
    seed: int,
    data_dir: str | os.PathLike | None,
) -> SequenceDataset:
    size = settings.size
    folder = pathfinder_files.find(path, size, settings.level)
    samples, left_out = pathfinder_files.list_samples(folder)
    files = pathfinder_files.metadata_files(folder)
    files += [sample.file for sample in samples]
    name = f"{checks.digest(files)}-size{size}-seed{seed}"

    def examples(_: pathlib.Path) -> builder.Splits:
        # Looked for only while the data are prepared: there are 200,000 images.
        listed = itertools.chain((x.file for x in samples), *left_out.values())
        unlisted = pathfinder_files.find_unlisted(folder, listed)
        others = {"images that no metadata list": unlisted}
        for reason, files in (left_out | others).items():
            if files:
                words = "%d %s are left out, the first is %s"
                _logger.warning(words, len(files), reason, files[0])
        return _split(folder, samples, size, seed)

    config = _config(name, size, len(samples), examples)
    return builder.prepare(PathfinderFiles, config, data_dir)


def _split(
    folder: pathlib.Path, samples: list[pathfinder_files.Sample], size: int, seed: int
) -> builder.Splits:
    if len(samples) < _LEAST_FILES:
        needed = f"at least {_LEAST_FILES} images, for three splits"
        raise expected(str(folder), needed, len(samples))
    order = np.random.default_rng(seed).permutation(len(samples))
    tenth = len(samples) // 10
    cuts = np.split(order, [len(samples) - 2 * tenth, len(samples) - tenth])
    return {
        split: (len(ids), pathfinder_files.read((samples[i] for i in ids), size))
        for split, ids in zip(SPLITS, cuts, strict=True)
    }


def _images(
    settings: Settings, seed: int, count: int, processes: int | None
) -> Iterator[tuple[Any, ...]]:
    for batch in pathfinder_images.iterate(settings, seed, count, processes):
        pixels = batch.pixels.reshape(len(batch.labels), -1)
        yield from zip(pixels, batch.labels.tolist(), strict=True)
