"""Settings that the tests of recall, copying and state tracking share.

Each has the preset official, the published protocol, and quick, which runs in a few
minutes on a CPU core: a smaller model, fewer and often shorter sequences, a few hundred
steps, and a short convolution before every mechanism. Results of quick are comparable
with each other, but not with published ones.
"""

import dataclasses
import functools
from typing import ClassVar

from lra_jax.configs import families
from lra_jax.configs.base import DataConfig, TrainConfig
from lra_jax.errors import Count, Size


@dataclasses.dataclass(frozen=True)
class DrawnData(DataConfig):
    """Examples that are generated from a seed in each run, and kept in memory."""

    seed: Count = 0
    """Seed of the examples."""

    source: ClassVar[str] = "drawn, seed {seed}"
    is_generated: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class SyntheticData(DrawnData):
    """How many examples are generated, and of which kind."""

    num_train: Size = 20_000
    """Training examples."""
    num_valid: Size = 500
    """Validation examples."""
    num_test: Size = 1_000
    """Test examples."""


official_train = functools.partial(
    TrainConfig, warmup=0, clip_norm=0.0, decay_vectors=False
)
"""AdamW with a cosine and without clipping, with settings of a task."""

official_model = functools.partial(
    families.encoder, is_causal=True, dropout=0.0, positions="none"
)
"""A decoder without dropout and positions, with sizes and settings of a task."""

quick_train = functools.partial(
    TrainConfig,
    steps=600,
    batch_size=64,
    warmup=50,
    adam_b2=0.98,
    weight_decay=0.01,
    decay_vectors=False,
    eval_every=150,
    eval_batch_size=64,
)
"""A training of a few minutes, with settings of a task."""

quick_model = functools.partial(official_model, short_conv=4)
"""A small decoder with a short convolution, with settings of a task."""
