"""Text: IMDb reviews byte by byte, two classes."""

from lra_jax.configs import text
from lra_jax.tasks.published import published
from lra_jax.tasks.task import Task

TASK = Task(
    name="text",
    data=text.TextData,
    presets=text.PRESETS,
    reader="lra_jax.data.text:prepare",
    is_official=lambda data, dataset: dataset.num_examples("test") == 25_000,
    floors=(("chance", 50.0),),
    published=published("text"),
)
