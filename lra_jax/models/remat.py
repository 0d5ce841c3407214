"""Rematerialisation: compute again in the backward pass what the forward pass made."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

Result = TypeVar("Result")


def recomputed(
    call: Callable[..., Result], rngs: nnx.Rngs | None, *arrays: Any
) -> Result:
    """``call(rngs, *arrays)``, of which the backward pass keeps the arrays alone.

    The same numbers as the call itself, dropout included.

    Args:
      call: a function of dropout's stream and of arrays, or trees of them.
      rngs: the stream, which goes on as after the call itself; None without dropout.
      *arrays: what is kept.
    """
    # The stream counts its keys: its state goes in and comes out.
    graph, stream = nnx.split(nnx.Rngs() if rngs is None else rngs)

    @jax.checkpoint
    def again(stream: nnx.State, *arrays: Any) -> tuple[Result, nnx.State]:
        inner = nnx.merge(graph, stream)
        return call(None if rngs is None else inner, *arrays), nnx.state(inner)

    result, stream = again(stream, *arrays)
    if rngs is not None:
        nnx.update(rngs, stream)
    return result
