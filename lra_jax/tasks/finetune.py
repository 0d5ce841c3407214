"""Fine-tuning: labels of texts, from a masked language model."""

from lra_jax.configs import finetune
from lra_jax.tasks.task import Task, rate_sweeps

TASK = Task(
    name="finetune",
    data=finetune.FinetuneData,
    presets=finetune.PRESETS,
    reader="lra_jax.tasks.language:prepare_texts",
    model="lra_jax.tasks.language:make_finetuned",
    objective="lra_jax.tasks.base:supervised_loss",
    scores="lra_jax.tasks.base:regression_scores",
    can_pack=True,
    suite="language",
    sweeps=rate_sweeps(finetune.RATES),
)
