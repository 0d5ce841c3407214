"""Images: a class for each, by a hierarchical model with any attention."""

from lra_jax.configs import images
from lra_jax.tasks.published import rows_of
from lra_jax.tasks.task import Task

TASK = Task(
    name="images",
    data=images.ImagesData,
    presets=images.PRESETS,
    reader="lra_jax.data.images:prepare",
    suite="kinds",
    sweeps={preset: {} for preset in images.PRESETS},
    is_official=lambda data, dataset: (
        (dataset.num_classes, dataset.num_examples("test")) == (1_000, 50_000)
    ),
    published=rows_of(
        "Wu et al. 2022, arXiv:2202.06258, ImageNet-1K",
        [
            ("full attention", 78.7, "softmax"),
            ("Linear Transformer", 79.0, "linear"),
            ("Reformer", 79.6, "reformer"),
            ("Longformer", 77.6, "longformer"),
            ("Performer", 78.1, "performer"),
            ("cosFormer", 68.3, "cosformer"),
            ("Flowformer", 80.6, "flow"),
        ],
    ),
)
