"""Control: a decision transformer learns from episodes, and is scored by acting."""

from lra_jax.configs import control
from lra_jax.tasks.task import Task

TASK = Task(
    name="control",
    data=control.ControlData,
    presets=control.PRESETS,
    reader="lra_jax.data.control:prepare",
    model="lra_jax.tasks.acting:make_model",
    objective="lra_jax.tasks.acting:loss",
    scores="lra_jax.tasks.acting:scores",
    per_position=True,
    is_causal=True,
    suite="kinds",
    sweeps={preset: {} for preset in control.PRESETS},
)
