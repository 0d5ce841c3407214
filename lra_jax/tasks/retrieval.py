"""Retrieval: pairs of papers byte by byte, two classes."""

from lra_jax.configs import retrieval
from lra_jax.tasks.published import published
from lra_jax.tasks.task import Task, has_sizes

TASK = Task(
    name="retrieval",
    data=retrieval.RetrievalData,
    presets=retrieval.PRESETS,
    reader="lra_jax.data.retrieval:prepare",
    model="lra_jax.tasks.base:make_matcher",
    pairs=True,
    is_official=lambda data, dataset: has_sizes(
        dataset, train=147_086, valid=18_090, test=17_437
    ),
    floors=(("chance", 50.0),),
    published=published("retrieval"),
)
