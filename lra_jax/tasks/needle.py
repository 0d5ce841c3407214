"""The needle: one token to find in noise, in longer sequences than in training."""

from lra_jax.configs import needle
from lra_jax.tasks.task import rate_sweeps, synthetic

TASK = synthetic(
    "needle",
    data=needle.NeedleData,
    presets=needle.PRESETS,
    reader="lra_jax.data.suites.needle:prepare",
    suite="recall",
    sweeps=rate_sweeps(needle.RATES),
    by_parts=True,
    chance=lambda data: 100 / (data.vocab_size - 2),
)
