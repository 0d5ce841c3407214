"""MAD's compression (Poli et al. 2024, arXiv:2403.17844).

Random tokens, followed by a special token. The model must compress all of them into the
vector of that last position, from which a small decoder reconstructs every token
(`lra_jax.models.tokens.AutoEncoder`).

Source: athms/mad-lab, mad/data/instances.py. As there, the last token is also a target.
"""

import numpy as np

from lra_jax.data import memory
from lra_jax.errors import expected


def examples(
    rng: np.random.Generator, count: int, *, vocab_size: int, length: int
) -> memory.Examples:
    """Draws sequences."""
    for name, given in (("vocab_size", vocab_size), ("length", length)):
        if given < 2:
            raise expected(f"--data.{name}", "at least 2", given)
    tokens = rng.integers(vocab_size - 1, size=(count, length))
    tokens[:, -1] = vocab_size - 1
    return memory.whole(tokens, tokens)
