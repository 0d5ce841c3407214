"""Rematerialisation: the backward pass recomputes the forward pass's intermediates."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

Result = TypeVar("Result")


def recomputed(
    call: Callable[..., Result], rngs: nnx.Rngs | None, *arrays: Any
) -> Result:
    """``call(rngs, *arrays)``, keeping only the arrays for the backward pass.

    Gives the same results as the call itself, dropout included.

    Args:
      call: a function of the dropout stream and of arrays, or trees of them.
      rngs: the stream, advanced as by the call itself; None without dropout.
      *arrays: the arrays that are kept.
    """
    # The stream counts its keys, so its state is passed in and out.
    graph, stream = nnx.split(nnx.Rngs() if rngs is None else rngs)

    @jax.checkpoint
    def again(stream: nnx.State, *arrays: Any) -> tuple[Result, nnx.State]:
        inner = nnx.merge(graph, stream)
        return call(None if rngs is None else inner, *arrays), nnx.state(inner)

    result, stream = again(stream, *arrays)
    if rngs is not None:
        nnx.update(rngs, stream)
    return result
