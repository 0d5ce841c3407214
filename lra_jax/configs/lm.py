"""Presets of language modelling: the next token of a text.

tiny (default): the source of Python's standard library, byte by byte, in rows of 512; 4
layers, 128 wide, 4 heads, MLP 512, a short convolution before every mechanism, rotary
positions where scores are inner products of queries and keys and else none, no dropout.
AdamW at a peak of 2e-3 with a cosine, batch 16, 1,200 steps: 9.8 million bytes, about
an epoch. `--model.max_length`, cosFormer's M, is 8 rows, so that a model can be scored
and continue texts beyond the length of a row.
  Command: python -m lra_jax.train --task=lm
"""

import dataclasses

from lra_jax.configs import families
from lra_jax.configs.base import DataConfig, ModelConfig, TrainConfig
from lra_jax.errors import expected, positive


@dataclasses.dataclass(frozen=True)
class LmData(DataConfig):
    """Which text, and how it is laid into rows."""

    path: str | None = None
    """A text file or a folder of them; by default the source of Python's own standard
    library. A folder is split by file, a single file into 94, 3 and 3 %."""
    pattern: str = "*"
    """Names of the files to read in a folder, as in `*.md`; hidden ones are left
    out."""
    max_length: int = 512
    """Tokens of a row. A longer document is cut; short ones share a row and do not see
    each other."""

    def check(self) -> None:
        """See the base class."""
        positive("--data.max_length", self.max_length)
        for name in ("path", "pattern"):
            if getattr(self, name) == "":
                raise expected(f"--data.{name}", "a name", "''")

    @property
    def longest(self) -> int:
        """See the base class."""
        return self.max_length

    @property
    def origin(self) -> str:
        """See the base class."""
        return "Python's standard library" if self.path is None else "own files"


RATES = {"tiny": (1e-3, 2e-3, 4e-3)}

PRESETS = families.presets(
    "lm",
    tiny=families.Preset(
        train=TrainConfig(
            steps=1_200,
            batch_size=16,
            learning_rate=2e-3,
            warmup=100,
            adam_b2=0.98,
            weight_decay=0.1,
            decay_vectors=False,
            eval_every=300,
            eval_batch_size=16,
            best_by="loss",
            log_every=20,
        ),
        model=ModelConfig(
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            qkv_dim=128,
            mlp_dim=512,
            max_length=4_096,
            positions="none",
            short_conv=4,
            dropout=0.0,
            is_causal=True,
        ),
        rotary=True,
    ),
)
