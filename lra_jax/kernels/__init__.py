"""Pallas kernels of linear attention, cosFormer and Flow for TPUs and Hopper GPUs.

``linear_attention``, ``cosformer_attention`` and ``flow_attention`` come here by
themselves where a kernel runs (`choose`), and always with
``implementation="pallas"``. Importing this package does not import Pallas. The design,
what is proven and what is not measured stand in
docs/kernels.md.
"""

from lra_jax.kernels.api import attend
from lra_jax.kernels.flow import attend_flow
from lra_jax.kernels.selection import (
    INTERPRET,
    Implementation,
    choose,
)

__all__ = [
    "INTERPRET",
    "Implementation",
    "attend",
    "attend_flow",
    "choose",
]
