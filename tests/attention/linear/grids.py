"""A form on a grid beside its dense weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import attention

from ..mechanisms import assert_close, fast_jit


def assert_grid(
    name: str,
    arrays: tuple[Any, ...],
    mask: np.ndarray,
    formula: Callable[..., np.ndarray],
    **options: Any,
) -> None:
    """Output, dense weights, padding, and gradients of both."""
    mechanism = attention.resolve(name)

    @fast_jit
    def both(*arrays):
        def fast(*arrays):
            return mechanism.attention(*arrays, mask, **options)

        def slow(q, k, v):
            weights = mechanism.weights(q, k, mask, **options)
            return jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")

        found = []
        for form in (fast, slow):
            out, pull = jax.vjp(form, *arrays)
            found.append((out, pull(jnp.cos(out))))
        return found

    fast, slow = both(*arrays)
    wanted = formula(*arrays, mask=mask)
    assert_close(fast[0], wanted)
    assert_close(slow[0], wanted)
    assert_close(fast[1], slow[1], 1e-4)
    assert not np.asarray(fast[1][2])[~mask].any()
