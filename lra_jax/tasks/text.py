"""Text: IMDb reviews byte by byte, two classes."""

from lra_jax.configs import Config
from lra_jax.data import text
from lra_jax.data.dataset import SequenceDataset
from lra_jax.tasks.base import Task, classification_loss, make_classifier
from lra_jax.tasks.checks import check_config, check_lengths
from lra_jax.tasks.published import published


def _check(config: Config) -> None:
    check_config(config, holds_out=True)
    check_lengths(config)


def _prepare(config: Config) -> SequenceDataset:
    data = config.data
    return text.prepare(
        data.dir,
        path=data.path,
        max_length=data.max_length,
        validation=data.validation,
        seed=data.seed,
    )


def _is_official(_: Config, dataset: SequenceDataset) -> bool:
    return dataset.num_examples("test") == 25_000


TASK = Task(
    name="text",
    check=_check,
    prepare=_prepare,
    make_model=make_classifier,
    loss=classification_loss,
    is_official=_is_official,
    floors=(("chance", 50.0),),
    published=published("text"),
)
