"""A causal language model applied to a sequence part by part.

    logits, state = prefill(model, prompts, mask=mask)   # of the next token, [B, V]
    logits, state = step(model, state, tokens)           # tokens [B]

The logits equal those of the model applied to the whole sequence at once. The state
holds that of `lra_jax.models.stream` for every block: a tree of arrays whose size does
not depend on the position, unless the mechanism keeps every key, as softmax does.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention.inputs import check_shape
from lra_jax.attention.masking import check_mask
from lra_jax.errors import expected
from lra_jax.models import stream
from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.encoder import TransformerEncoder, VectorEncoder
from lra_jax.models.inputs import embed_inputs, known_values
from lra_jax.models.language import CausalLM
from lra_jax.models.layers import rows_at, take_rows
from lra_jax.models.padding import order_real_first, reorder


class DecoderState(NamedTuple):
    """The past that a decoder keeps; the first axis of every array is the batch."""

    layers: list[Any]  # of every attention layer, in order
    position: jax.Array  # of the next token, [B] int32


def longest(model: CausalLM) -> int | None:
    """Longest sequence that the model can continue to, in tokens; None = no limit.

    Position tables, rotations, cosFormer's M and the cache of softmax attention all end
    at ``max_length``; a mechanism with none of these can continue indefinitely.
    """
    config = model.encoder.config
    if config.positions != "none":
        return config.max_length
    for mechanism in config.turn:
        run = mechanism.find("prefill")
        if run is None or "max_length" in inspect.signature(run).parameters:
            return config.max_length
    return None


def prefill(
    model: CausalLM,
    tokens: jax.Array,
    *,
    mask: jax.Array | None = None,
    state: DecoderState | None = None,
) -> tuple[jax.Array, DecoderState]:
    """Reads a prompt, or its next part, in one pass.

    Args:
      model: a model whose mechanism has a stream.
      tokens: integer `[B, T]`.
      mask: boolean `[B, T]`, True at real tokens; padding may be anywhere in a row.
        Each has at least one real token.
      state: the state after the earlier parts; None = there are none.

    Returns:
      float32 logits `[B, V]` of the token after each sample's last, and the state.

    Raises:
      ValueError: the model cannot be streamed, shapes do not fit, the prompt reaches
        beyond what `longest` says, or a mask that is known (not traced) hides all
        tokens of a prompt.
    """
    check_shape("tokens", tokens, "B T", None, None)
    batch, length = tokens.shape
    if not length:
        raise expected("tokens", "at least one position", f"shape {tokens.shape}")
    mask = check_mask("mask", mask, "B T", batch, length)
    real = jnp.ones_like(tokens, bool) if mask is None else mask
    counts = real.sum(1, dtype=jnp.int32)
    if mask is not None:
        known = known_values(mask)
        if known is not None and not known.any(1).all():  # No token is the next.
            needed = "at least one real token of each prompt"
            raise expected("mask", needed, "a row of padding")
        order, _ = order_real_first(mask)
        tokens, mask = reorder(tokens, order), reorder(mask, order)
    used = length if mask is None else counts
    stream.check_room("tokens", state, used, longest(model))
    encoder = model.encoder
    x, position = _embed(encoder, tokens, state)
    x, layers = prefill_blocks(
        encoder, x, mask, None if state is None else state.layers
    )
    last = rows_at(x, counts[:, None] - 1)[:, 0]
    position = (position + counts).astype(jnp.int32)
    return model.compute_logits(last.astype(jnp.float32)), DecoderState(
        layers, position
    )


def prefill_blocks(
    encoder: VectorEncoder,
    x: jax.Array,
    mask: jax.Array | None = None,
    states: list[Any] | None = None,
) -> tuple[jax.Array, list[Any]]:
    """Reads the next part `[B, T, D]` of a sequence of vectors.

    Args:
      encoder: causal, of a mechanism that has a stream.
      x: the vectors.
      mask: boolean `[B, T]`, True at real positions, see `stream.prefill`.
      states: those of every attention layer, in order, after the earlier parts; None =
        there are none.

    Returns:
      The encoder's outputs `[B, T, D]`, and the states after this part.

    Raises:
      ValueError: the encoder cannot be streamed.
    """
    before, after = iter(states or []), []

    def attend(layer: MultiHeadAttention, x: jax.Array) -> jax.Array:
        out, state = stream.prefill(layer, x, mask=mask, state=next(before, None))
        after.append(state)
        return out

    for block in encoder.blocks:
        mlp: Any = block.mlp and functools.partial(block.mlp, mask=mask)
        if isinstance(block.mlp, MultiHeadAttention):
            mlp = functools.partial(attend, block.mlp)
        x = block.add_branches(x, functools.partial(attend, block.attention), mlp)
    return x if encoder.norm is None else encoder.norm(x), after


def step(
    model: CausalLM, state: DecoderState, tokens: jax.Array
) -> tuple[jax.Array, DecoderState]:
    """Reads one token of each sample, integer `[B]`; returns the logits of the next.

    Under ``jax.jit`` the position is unknown: beyond `longest`, logits are NaN if the
    model adds or rotates by positions, and else what the mechanism gives there.
    """
    return prefill(model, tokens[:, None], state=state)


def _embed(
    encoder: TransformerEncoder, tokens: jax.Array, state: DecoderState | None
) -> tuple[jax.Array, jax.Array]:
    """Vectors of tokens and positions, and the position of the first."""
    config = encoder.config
    x = embed_inputs(encoder.embed, tokens, scaled=config.scale_embeddings)
    first = jnp.zeros_like(tokens[:, 0], jnp.int32)
    position = first if state is None else state.position
    rows = encoder.position_rows(config.max_length)
    if rows is not None:
        places = position[:, None] + jnp.arange(tokens.shape[1])[None]
        # NaN beyond the table, where the position is traced and cannot be checked.
        x = x + take_rows(rows, places).astype(x.dtype)
    return x, position


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
    for layer in layers:
        entry = layer.mechanism
        if not (layer.is_causal and entry.stream and entry.find("prefill")):
            return None
    states = jax.eval_shape(lambda: [x.init_state(1).mechanism for x in layers])
    arrays = jax.tree.leaves(states)
    return sum(x.size for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))
