"""Masked language modelling: the masked bytes of a text."""

from lra_jax.configs import lm, mlm
from lra_jax.tasks.task import Task, rate_sweeps

TASK = Task(
    name="mlm",
    data=lm.LmData,
    presets=mlm.PRESETS,
    reader="lra_jax.data.language.prepare:prepare",
    reader_settings={"slides": False},
    model="lra_jax.tasks.base:make_masked",
    objective="lra_jax.tasks.language:hidden_token_loss",
    scores="lra_jax.tasks.language:hidden_token_scores",
    per_position=True,
    packs_rows=True,
    suite="language",
    sweeps=rate_sweeps(mlm.RATES),
)
