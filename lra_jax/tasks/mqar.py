"""Multi-query associative recall: the value of each key, queried later."""

from lra_jax.configs import mqar
from lra_jax.tasks.task import rate_sweeps, synthetic

TASK = synthetic(
    "mqar",
    data=mqar.MqarData,
    presets=mqar.PRESETS,
    reader="lra_jax.data.suites.mqar:prepare",
    suite="recall",
    sweeps=rate_sweeps(mqar.RATES),
    chance=lambda data: 100 / (data.vocab_size - data.vocab_size // 2),
    is_official=lambda data, _: (
        data.reader_arguments
        in [one.reader_arguments for one in (mqar.OFFICIAL, mqar.FIGURE2)]
    ),
)
