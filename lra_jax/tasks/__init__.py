"""The tasks of the Long-Range Arena; the trainer knows no particular one.

A task is an entry, `Task`, and one line in `lra_jax.configs.registry.TASKS` that says
where the entry is. An entry is a file here; those of the Long-Range Arena have their
presets, with their sources, and the dataclass of their ``--data.*`` settings in a file
of ``configs/``, and their reader in a file of ``data/``. They agree on this:

**Examples.** A task's builder (``lra_jax.data.builder``) yields, for each example,
``(tokens, label)``: ``uint8 [length]`` and an int. Token ids, bytes and pixels alike
are stored as they are, from 0; the true length tells padding from data, so no id is
set aside for it. The builder names ``VOCAB_SIZE`` (256 for bytes and pixels) and
``NUM_CLASSES``. Splits are train, valid and test.

**Text** of language models is laid into rows of one length before it is batched. A
batch has ``tokens``, ``segment_ids`` and ``labels``, which its dataset makes
(``lra_jax.data.language.rows``).

**Images** are read row by row, ``uint8 [rows * columns]``, black 0, all of one size,
which both the entry and the builder's config give as ``image_shape=(rows, columns)``:
``positions=learned_2d`` and the contact sheets of ``python -m lra_jax.data sample`` go
by it. ``--model.max_length`` is ``rows * columns``.

**Pairs** are ``(tokens_1, tokens_2, label)``, with ``SEQUENCES = ("tokens_1",
"tokens_2")`` in the builder, and the model and objective for pairs in the entry.

`lra_jax/tasks/image.py` is a short entry.

Importing this package imports no jax.
"""

from lra_jax.configs import TASKS
from lra_jax.configs.registry import find_task
from lra_jax.tasks.published import Published
from lra_jax.tasks.task import Task

__all__ = ["TASKS", "Published", "Task", "get_task", "suites"]


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
      ValueError: unknown, with the nearest name.
    """
    return find_task(name)


def suites() -> dict[str, list[Task]]:
    """The tasks that are tests of one suite, by its name."""
    found: dict[str, list[Task]] = {}
    for task in map(get_task, TASKS):
        if task.suite is not None:
            found.setdefault(task.suite, []).append(task)
    return found
