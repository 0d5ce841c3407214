"""Language modelling: the next byte of a text."""

from lra_jax.configs import lm
from lra_jax.tasks.task import Task, rate_sweeps

TASK = Task(
    name="lm",
    data=lm.LmData,
    presets=lm.PRESETS,
    reader="lra_jax.data.language.prepare:prepare",
    model="lra_jax.tasks.base:make_causal",
    objective="lra_jax.tasks.language:next_token_loss",
    scores="lra_jax.tasks.language:next_token_scores",
    per_position=True,
    packs_rows=True,
    is_causal=True,
    suite="language",
    sweeps=rate_sweeps(lm.RATES),
)
