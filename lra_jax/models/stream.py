"""One attention layer applied to a sequence part by part: prompts, then positions.

    out, state = layer.prefill(prompt)      # [B, T, D]
    out, state = layer.step(state, x)       # [B, D]

The outputs equal those of the layer applied to the whole sequence at once. The state
holds the mechanism's state, and the inputs that a short convolution's window still
covers. It is a tree of arrays: keep a copy to roll back to, pass it to several
continuations, or index its first axis to take a sample out of a batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention.inputs import check_shape
from lra_jax.attention.masking import check_mask, next_position
from lra_jax.attention.mechanism import Mechanism
from lra_jax.attention.registry import accepted_keywords
from lra_jax.attention.streams import show_shapes
from lra_jax.errors import expected
from lra_jax.models.inputs import known_values
from lra_jax.models.layers import rotate, rows_at


class LayerState(NamedTuple):
    """A layer's memory of the past; the first axis of every array is the batch."""

    mechanism: Any  # the state of the mechanism's own stream
    # The layer's last inputs, and which of them there were, for a short convolution;
    # None without one, because Orbax does not save arrays without entries.
    recent: jax.Array | None  # [B, short_conv - 1, D]
    real: jax.Array | None  # [B, short_conv - 1]
    position: jax.Array  # of the next input, [B] int32

    __repr__ = show_shapes


