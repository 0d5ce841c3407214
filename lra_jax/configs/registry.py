"""The list of all tasks by name.

A task is one line of `TASKS`: the location of its entry, a `lra_jax.tasks.Task`, which
gives access to everything about it. Entries are imported when first needed, and do not
import jax, so that command lines are quick.
"""

import dataclasses
import pkgutil
from typing import Any

from lra_jax.attention import outside
from lra_jax.errors import a_thing, expected, known

TASKS = {
    "listops": "lra_jax.tasks.listops:TASK",
    "text": "lra_jax.tasks.text:TASK",
    "retrieval": "lra_jax.tasks.retrieval:TASK",
    "image": "lra_jax.tasks.image:TASK",
    "pathfinder": "lra_jax.tasks.pathfinder:PATHFINDER",
    "pathfinder64": "lra_jax.tasks.pathfinder:PATHFINDER64",
    "pathx": "lra_jax.tasks.pathfinder:PATHX",
    "path256": "lra_jax.tasks.pathfinder:PATH256",
    "series": "lra_jax.tasks.series:TASK",
    "control": "lra_jax.tasks.control:TASK",
    "images": "lra_jax.tasks.images:TASK",
    "mqar": "lra_jax.tasks.mqar:TASK",
    "needle": "lra_jax.tasks.needle:TASK",
    "mad-compress": "lra_jax.tasks.mad:COMPRESS",
    "mad-fuzzy-recall": "lra_jax.tasks.mad:FUZZY_RECALL",
    "mad-recall": "lra_jax.tasks.mad:RECALL",
    "mad-memorise": "lra_jax.tasks.mad:MEMORISE",
    "mad-noisy-recall": "lra_jax.tasks.mad:NOISY_RECALL",
    "mad-selective-copy": "lra_jax.tasks.mad:SELECTIVE_COPY",
    "parity": "lra_jax.tasks.state:PARITY",
    "modular": "lra_jax.tasks.state:MODULAR",
    "modular-brackets": "lra_jax.tasks.state:MODULAR_BRACKETS",
    "s5": "lra_jax.tasks.state:S5",
    "a5": "lra_jax.tasks.state:A5",
    "lm": "lra_jax.tasks.lm:TASK",
    "mlm": "lra_jax.tasks.mlm:TASK",
    "finetune": "lra_jax.tasks.finetune:TASK",
}


def find_task(name: str, allow_code: bool = True) -> Any:
    """The entry of a task.

    Args:
      name: in `TASKS`, or ``package.module:TASK`` for a user's own task.
      allow_code: False refuses the latter, unless this process was told to import it
        before: whoever wrote a file with this name chose the code.

    Raises:
      ValueError: unknown name, where the error suggests the nearest one; or a task that
        cannot be imported, is not a `Task`, or is not allowed.
    """
    if ":" not in name:
        return pkgutil.resolve_name(TASKS[known("--task", name, TASKS)])
    if not allow_code and name not in _ALLOWED:
        raise expected("--allow-code", f"True to import the task {name!r}", False)
    task = outside.load(name, "--task")
    if not isinstance(task, pkgutil.resolve_name("lra_jax.tasks:Task")):
        raise expected("--task", f"{name!r} to be a lra_jax.tasks.Task", a_thing(task))
    _ALLOWED.add(name)
    return dataclasses.replace(task, name=name)


_ALLOWED: set[str] = set()
"""The user's own tasks that this process has imported."""
