"""Image: CIFAR-10 in grey as a sequence of pixels, ten classes."""

from lra_jax.configs import Config
from lra_jax.data import image
from lra_jax.data.dataset import SequenceDataset
from lra_jax.tasks.base import Task, classification_loss, make_classifier
from lra_jax.tasks.checks import check_config, check_image_size
from lra_jax.tasks.published import published


def _check(config: Config) -> None:
    check_config(config, images=True)
    check_image_size(config, *image.SHAPE)


def _prepare(config: Config) -> SequenceDataset:
    return image.prepare(config.data.dir, path=config.data.path)


def _is_official(_: Config, dataset: SequenceDataset) -> bool:
    return dataset.num_examples("test") == 10_000


TASK = Task(
    name="image",
    check=_check,
    prepare=_prepare,
    make_model=make_classifier,
    loss=classification_loss,
    is_official=_is_official,
    floors=(("chance", 10.0),),
    published=published("image"),
)
