"""ListOps: the value of a nested expression, ten classes."""

from lra_jax.configs import Config, DataConfig
from lra_jax.data import listops
from lra_jax.data.dataset import SequenceDataset
from lra_jax.tasks.base import Task, classification_loss, make_classifier
from lra_jax.tasks.checks import check_config, check_lengths
from lra_jax.tasks.published import published


def _check(config: Config) -> None:
    check_config(config)
    # Trees are shorter than data.max_length, but batches may be padded to it.
    if config.data.path is None:
        check_lengths(config)


def _prepare(config: Config) -> SequenceDataset:
    data = config.data
    return listops.prepare(
        data.dir,
        seed=data.seed,
        num_train=data.num_train,
        num_valid=data.num_valid,
        num_test=data.num_test,
        min_length=data.min_length,
        max_length=data.max_length,
        max_depth=data.max_depth,
        max_args=data.max_args,
        processes=data.processes,
        path=data.path,
    )


def _is_official(config: Config, _: SequenceDataset) -> bool:
    grammar = ("min_length", "max_length", "max_depth", "max_args")
    default = DataConfig()
    return config.data.path is not None or all(
        getattr(config.data, name) == getattr(default, name) for name in grammar
    )


TASK = Task(
    name="listops",
    check=_check,
    prepare=_prepare,
    make_model=make_classifier,
    loss=classification_loss,
    is_official=_is_official,
    floors=(
        ("majority class", 17.05),
        ("root operator alone, best possible", 36.6),
    ),
    published=published("listops"),
    decode=listops.decode,
)
