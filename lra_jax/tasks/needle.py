"""The needle: one token to find in a noise that grows beyond what was trained on."""

from lra_jax.configs import needle
from lra_jax.tasks.task import Task

TASK = Task(
    name="needle",
    data=needle.NeedleData,
    presets=needle.PRESETS,
    reader="lra_jax.data.suites.needle:prepare",
    model="lra_jax.tasks.base:make_token_classifier",
    objective="lra_jax.tasks.base:token_loss",
    per_position=True,
    suite="recall",
    sweeps={name: {"train.learning_rate": x} for name, x in needle.RATES.items()},
    chance=lambda data: 100 / (data.vocab_size - 2),
    decoder="lra_jax.data.memory:decode",
)
