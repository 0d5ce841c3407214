"""Image: CIFAR-10 in grey as a sequence of pixels, ten classes."""

from lra_jax.configs import StoredData, image
from lra_jax.tasks.published import published
from lra_jax.tasks.task import Task, has_sizes

TASK = Task(
    name="image",
    data=StoredData,
    presets=image.PRESETS,
    reader="lra_jax.data.image:prepare",
    image_shape=(32, 32),
    is_official=lambda data, dataset: has_sizes(
        dataset, train=45_000, valid=5_000, test=10_000
    ),
    floors=(("chance", 10.0),),
    published=published("image"),
)
