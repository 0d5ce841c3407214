"""The dense weights of mechanisms that never build them.

If the output is ``W v`` for a matrix W that does not depend on v, passing unit vectors
as values gives W itself. So one function derives ``X_weights`` from
``X_attention`` for every such mechanism. The weights are used in plots, for the
spectrum, and in tests, which compare them with an independent reference.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs

Options = ParamSpec("Options")


def weights_of(
    attention: Callable[
        Concatenate[jax.Array, jax.Array, jax.Array, Options], jax.Array
    ],
    doc: str,
    without: tuple[str, ...] = (),
    fixed: Mapping[str, Any] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[Concatenate[jax.Array, jax.Array, Options], jax.Array]:
    """``X_weights`` of an ``X_attention`` that is linear in its values.

    Args:
      attention: ``X_attention(query, key, value, ...)``.
      doc: one sentence about the weights, for the docstring.
      without: keywords that do not affect the weights, and are ignored.
      fixed: keywords that always have these values, whatever the caller passes.
      check: called first, with the keywords; raises if it does not accept them.

    Returns:
      A function of the same arguments except the value. It returns `[B, N, T, S]`,
      float32 or wider. Where no precision is given, products use the highest: on a GPU
      or TPU, multiplying by ones and zeros would otherwise round the weights.
    """
    name = attention.__name__
    signature = inspect.signature(attention)
    kept = [x for x in signature.parameters.values() if x.name != "value"]

    def weights(
        query: jax.Array,
        key: jax.Array,
        *args: Options.args,
        **options: Options.kwargs,
    ) -> jax.Array:
        if check is not None:
            check(**options)
        inputs.check_inputs(query, key)
        units = _unit_values(query, key)
        for ignored in without:
            options.pop(ignored, None)
        options.update(fixed or {})
        if "implementation" in signature.parameters:
            # Kernels have no second derivatives, and values are as wide as S here.
            options.setdefault("implementation", "xla")
        with jax.default_matmul_precision("highest"):
            out = attention(query.astype(units.dtype), key, units, *args, **options)
        return jnp.swapaxes(out, 1, 2)

    weights.__module__ = attention.__module__
    weights.__name__ = weights.__qualname__ = name.replace("_attention", "_weights")
    says = f"{doc} It is float32 or wider; arguments and errors are those of `{name}`."
    weights.__doc__ = f"The matrix `[B, N, T, S]` that `{name}` never builds.\n\n{says}"
    setattr(weights, "__signature__", signature.replace(parameters=kept))  # noqa: B010
    return weights


def precise(weights: Callable[Options, jax.Array]) -> Callable[Options, jax.Array]:
    """An ``X_weights`` written by hand, with the highest precision where none is given.

    A GPU or TPU would otherwise round what it multiplies to 11 bits, or 8.
    """

    @functools.wraps(weights)
    def call(*args: Options.args, **options: Options.kwargs) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return weights(*args, **options)

    return call


def _unit_values(query: jax.Array, key: jax.Array) -> jax.Array:
    """Values `[B, S, 1, S]` for which an output ``W v`` is the matrix W itself."""
    length, dtype = key.shape[1], inputs.accumulation_dtype(query, key)
    units = jnp.eye(length, dtype=dtype)[None, :, None]
    return jnp.broadcast_to(units, (query.shape[0], length, 1, length))
