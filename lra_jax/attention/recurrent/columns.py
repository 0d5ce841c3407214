"""A scan over positions in which every head decays by its own factor.

``h_t = a_t h_(t-1) + x_t`` with a scalar a_t for each head and position: the linear
recurrence of gated recurrent networks, column by column.

On a CPU it is a loop over the first axis of an array with positions first, which passes
through memory once; elsewhere an associative scan, whose depth is logarithmic in the
length. Neither divides by a product of factors, which may vanish. For real columns that
start from zero CPUs also have a kernel, `lra_jax.kernels.scan`.

The loop has a custom derivative, ``l_t = g_t + a_(t+1) l_(t+1)`` backward in time: the
same scan, over the same factors. Gradients of gradients work; ``jax.jvp`` raises
TypeError.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def scan_columns(
    factors: jax.Array,
    values: jax.Array,
    start: jax.Array | None = None,
    *,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The state at every position of factors `[B, T, N]` and values `[B, T, N, Hv]`.

    ``start`` is the state before the first position, `[B, N, Hv]`, or zero; with
    ``reverse`` the last position comes first.

    Returns:
      `[B, T, N, Hv]`, and the state after the position processed last.
    """
    start = jnp.zeros_like(values[:, 0]) if start is None else start
    factors, values = jnp.swapaxes(factors, 0, 1), jnp.swapaxes(values, 0, 1)
    if values.shape[-1] == 1:  # A loop over a last axis of one column is slower.
        flat: Any = _scan(reverse, factors, values[..., 0], start[..., 0])
        states = flat[..., None]
    else:
        states: Any = _scan(reverse, factors[..., None], values, start)
    last = states[0] if reverse else states[-1]
    return jnp.swapaxes(states, 0, 1), last


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(
    reverse: bool, factors: jax.Array, values: jax.Array, start: jax.Array
) -> jax.Array:
    """`[T, B, N, Hv]` and `[B, N, Hv]` -> `[T, B, N, Hv]`; factors `[T, B, N, 1]`.

    All may lack the last axis.
    """
    if jax.default_backend() == "cpu":
        return _loop(reverse, factors, values, start)
    return _tree(reverse, factors, values, start)


def _loop(
    reverse: bool, factors: jax.Array, values: jax.Array, start: jax.Array
) -> jax.Array:
    def step(
        state: jax.Array, position: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        factor, value = position
        state = factor * state + value
        return state, state

    return jax.lax.scan(step, start, (factors, values), reverse=reverse)[1]


def _tree(
    reverse: bool, factors: jax.Array, values: jax.Array, start: jax.Array
) -> jax.Array:
    def combine(
        earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    first = -1 if reverse else 0
    values = values.at[first].add(factors[first] * start)
    scan = jax.lax.associative_scan
    return scan(combine, (factors, values), reverse=reverse)[1]


def _forward(
    reverse: bool, factors: jax.Array, values: jax.Array, start: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    states: Any = _scan(reverse, factors, values, start)
    return states, (factors, states, start)


def _backward(
    reverse: bool, kept: tuple[jax.Array, ...], of_states: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    factors, states, start = kept
    # The factor after the last position multiplies nothing.
    later = _shift(factors, jnp.ones_like(factors[0]), not reverse)
    of_values: Any = _scan(not reverse, later, of_states, jnp.zeros_like(start))
    before = _shift(states, start, reverse)
    first = -1 if reverse else 0
    of_factors = of_values * before
    if factors.shape != of_values.shape:
        of_factors = of_factors.sum(-1, keepdims=True)
    return of_factors, of_values, factors[first] * of_values[first]


def _shift(array: jax.Array, edge: jax.Array, to_left: bool) -> jax.Array:
    """Shifts `[T, ...]` one position later or earlier; ``edge`` fills the gap."""
    if to_left:
        return jnp.concatenate([array[1:], edge[None]])
    return jnp.concatenate([edge[None], array[:-1]])


_scan.defvjp(_forward, _backward)
