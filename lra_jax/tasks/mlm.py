"""Masked language modelling: the hidden bytes of a text."""

from lra_jax.configs import mlm
from lra_jax.tasks.task import Task

TASK = Task(
    name="mlm",
    data=mlm.MlmData,
    presets=mlm.PRESETS,
    reader="lra_jax.data.language.prepare:prepare",
    reader_settings={"slides": False},
    model="lra_jax.tasks.language:make_masked",
    objective="lra_jax.tasks.language:hidden_token_loss",
    scores="lra_jax.tasks.language:hidden_token_scores",
    per_position=True,
    packs_rows=True,
    suite="language",
    sweeps={name: {"train.learning_rate": x} for name, x in mlm.RATES.items()},
)