class Layer(Protocol):
    """The part of `MultiHeadAttention`, which imports this module, that streams use."""

    mechanism: Mechanism
    in_features: int
    max_length: int | None
    short_conv: int
    is_causal: bool
    rotary: bool

    @property
    def keywords(self) -> dict[str, Any]: ...

    def project(
        self, inputs: jax.Array, context: jax.Array, query_mask: Any, mask: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...

    def make_arrays(
        self, inputs: jax.Array, context: jax.Array
    ) -> dict[str, jax.Array]: ...

    def finish(
        self, out: jax.Array, value: jax.Array, inputs: jax.Array
    ) -> jax.Array: ...


# Keywords of the whole form that a prefill need not take.
_OF_CALL = {"is_causal", "max_length", "mask", "query_mask"}


def prefill(
    layer: Layer,
    inputs: jax.Array,
    *,
    mask: jax.Array | None = None,
    state: LayerState | None = None,
) -> tuple[jax.Array, LayerState]:
    """Reads a prompt, or its next part, in one pass.

    Args:
      layer: causal, of a mechanism that has a stream.
      inputs: `[B, T, in_features]`.
      mask: boolean `[B, T]`, True at real positions; prompts of different lengths are
        padded on the right or on the left; with rotary positions only on the right,
        unless only their differences matter, as in softmax attention. Later parts are
        padded on the right: in front of a real position, padding counts as distance.
      state: the state after the earlier parts; None = there are none.

    Returns:
      The causal output `[B, T, out_features]`, and the state after each sample's last
      real position.

    Raises:
      ValueError: the layer cannot be streamed, shapes do not fit, the prompt reaches
        beyond the ``max_length`` of rotary positions or of the mechanism, or a mask
        that is known (not traced) is padded on the wrong side.
    """
    run = _find_prefill(layer)
    check_shape("inputs", inputs, "B T D", None, None, layer.in_features)
    batch, length, _ = inputs.shape
    if not length:
        raise expected("inputs", "at least one position", f"shape {inputs.shape}")
    mask = check_mask("mask", mask, "B T", batch, length)
    if mask is not None:
        _check_side(layer, mask)
    seen = jnp.ones_like(inputs[:, :, 0], bool) if mask is None else mask
    before = max(layer.short_conv - 1, 0)
    recent, real, position = _earlier(state, inputs, before)
    if before:  # The window of a convolution reaches back into the earlier parts.
        inputs = jnp.concatenate([recent, inputs], 1)
        seen = jnp.concatenate([real, seen], 1)
    query, key, value = (
        x[:, before:] for x in layer.project(inputs, inputs, seen, seen)
    )
    new = inputs[:, before:]
    keywords: dict[str, Any] = {**layer.make_arrays(new, new), **layer.keywords}
    ends = next_position(mask, batch, length)
    if layer.rotary:
        longest = layer.max_length
        check_room("inputs", state, length if mask is None else ends, longest)
        turn = position[:, None] + jnp.arange(length)[None]
        query, key = (rotate(x, turn, longest) for x in (query, key))
    # A state records for how many positions it was made.
    keywords["max_length"] = layer.max_length if state is None else None
    earlier = None if state is None else state.mechanism
    more = _keywords_of(run, keywords, layer)
    out, after = run(query, key, value, mask=mask, state=earlier, **more)
    kept = present = None
    if before:  # Each sample's own last rows, excluding any padding after them.
        rows = ends[:, None] + jnp.arange(before, dtype=ends.dtype)[None]
        kept = rows_at(inputs, rows)
        present = jnp.take_along_axis(seen, rows, 1)
    position = (position + ends).astype(jnp.int32)
    out = layer.finish(out, value, new)
    return out, LayerState(after, kept, present, position)


def _keywords_of(
    run: Callable[..., Any], keywords: dict[str, Any], layer: Layer
) -> dict[str, Any]:
    """The keywords that a mechanism's prefill takes."""
    accepted = accepted_keywords(run)  # None = any.
    more = {n: x for n, x in keywords.items() if accepted is None or n in accepted}
    lost = keywords.keys() - more.keys() - _OF_CALL
    # This package's prefills leave out only what does not affect their streams.
    if layer.mechanism.foreign and lost:
        needed = f"{run.__name__} to take {', '.join(sorted(lost))}"
        raise expected("layer", needed, "one without")
    return more


def _earlier(
    state: LayerState | None, inputs: jax.Array, before: int
) -> tuple[Any, Any, jax.Array]:
    """The last rows of earlier parts, which of them there were, and the position."""
    batch, _, width = inputs.shape
    if state is None:
        # Made from the inputs, so that the zeros are split over devices like them.
        first = jnp.zeros_like(inputs[:, :1])
        recent = jnp.repeat(first, before, 1)
        real = jnp.zeros_like(recent[:, :, 0], bool)
        return recent, real, jnp.zeros_like(first[:, 0, 0], jnp.int32)
    check_shape("state.position", state.position, "B", batch)
    if before:
        check_shape("state.recent", state.recent, "B S D", batch, before, width)
        check_shape("state.real", state.real, "B S", batch, before)
    elif state.recent is not None:
        needed = "None for a layer without a short convolution"
        raise expected("state.recent", needed, f"shape {state.recent.shape}")
    return state.recent, state.real, state.position


def check_room(
    name: str, state: Any, length: int | jax.Array, longest: int | None
) -> None:
    """Refuses positions beyond the longest sequence, where the table of positions ends.

    The state has the ``position`` of the first one; None = 0. ``length`` is the number
    of positions without padding on the right, `[B]` or one for all, and ``longest`` the
    table's; None = there is none. Traced values are unknown, and not checked.
    """
    first = 0 if state is None else known_values(state.position)
    more = length if isinstance(length, int) else known_values(length)
    if longest is None or first is None or more is None:
        return
    most = int(np.max(first + more))
    if most > longest:
        needed = f"at most max_length={longest} positions in a stream"
        raise expected(name, needed, most)


def _check_side(layer: Layer, mask: jax.Array) -> None:
    """Refuses padding on the left where it would change what a mechanism sees."""
    if not layer.rotary or layer.mechanism.rotary:
        return
    known = known_values(mask)
    if known is not None and (known.any(1) > known[:, 0]).any():
        name = layer.mechanism.name
        needed = f"padding on the right with rotary positions in {name!r} attention"
        raise expected("mask", needed, "padding on the left")


def _find_prefill(layer: Layer) -> Callable[..., Any]:
    """The prefill of a layer's mechanism; raises ``ValueError`` if it has no stream."""
    if not layer.is_causal:
        raise expected("layer", "one with is_causal=True for a stream", "one without")
    name = layer.mechanism.name
    if not layer.mechanism.stream:
        needed = "a mechanism with a stream (python -m lra_jax.attention)"
        raise expected("layer", needed, repr(name))
    run = layer.mechanism.find("prefill")
    if run is None:
        needed = "a mechanism with NAME_prefill beside its function, for a stream"
        raise expected("layer", needed, repr(name))
    if layer.rotary and layer.max_length is None:
        needed = "one with max_length for a stream with rotary positions"
        raise expected("layer", needed, "one without")
    return run
