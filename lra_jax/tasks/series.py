"""Time series: a class or a number for each, as the labels of the data say."""

from typing import TYPE_CHECKING, Any

from lra_jax.configs import series
from lra_jax.configs.base import Config
from lra_jax.tasks.published import rows_of
from lra_jax.tasks.task import Task, has_sizes

if TYPE_CHECKING:
    from lra_jax.data.series import SeriesDataset


def make_model(config: Config, dataset: "SeriesDataset", rngs: Any) -> Any:
    """A classifier as long as the data: its head has weights for each step."""
    from lra_jax.tasks.base import make_classifier

    sized = config.replace(model={"max_length": dataset.max_length})
    return make_classifier(sized, dataset, rngs)


TASK = Task(
    name="series",
    data=series.SeriesData,
    presets=series.PRESETS,
    reader="lra_jax.data.series:prepare",
    model="lra_jax.tasks.series:make_model",
    objective="lra_jax.tasks.base:supervised_loss",
    scores="lra_jax.tasks.base:regression_scores",
    can_pack=True,
    suite="kinds",
    sweeps={preset: {} for preset in series.PRESETS},
    is_official=lambda data, dataset: (
        (data.path, data.max_length, data.validation) == (None, None, "test")
        and has_sizes(dataset, train=270, valid=370, test=370)
    ),
    published=rows_of(
        "Wu et al. 2022, arXiv:2202.06258, best epoch on the test split",
        [
            ("Transformer", 98.7, "softmax"),
            ("Linear Transformer", 99.2, "linear"),
            ("Reformer", 97.8, "reformer"),
            ("Longformer", 98.9, "longformer"),
            ("Performer", 98.1, "performer"),
            ("cosFormer", 99.2, "cosformer"),
            ("Flowformer", 98.9, "flow"),
        ],
    ),
)
