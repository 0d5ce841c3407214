"""Retrieval: pairs of papers byte by byte, two classes."""

from lra_jax.configs import Config
from lra_jax.data import retrieval
from lra_jax.data.dataset import SequenceDataset
from lra_jax.tasks.base import Task, make_matcher, matching_loss
from lra_jax.tasks.checks import check_config, check_lengths
from lra_jax.tasks.published import published


def _check(config: Config) -> None:
    check_config(config)
    check_lengths(config)


def _prepare(config: Config) -> SequenceDataset:
    data = config.data
    return retrieval.prepare(data.dir, path=data.path, max_length=data.max_length)


def _is_official(_: Config, dataset: SequenceDataset) -> bool:
    return dataset.num_examples("test") == 17_437


TASK = Task(
    name="retrieval",
    check=_check,
    prepare=_prepare,
    make_model=make_matcher,
    loss=matching_loss,
    is_official=_is_official,
    floors=(("chance", 50.0),),
    published=published("retrieval"),
)
