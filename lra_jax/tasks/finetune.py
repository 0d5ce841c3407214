"""Fine-tuning: the classes of texts, from a masked language model."""

from lra_jax.configs import finetune
from lra_jax.tasks.task import Task

TASK = Task(
    name="finetune",
    data=finetune.FinetuneData,
    presets=finetune.PRESETS,
    reader="lra_jax.tasks.language:prepare_texts",
    model="lra_jax.tasks.language:make_finetuned",
    suite="language",
    sweeps={name: {"train.learning_rate": x} for name, x in finetune.RATES.items()},
)
