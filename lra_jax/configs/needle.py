"""Presets of the needle; the task: `lra_jax.data.suites.needle`.

There is no published protocol of exactly this form: both presets are ours.

official: trained on up to 1,024 tokens, tested up to 131,072.
  Command: python -m lra_jax.train --task=needle --preset=official --attention=linear

quick (default): trained on 32 to 128 tokens, tested up to 4,096; one rate.
  Command: python -m lra_jax.train --task=needle --attention=linear
"""

import dataclasses
from typing import Annotated

from lra_jax.configs import families, synthetic
from lra_jax.errors import Range, Size


@dataclasses.dataclass(frozen=True)
class NeedleData(synthetic.SyntheticData):
    """Settings of the generated sequences."""

    num_test: Size = 200
    """Test examples, in total and in each part."""
    vocab_size: Annotated[int, Range("at least 4", 4)] = 16
    """Number of tokens; the last two mark the needle and ask for it."""
    min_length: Size = 32
    """Shortest sequence in training, validation and test."""
    max_length: Size = 128
    """Longest sequence in training, validation and test."""
    parts: str = "128,256,1024,4096"
    """Lengths that are tested separately."""


RATES = {"official": (3e-4, 1e-3, 3e-3), "quick": (5e-3,)}


PRESETS = families.presets(
    "needle",
    quick=families.Preset(
        train=synthetic.quick_train(
            learning_rate=5e-3, batch_size=32, eval_batch_size=8
        ),
        model=synthetic.quick_model(max_length=4_096),
    ),
    official=families.Preset(
        train=synthetic.official_train(
            steps=20_000,
            batch_size=32,
            learning_rate=1e-3,
            warmup=1_000,
            weight_decay=0.01,
            clip_norm=1.0,
            eval_every=1_000,
            eval_batch_size=8,
        ),
        model=synthetic.official_model(
            embed_dim=128,
            num_heads=4,
            mlp_dim=256,
            short_conv=4,
            max_length=131_072,
        ),
        data=NeedleData(
            num_train=64_000,
            num_test=104,
            min_length=64,
            max_length=1_024,
            parts="1024,4096,16384,65536,131072",
        ),
    ),
)
