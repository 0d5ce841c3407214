"""ListOps trees, generated all at once."""

import numpy as np

from lra_jax.data.listops_language import Grammar
from lra_jax.data.listops_trees import Trees, iterate


def generate(seed, count, *, processes=None, **grammar):
    batches = iterate(seed, count, Grammar(**grammar), processes)
    return Trees(*map(np.concatenate, zip(*batches, strict=True)))
