"""What happens inside a model: the states between its blocks, and what attention got.

Any model of ``lra_jax.models`` will do, trained or not: whatever holds `EncoderBlock`
and `MultiHeadAttention` modules. While a capture runs, these two report; nothing in the
models themselves knows of it.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from lra_jax.analysis.variants import Variant
from lra_jax.attention import Mechanism
from lra_jax.models import EncoderBlock, MultiHeadAttention

__all__ = [
    "AttentionCall",
    "Captured",
    "capture",
    "capture_attention",
    "run_block",
]


class AttentionCall(NamedTuple):
    """One call of a mechanism.

    Attributes:
      mechanism: which.
      query, key, value: `[B, T, N, H]`.
      keywords: all that was passed beside them: masks, the mechanism's own arrays,
        options.
    """

    mechanism: Mechanism
    query: jax.Array
    key: jax.Array
    value: jax.Array
    keywords: dict[str, Any]

    def weights(self) -> np.ndarray:
        """The dense matrix `[B, N, T, S]` of this call, float32.

        It is what the fast form never builds. Norm attention, retention and lightning
        attention normalise their output; theirs is the matrix before that.

        Raises:
          ValueError: the mechanism has no such matrix, or is not of this package.
        """
        function = self.mechanism.weights
        keywords = self.keywords
        parameters = inspect.signature(function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            keywords = {k: v for k, v in keywords.items() if k in parameters}
        return np.asarray(function(self.query, self.key, **keywords))


class Captured(NamedTuple):
    """What a run of a model left.

    Attributes:
      states: float32 `[L + 1, B, T, D]`: what entered the first block, and what each
        block gave.
      mask: boolean `[B, T]`, True at real tokens.
      calls: the attention of each block, in order.
    """

    states: np.ndarray
    mask: np.ndarray
    calls: list[AttentionCall]

    def call(self, layer: int) -> AttentionCall:
        """The attention of a layer, counted from 1.

        Raises:
          ValueError: there is no such layer.
        """
        if not 1 <= layer <= len(self.calls):
            raise ValueError(
                f"layer: expected 1 to {len(self.calls)}, the layers of this model, "
                f"got {layer}"
            )
        return self.calls[layer - 1]


def capture(
    model: nnx.Module, run: Callable[[], Any], variant: Variant | None = None
) -> Captured:
    """Runs a model once and records its blocks.

    Where the blocks run more than once (the two documents of a matching task), the
    first time is recorded.

    Args:
      model: holds `EncoderBlock` modules.
      run: calls the model, as in ``lambda: model(tokens, lengths)``; not compiled.
      variant: parts of the blocks to leave out; None = as they are.

    Raises:
      ValueError: the model has no such blocks.
    """
    modules = (module for _, module in nnx.iter_modules(model))
    count = sum(isinstance(module, EncoderBlock) for module in modules)
    if not count:
        raise ValueError(
            "model: expected one made of lra_jax.models.EncoderBlock, got a "
            f"{type(model).__name__} without any"
        )
    seen: list[tuple[Any, Any, Any]] = []
    with _observed_blocks(seen, variant):
        calls = capture_attention(model, run)
    seen = seen[:count]
    _, first, mask = seen[0]
    states = np.stack([first, *(out for out, _, _ in seen)]).astype(np.float32)
    real = np.ones(states.shape[1:3], bool) if mask is None else np.asarray(mask)
    return Captured(states, real, calls)


def capture_attention(model: nnx.Module, run: Callable[[], Any]) -> list[AttentionCall]:
    """Every call of a mechanism while a model runs, in order.

    Args:
      model: holds `MultiHeadAttention` modules.
      run: as in `capture`.
    """
    modules = (module for _, module in nnx.iter_modules(model))
    layers = [m for m in modules if isinstance(m, MultiHeadAttention)]
    calls: list[AttentionCall] = []
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_observed_attention(layer, calls))
        run()
    return calls


def run_block(
    block: EncoderBlock,
    variant: Variant,
    x: jax.Array,
    mask: jax.Array | None,
    rngs: nnx.Rngs | None = None,
    parameters: Any = None,
    memory: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`EncoderBlock.carry` with parts left out; with all of them, the block itself.

    Without the skip connection ``x = attention(LN(x))``, and so on.
    """
    inner = block.attention_norm(x) if variant.norm else x
    branch, memory = block.attention.attend(
        inner, mask=mask, parameters=parameters, memory=memory
    )
    branch = block.dropout(branch, rngs)
    x = x + branch if variant.skip else branch
    if not variant.mlp:
        return x, memory
    inner = block.mlp_norm(x) if variant.norm else x
    return x + block.dropout(block.mlp(inner, mask=mask, rngs=rngs), rngs), memory


@contextlib.contextmanager
def _observed_blocks(
    seen: list[tuple[Any, Any, Any]], variant: Variant | None
) -> Iterator[None]:
    """Every `EncoderBlock` notes its output, its input and its mask."""
    kind: Any = EncoderBlock
    original = kind.carry  # A call goes through it too.

    def carry(block: EncoderBlock, x: Any, mask: Any, *args: Any, **keywords: Any):
        if variant is None:
            out, memory = original(block, x, mask, *args, **keywords)
        else:
            out, memory = run_block(block, variant, x, mask, *args, **keywords)
        seen.append((np.asarray(out, np.float32), np.asarray(x, np.float32), mask))
        return out, memory

    kind.carry = carry
    try:
        yield
    finally:
        kind.carry = original


@contextlib.contextmanager
def _observed_attention(
    layer: MultiHeadAttention, calls: list[AttentionCall]
) -> Iterator[None]:
    """A layer notes what it attended to."""
    mechanism = layer.mechanism
    function = mechanism.attention

    def record(query: Any, key: Any, value: Any, **keywords: Any) -> jax.Array:
        calls.append(AttentionCall(mechanism, query, key, value, keywords))
        return function(query, key, value, **keywords)

    # The layer passes those keywords that the function's signature names.
    record.__signature__ = inspect.signature(function)  # pyright: ignore
    layer.mechanism = dataclasses.replace(mechanism, function=record)
    try:
        yield
    finally:
        layer.mechanism = mechanism
