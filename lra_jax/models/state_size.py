"""How much a decoder remembers from one position to the next."""

import jax
import jax.numpy as jnp

from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.encoder import VectorEncoder


def state_size(encoder: VectorEncoder) -> int | None:
    """Count of the numbers that the mechanisms of all blocks keep for one sequence.

    Softmax attention keeps every key and value, counted here for ``max_length``
    positions. A short convolution keeps a few more rows, which are not counted.

    Returns:
      The count; None if a layer has no stream: it is not causal, or its mechanism has
      none.
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
    if not (mechanism.stream and layer.is_causal):
        return None
    if mechanism.find("prefill") is None:
        return None
    state = jax.eval_shape(lambda: layer.init_state(1).mechanism)
    arrays = jax.tree.leaves(state)
    return sum(x.size for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))
