"""Multi-query associative recall: the value of each key, queried later."""

from lra_jax.configs import mqar
from lra_jax.tasks.task import of_rates, synthetic

TASK = synthetic(
    "mqar",
    data=mqar.MqarData,
    presets=mqar.PRESETS,
    reader="lra_jax.data.suites.mqar:prepare",
    suite="recall",
    sweeps=of_rates(mqar.RATES),
    chance=lambda data: 100 / (data.vocab_size - data.vocab_size // 2),
    is_official=lambda data, _: (
        data.of_reader in (mqar.OFFICIAL.of_reader, mqar.FIGURE2.of_reader)
    ),
)
