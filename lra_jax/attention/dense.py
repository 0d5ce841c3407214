"""The dense weights of mechanisms that never build them.

Where an output is ``W v`` with some matrix W of queries and keys, unit vectors as
values give W itself. So one function makes the ``X_weights`` of each such mechanism
from its ``X_attention``: for plots, for the spectrum, and for tests, which compare it
with a reference of its own.
"""

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
      doc: what there is to say of the weights, one sentence.
      without: keywords that have no part in them, and are ignored.
      fixed: keywords whose values the weights are taken with, whatever is given.
      check: called with the keywords first, to refuse some.

    Returns:
      A function of the same arguments without the value. It gives `[B, N, T, S]`,
      float32 or wider; products without a precision of their own have the highest,
      because one with ones and zeros would else round the weights on a GPU or TPU.
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
        units = inputs.unit_values(query, key)
        for ignored in without:
            options.pop(ignored, None)
        options.update(fixed or {})
        with jax.default_matmul_precision("highest"):
            out = attention(query.astype(units.dtype), key, units, *args, **options)
        return jnp.swapaxes(out, 1, 2)

    weights.__module__ = attention.__module__
    weights.__name__ = weights.__qualname__ = name.replace("_attention", "_weights")
    says = f"{doc} It is float32 or wider; arguments and errors are those of `{name}`."
    weights.__doc__ = f"The matrix `[B, N, T, S]` that `{name}` never builds.\n\n{says}"
    setattr(weights, "__signature__", signature.replace(parameters=kept))  # noqa: B010
    return weights
