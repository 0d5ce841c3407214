"""Kernels of linear attention, cosFormer, Flow-Attention and others like them.

For TPUs and Hopper GPUs they are written in Pallas, for CPUs in C++ (`cpu`). The
mechanisms whose entries have ``kernels`` use them automatically where they run and are
faster (`choose`), and always with ``implementation="pallas"`` or ``"native"``.
Importing this package imports no Pallas and compiles nothing. For the design, and how
far it has been tested, see docs/kernels.md.
"""

from lra_jax.kernels.api import (
    attend,
    attend_flow,
    attend_recurrent,
    scan,
)
from lra_jax.kernels.mesh import by_sample
from lra_jax.kernels.selection import (
    INTERPRET,
    Implementation,
    Refusal,
    Target,
    choose,
)
from lra_jax.kernels.spec import MAPS as FEATURE_MAPS
from lra_jax.kernels.spec import Inputs, Weighting

__all__ = [
    "FEATURE_MAPS",
    "INTERPRET",
    "Implementation",
    "Inputs",
    "Refusal",
    "Target",
    "Weighting",
    "attend",
    "attend_flow",
    "attend_recurrent",
    "by_sample",
    "choose",
    "scan",
]
