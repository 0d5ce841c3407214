"""Pallas kernels of linear attention, cosFormer and Flow for TPUs and Hopper GPUs.

``linear_attention``, ``cosformer_attention`` and ``flow_attention`` use these kernels
automatically where they run (`choose`), and always with ``implementation="pallas"``.
Importing this package does not import Pallas. For the design, and how far it has been
tested, see docs/kernels.md.
"""

from lra_jax.kernels.api import attend, attend_flow, has_flow
from lra_jax.kernels.selection import (
    INTERPRET,
    Implementation,
    Refusal,
    Target,
    choose,
)
from lra_jax.kernels.spec import MAPS as FEATURE_MAPS

__all__ = [
    "FEATURE_MAPS",
    "INTERPRET",
    "Implementation",
    "Refusal",
    "Target",
    "attend",
    "attend_flow",
    "choose",
    "has_flow",
]
