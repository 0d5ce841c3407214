"""Linear-complexity attention in JAX/Flax, evaluated on the Long-Range Arena.

``lra_jax.attention`` holds pure functions, ``lra_jax.models`` the Flax NNX modules
around them, and ``python -m lra_jax.train --task=listops`` trains and scores a model.
Importing the package alone imports neither jax nor flax, so that ``--help`` is quick;
its subpackages are imported on first use.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_FOLDERS = ("analysis", "attention", "configs", "data", "models", "tasks", "training")


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"lra_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FOLDERS])
