"""Rematerialisation: the backward pass recomputes the forward pass's intermediates."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import core

Result = TypeVar("Result")


def recompute(
    call: Callable[..., Result], rngs: nnx.Rngs | None, *arrays: Any
) -> Result:
    """``call(rngs, *arrays)``, keeping only the arrays for the backward pass.

    Gives the same results as the call itself, dropout included, and advances its stream
    of keys alike. On a CPU it has no forward-mode derivative (``jax.jvp``,
    ``jax.hessian``).
    """
    # The stream counts its keys, so its state is passed in and out.
    graph, stream = nnx.split(nnx.Rngs() if rngs is None else rngs)

    def again(stream: nnx.State, *arrays: Any) -> tuple[Result, nnx.State]:
        inner = nnx.merge(graph, stream)
        return call(None if rngs is None else inner, *arrays), nnx.state(inner)

    if jax.default_backend() == "cpu":
        result, stream = _recomputed_late(again, stream, *arrays)
    else:
        result, stream = jax.checkpoint(again)(stream, *arrays)
    if rngs is not None:
        nnx.update(rngs, stream)
    return result


def _recomputed_late(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)`` like ``jax.checkpoint``, but with less memory on a CPU.

    ``jax.checkpoint`` ties the recomputation to the gradients that arrive by barriers,
    which XLA drops on a CPU. It then recomputes all blocks before the first backward
    pass, and all intermediates are in memory at once, as without checkpoints. Here the
    recomputation is in a branch whose condition depends on the gradients, so it cannot
    begin before them.
    """
    # The arrays that the function closes over are the constants of its jaxpr; a
    # function with a derivative of its own may not close over them.
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    count = len(jaxpr.consts)
    arrays = [*jaxpr.consts, *jax.tree.leaves(args)]
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]

    def joined(floats: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
        sources = {True: iter(floats), False: iter(others)}
        arrays = [next(sources[kind]) for kind in is_float]
        closed = core.ClosedJaxpr(jaxpr.jaxpr, arrays[:count])
        return core.jaxpr_as_fun(closed)(*arrays[count:])

    @jax.custom_vjp
    def call(floats: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
        return joined(floats, others)

    def forward(floats: list[jax.Array], others: list[jax.Array]) -> Any:
        return joined(floats, others), (floats, others)

    def backward(kept: Any, cotangents: list[jax.Array]) -> Any:
        floats, others = kept

        def pulled_back() -> list[jax.Array]:
            pullback = jax.vjp(lambda floats: joined(floats, others), floats)[1]
            return pullback(cotangents)[0]

        def zeros() -> list[jax.Array]:
            return jax.tree.map(jnp.zeros_like, floats)

        return lax.cond(_true(cotangents), pulled_back, zeros), None

    call.defvjp(forward, backward)
    floats = [x for x, kind in zip(arrays, is_float, strict=True) if kind]
    others = [x for x, kind in zip(arrays, is_float, strict=True) if not kind]
    return jax.tree.unflatten(jax.tree.structure(shape), call(floats, others))


def _true(cotangents: list[jax.Array]) -> jax.Array:
    """True for all gradients, NaN too, but no compiler knows it in advance."""
    gradient = next(x for x in cotangents if jnp.issubdtype(x.dtype, jnp.inexact))
    largest = jnp.max(gradient.real).astype(jnp.float32)
    bits = lax.bitcast_convert_type(largest, jnp.uint32)
    return (bits * bits) % 4 != 2  # A square is 0 or 1 modulo 4.
