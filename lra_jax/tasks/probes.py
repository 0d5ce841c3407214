"""Whether a user's attention heeds its mask, ``is_causal`` and ``segment_ids``.

A function with ``**keywords`` accepts all three, and may ignore them. So its layer is
called on small inputs that differ only at positions that it must not see, if it accepts
inputs of that size.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.errors import expected
from lra_jax.models import ModelConfig
from lra_jax.models.encoder import make_attention

_SMALL = 16  # Positions in a small input.


def check_heeds(
    config: ModelConfig, index: int, length: int, padded: bool, packs: bool
) -> None:
    """Tests an attention that this package did not write.

    Args:
      config: of the encoder.
      index: a block with this attention.
      length: the longest sequence of the run.
      padded: the run has padding, and the attention takes a mask; if it attends to
        padding all the same, there is a warning.
      packs: the run has several documents in a row.

    Raises:
      ValueError: with ``is_causal=True`` it sees later positions, or with
        ``segment_ids`` other documents.
    """
    name = config.block_mechanism(index).name
    sees = functools.partial(_sees, config, index)
    length = min(length, _SMALL)
    first = np.arange(length) < (length + 1) // 2
    # If it takes no mask, the layer itself warns.
    if padded and sees(first, mask=first):
        words = f"attention {name!r} takes a mask, but attends to padding"
        warnings.warn(words, stacklevel=2)
    if config.is_causal and sees(first):
        needed = "one that, with is_causal=True, sees no later positions"
        raise expected("--attention", needed, f"{name!r}, which sees them")
    if packs:
        documents = np.where(first, 1, 2)
        if any(sees(visible, segment_ids=documents) for visible in (first, ~first)):
            needed = "one that, with segment_ids, sees no other documents"
            raise expected("--attention", needed, f"{name!r}, which sees them")


def _sees(
    config: ModelConfig, index: int, visible: np.ndarray, **keywords: np.ndarray
) -> bool:
    """Whether outputs at visible positions depend on the inputs at the others."""
    shape = (2, visible.size, config.at(index).embed_dim)

    @jax.jit
    def outputs(inputs: jax.Array) -> jax.Array:
        layer = make_attention(config, index, nnx.Rngs(0))
        arrays: Any = {
            name: jnp.broadcast_to(array, shape[:2]) for name, array in keywords.items()
        }
        out = layer(inputs, **arrays)
        return jnp.where(visible[:, None], out.astype(jnp.float32), 0)

    noise, other = jax.random.normal(jax.random.key(0), (2, *shape), config.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            one = np.asarray(outputs(noise))
            two = np.asarray(outputs(jnp.where(visible[:, None], noise, other)))
    except Exception:  # It need not accept small inputs, only the run's shapes.
        return False
    finite = np.isfinite(one).all() and np.isfinite(two).all()
    bound = 1e-3 * np.abs(one).max()
    return bool(finite and not np.allclose(one, two, rtol=1e-2, atol=bound))
