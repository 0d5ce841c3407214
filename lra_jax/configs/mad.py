"""Presets of the six tests of MAD; the tasks: `lra_jax.data.suites.mad`.

official: athms/mad-lab, configs/tasks/*.yml, mad/configs.py and benchmark.py: four
layers, alternating the mechanism and a SwiGLU, which are two blocks here; 200 epochs,
the best result of `RATES` and `WEIGHT_DECAYS`.
Deviations: this is the basic setting of each test; MAD's score is a mean over it and 5
to 13 harder ones, which each change one value, so published scores are lower. Accuracy
is a mean over targets here, there over classes; the best checkpoint is the one with the
highest accuracy on a separate split here, there the one with the lowest perplexity on
the test split. There, training also stops above 99.9 %, in bfloat16 and with RMSNorm,
the cosine falls once an epoch, to 1e-6, and the vector that compress reads back has no
norm.
  Command: python -m lra_jax.train --task=mad-recall --preset=official
           --attention=delta

The harder settings, each for 200 epochs; lengths also need --model.max_length:
  vocab_size: 16, 32, 64, 128; noisy recall 32, 48, 80, 144; memorise 256 ... 8192
  length: recalls 128 ... 1024, compress 32 ... 256, selective copy 256, 512, 1024
  num_train: 12800, 6400, 3200, 1600, 800; memorise 256
  noisy recall: noise 0.2, 0.4, 0.6, 0.8; selective copy: copied 16, 32, 64, 96

quick (default): the same sequences, except shorter ones in selective copying; one rate.
  Command: python -m lra_jax.train --task=mad-recall --attention=delta
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from lra_jax.configs import families, synthetic
from lra_jax.configs.base import Config
from lra_jax.errors import Rate, Size


@dataclasses.dataclass(frozen=True)
class MadData(synthetic.SyntheticData):
    """Settings of the generated sequences."""

    num_train: Size = 12_800
    """Training examples."""
    num_test: Size = 1_280
    """Test examples."""
    vocab_size: Size = 16
    """Number of tokens, including those with a special meaning."""
    length: Size = 128
    """Tokens in a sequence."""

    length_fields: ClassVar[tuple[str, ...]] = ("length",)


@dataclasses.dataclass(frozen=True)
class NoisyData(MadData):
    """Settings of the generated sequences."""

    vocab_size: Size = 32
    """Number of tokens, including noise."""
    noise_vocab: Size = 16
    """Number of noise tokens."""
    noise: Rate = 0.2
    """Share of the pairs that are noise."""


@dataclasses.dataclass(frozen=True)
class FuzzyData(MadData):
    """Settings of the generated sequences."""

    motif: Size = 3
    """Most tokens in a key or a value."""


@dataclasses.dataclass(frozen=True)
class CopyData(MadData):
    """Settings of the generated sequences."""

    copied: Size = 16
    """Tokens to copy."""


DATA: dict[str, MadData] = {
    "mad-compress": MadData(length=32),
    "mad-fuzzy-recall": FuzzyData(),
    "mad-recall": MadData(),
    "mad-memorise": MadData(vocab_size=256, length=32, num_train=256),
    "mad-noisy-recall": NoisyData(),
    "mad-selective-copy": CopyData(length=256),
}
"""The published sequences of each test."""

RATES = {"official": (1e-4, 5e-4, 1e-3), "quick": (5e-3,)}
WEIGHT_DECAYS = (0.0, 0.1)

_QUICK_DATA: dict[str, dict[str, Any]] = {
    "mad-selective-copy": {"length": 64, "copied": 8}
}


def presets(task: str) -> dict[str, Callable[[str], Config]]:
    """The presets of one of the six tests."""
    data = DATA[task]
    epoch = data.num_train // 128
    short = dataclasses.replace(
        data, num_valid=256, num_test=640, **_QUICK_DATA.get(task, {})
    )
    return families.presets(
        task,
        quick=families.Preset(
            train=synthetic.quick_train(learning_rate=5e-3, batch_size=32),
            model=synthetic.quick_model(max_length=short.length),
            data=short,
        ),
        official=families.Preset(
            train=synthetic.official_train(
                steps=200 * epoch,
                batch_size=128,
                learning_rate=5e-4,
                eval_every=10 * epoch,
                eval_batch_size=128,
                log_every=min(50, 10 * epoch),
            ),
            model=synthetic.official_model(
                embed_dim=128,
                num_heads=16,
                mlp="glu",
                mlp_dim=352,
                max_length=data.length,
            ),
            data=data,
        ),
    )
