"""Pallas kernels for linear attention and cosFormer: TPUs and Hopper GPUs.

``linear_attention`` and ``cosformer_attention`` come here by themselves where a kernel
runs (`choose`), and always with ``implementation="pallas"``. Importing this package
does not import Pallas. The design, what is proven and what is not measured stand in
docs/kernels.md.
"""

from lra_jax.attention.pallas.api import attend
from lra_jax.attention.pallas.selection import INTERPRET, Implementation, choose

__all__ = ["INTERPRET", "Implementation", "attend", "choose"]
