"""Text: IMDb reviews byte by byte, two classes."""

from typing import Any

from lra_jax.configs import text
from lra_jax.tasks.published import published
from lra_jax.tasks.task import Task, has_sizes


def _is_official(_: text.TextData, dataset: Any) -> bool:
    """All 50,000 reviews: validated on the test split, as in LRA, or on a tenth."""
    return has_sizes(dataset, train=25_000, valid=25_000, test=25_000) or has_sizes(
        dataset, train=22_500, valid=2_500, test=25_000
    )


TASK = Task(
    name="text",
    data=text.TextData,
    presets=text.PRESETS,
    reader="lra_jax.data.text:prepare",
    can_pack=True,
    is_official=_is_official,
    floors=(("chance", 50.0),),
    published=published("text"),
)
