"""Lightning attention: its formula and its feature maps."""

import functools

import numpy as np

from lra_jax import attention

from .. import dense
from ..mechanisms import Case, assert_close, fast_jit, inputs


def formula(
    q, k, v, mask=None, causal=False, slopes=None, norm=None, eps=1e-6
) -> np.ndarray:
    """Not normalised, or by the root mean square over all heads."""
    heads = q.shape[2]
    if slopes is None:
        power = max(p for p in (1, 2, 4, 8) if p <= heads)
        slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
        slopes += [2 ** (-4 * (n + 1) / power) for n in range(0, 2 * power, 2)]
        slopes = slopes[:heads]

    def head(slope, q, k, v, where):
        return (q @ k.T * dense.fading(slope, len(q), where, causal)) @ v

    return dense.normed(
        dense.each_slope(q, k, v, mask, slopes, head), norm, (2, 3), eps
    )


CASE = Case(formula, signed=True, level={"norm": "rms"})


def test_lightning_with_a_feature_map() -> None:
    q, k, v = inputs(5)
    keywords = {"feature_map": "silu", "norm": "rms"}
    got = fast_jit(functools.partial(attention.lightning_attention, **keywords))(
        q, k, v
    )
    q, k = (np.asarray(x / (1 + np.exp(-np.float64(x)))) for x in (q, k))
    assert_close(got, formula(q, k, v, norm="rms"))
