"""The tasks of the Long-Range Arena; the trainer knows no particular one.

A task is a file in ``data/``, a file of presets in ``configs/``, a file here, and a
line in ``TASKS`` and in ``configs.PRESETS``. What they agree on:

**Examples.** A task's builder (``lra_jax.data.builder``) yields, for each example,
``(tokens, label)``: ``uint8 [length]`` and an int. Token ids, bytes and pixels alike
are stored as they are, from 0; the true length tells padding from data, so no id is
set aside for it. The builder names ``VOCAB_SIZE`` (256 for bytes and pixels) and
``NUM_CLASSES``. Splits are train, valid and test.

**Images** are read row by row, ``uint8 [rows * columns]``, black 0, all of one size,
which the builder's config gives as ``image_shape=(rows, columns)``: that is what
``positions=learned_2d`` and the contact sheets of ``python -m lra_jax.data sample``
go by. ``max_length`` and ``--model.max_length`` are ``rows * columns``.

**Pairs** are ``(tokens_1, tokens_2, label)``, with ``SEQUENCES = ("tokens_1",
"tokens_2")`` in the builder.

A file here then needs only::

    TASK = Task(
        name="image",
        check=check_image,
        prepare=lambda config: cifar.prepare(config.data.dir, path=config.data.path),
        make_model=make_classifier,          # pairs: make_matcher
        loss=classification_loss,            # pairs: matching_loss
        is_official=lambda config, dataset: dataset.num_examples("test") == 10_000,
        floors=(("chance", 10.0),),
        published=published("image"),
    )
"""

from lra_jax.errors import known
from lra_jax.tasks import image, listops, pathfinder, retrieval, text
from lra_jax.tasks.base import (
    Batch,
    Sums,
    Task,
    classification_loss,
    make_classifier,
    make_matcher,
    matching_loss,
)
from lra_jax.tasks.checks import check_config, parse_options
from lra_jax.tasks.published import Published

__all__ = [
    "TASKS",
    "Batch",
    "Published",
    "Sums",
    "Task",
    "check_config",
    "classification_loss",
    "get_task",
    "make_classifier",
    "make_matcher",
    "matching_loss",
    "parse_options",
]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(listops.TASK, text.TASK, retrieval.TASK, image.TASK),
        *pathfinder.TASKS,
    )
}


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
      ValueError: unknown, with the nearest name.
    """
    return TASKS[known("--task", name, TASKS)]
