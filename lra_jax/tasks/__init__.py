"""The tasks of the Long-Range Arena; the trainer knows no particular one.

A task is an entry, `Task`, and one line in `lra_jax.configs.registry.TASKS` that
locates it. Each entry is a file here. For the Long-Range Arena, a file of ``configs/``
has the presets, with their sources, and the dataclass of the ``--data.*`` settings, and
a file of ``data/`` has the reader. They agree on the following:

**Examples.** A task's builder (``lra_jax.data.builder``) yields, for each example,
``(tokens, label)``: ``uint8 [length]`` and an int. Token ids, bytes and pixels alike
are stored unchanged, from 0; the true length distinguishes padding from data, so no id
need be reserved for it (ListOps reserves 0 all the same). The builder defines
``VOCAB_SIZE`` (256 for bytes and pixels) and ``NUM_CLASSES``. Splits are train, valid
and test.

**Text** for language models is arranged in rows of one length before it is batched. The
dataset (``lra_jax.data.language.rows``) makes a batch with ``tokens``, ``segment_ids``
and ``labels``.

**Images** are read row by row, ``uint8 [rows * columns]``, black 0, all of one size.
The entry and the builder's config both give it as ``image_shape=(rows, columns)``,
or the data settings, where they decide on it (``lra_jax.configs.images``),
which ``positions=learned_2d`` and the contact sheets of ``python -m lra_jax.data
sample`` rely on. ``--model.max_length`` is ``rows * columns``.

**Pairs** are ``(tokens_1, tokens_2, label)``, with ``SEQUENCES = ("tokens_1",
"tokens_2")`` in the builder, and ``pairs=True`` and the model for pairs in the entry.

**Packing.** ``can_pack=True`` says that model and objective, such as the default ones,
take rows of several examples; without it ``--data.packing`` is refused.

`lra_jax/tasks/image.py` is a short entry.

Importing this package does not import jax.
"""

from lra_jax.configs import TASKS
from lra_jax.configs.registry import find_task
from lra_jax.tasks.published import Published
from lra_jax.tasks.task import Task

__all__ = ["TASKS", "Published", "Task", "get_task", "suites"]


def get_task(name: str) -> Task:
    """The task with this name.

    Raises:
      ValueError: unknown name; the error suggests the nearest one.
    """
    return find_task(name)


def suites() -> dict[str, list[Task]]:
    """The tasks of each suite of tests, by the suite's name."""
    members: dict[str, list[Task]] = {}
    for task in map(get_task, TASKS):
        if task.suite is not None:
            members.setdefault(task.suite, []).append(task)
    return members
