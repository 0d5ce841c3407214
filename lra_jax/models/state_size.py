"""How much a decoder remembers from one position to the next."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import attention
from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.encoder import TransformerEncoder


def state_size(encoder: TransformerEncoder) -> int | None:
    """Numbers that the mechanisms of all blocks keep for one sequence.

    Softmax attention keeps every key and value, and is counted for ``max_length``
    positions. A short convolution keeps a few rows more, which are not counted.

    Returns:
      The count; None for a mechanism without a stream.
    """
    layers = [
        part
        for block in encoder.blocks
        for part in (block.attention, block.mlp)
        if isinstance(part, MultiHeadAttention)
    ]
    sizes = [_layer_size(layer) for layer in layers]
    return None if None in sizes else sum(filter(None, sizes))


def _layer_size(layer: MultiHeadAttention) -> int | None:
    mechanism = layer.mechanism
    if not mechanism.stream:
        return None
    init = getattr(attention, f"{mechanism.name}_init")
    given: dict[str, Any] = {"max_length": layer.config.max_length}
    given |= layer.config.keywords
    given |= {name: array[...] for name, array in layer.parameters.items()}
    taken = inspect.signature(init).parameters
    options = {name: value for name, value in given.items() if name in taken}
    state = jax.eval_shape(
        lambda: init(1, layer.num_heads, layer.head_dim, layer.value_dim, **options)
    )
    arrays = jax.tree.leaves(state)
    return sum(x.size for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))
