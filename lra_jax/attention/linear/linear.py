"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs").

``out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j) + eps)`` with
``phi(x) = elu(x) + 1`` and no 1 / sqrt(H).

Cost: O((T + S) H Hv) time, O(H Hv) memory besides inputs and output. The causal form
sums over j <= i instead.

A stream holds the two sums, whatever its position: `linear_init` starts with empty
sums, `linear_prefill` processes a prompt in one pass, and `linear_step` one position.
How the sums are computed: `lra_jax.attention.linear.core`.

The eps is added to the denominator, as in the authors' code (idiap/fast-transformers),
so rows sum to ``z / (z + eps)``; a row without visible keys is exactly zero. Features,
sums and products are float32 or wider even for half-precision inputs: with H = 64,
float16 sums overflow beyond about 760 keys.
"""

from typing import Any

import jax

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import core
from lra_jax.attention.linear.core import LinearState

__all__ = [
    "LinearState",
    "linear_attention",
    "linear_init",
    "linear_prefill",
    "linear_step",
    "linear_weights",
]


def _run(
    call: Call, *, feature_map: feature_maps.FeatureMap, eps: float
) -> tuple[jax.Array, LinearState]:
    inputs.check_eps(eps)
    kernel = core.Kernel(feature_map=feature_map, denominator="add", eps=eps)
    return core.run(call, kernel, "linear", LinearState)


@attention_of(_run)
def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **flax: Any,
) -> jax.Array:
    """Computes ``phi(q) (phi(k)^T v)``, normalised over the visible keys.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: position i sees keys 0..i only; needs T == S.
      segment_ids: integers `[B, T]`, a run of one positive number for each document
        packed into a row, 0 = padding; documents do not see each other. Needs T == S.
      feature_map: "elu" (elu(x) + 1), "relu", "sigmoid", or a non-negative function
        that acts on an array's last axis.
      eps: added to the denominator.
      chunking: how the sequence is cut in the causal form and for packed rows; None =
        chosen by the backend.
      precision: of the matrix products, as in ``jnp.einsum``.
      implementation: "xla"; "pallas" or "native", the kernels of docs/kernels.md for
        TPUs and Hopper GPUs or for CPUs; or "auto", the kernels where they run and are
        faster. They have no second derivatives, and take packed rows only on CPUs.
      **flax: keywords that Flax passes to an ``attention_fn``, which are ignored; any
        others raise.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, or there is no kernel
        although one is requested.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> out = linear_attention(query, key, value, is_causal=True)
      >>> first = [x[:, :9] for x in (query, key, value)]
      >>> start = linear_attention(*first, is_causal=True)
      >>> bool(jnp.allclose(out[:, :9], start, atol=1e-5))  # The future is never seen.
      True

      Two documents packed into a row, of lengths 24 and 40, do not see each other:

      >>> documents = jnp.repeat(jnp.array([[1, 2]]), jnp.array([24, 40]), 1)
      >>> row = [x[:1] for x in (query, key, value)]
      >>> out = linear_attention(*row, segment_ids=documents)
      >>> alone = linear_attention(*(x[:, :24] for x in row))
      >>> bool(jnp.allclose(out[:, :24], alone, atol=1e-5))
      True
    """
    ...


linear_weights = dense.weights_of(
    linear_attention, "Its rows sum to one, but for the eps of the denominator."
)
linear_prefill = streams.make_prefill(linear_attention, _run, LinearState)
linear_init = streams.make_init(linear_prefill)
linear_step = streams.make_step(linear_prefill)
linear_slice = streams.make_slice(linear_attention, _run)
