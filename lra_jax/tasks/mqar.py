"""Multi-query associative recall: the value of each key, asked for later."""

from lra_jax.configs import mqar
from lra_jax.tasks.task import Task

TASK = Task(
    name="mqar",
    data=mqar.MqarData,
    presets=mqar.PRESETS,
    reader="lra_jax.data.suites.mqar:prepare",
    model="lra_jax.tasks.base:make_token_classifier",
    objective="lra_jax.tasks.base:token_loss",
    per_position=True,
    suite="recall",
    sweeps={name: {"train.learning_rate": x} for name, x in mqar.RATES.items()},
    chance=lambda data: 100 / (data.vocab_size - data.vocab_size // 2),
    is_official=lambda data, _: data in (mqar.OFFICIAL, mqar.FIGURE2),
    decoder="lra_jax.data.memory:decode",
)
