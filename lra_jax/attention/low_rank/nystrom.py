"""Nystromformer (Xiong et al. 2021, "Nystromformer: A Nystrom-based Algorithm for
Approximating Self-Attention").

``out = F Z B v`` in place of ``softmax(q k^T / sqrt(H)) v``. The landmarks Q~ and K~
are the means of m segments of the queries and of the keys, and

- ``F = softmax(q K~^T / sqrt(H))``, ``A = softmax(Q~ K~^T / sqrt(H))``,
  ``B = softmax(Q~ k^T / sqrt(H))``;
- Z approximates the pseudo-inverse of A, by six iterations of
  ``Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4`` from
  ``Z = A^T / (largest column sum * largest row sum)``.

Optionally a depthwise convolution of the values along the length is added, with one
kernel per head.

Cost: O((T + S) m (H + Hv) + m^3) time, O((T + S) m) memory.

There is no causal form: landmarks are means over all positions, including future
ones.

Deviations. The authors' code computes the initial constant over the whole batch, so a
sample's output depends on the rest of the batch (``initialisation="original"``; here
each matrix has its own), and includes padding in the landmarks
(``padding="published"``). Here landmarks are means of the real positions, spread evenly
over the segments, and any m works with any length: hidden positions have no effect,
except as places in the convolution. Both sides enter the landmarks: pass ``query_mask``
(in self-attention, the same mask) unless all queries are real. More iterations do not
help if m < T: the exact pseudo-inverse of a nearly singular A amplifies errors.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import dense, inputs, masking
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.low_rank import landmarks
from lra_jax.attention.softmax import key_sets
from lra_jax.errors import expected, known

__all__ = ["nystrom_attention", "nystrom_parameters", "nystrom_weights"]


INITIALISATIONS = ("exact", "original")


def _check_packed(arguments: dict[str, Any]) -> None:
    for name in ("padding", "initialisation"):
        if (option := arguments[name]) != "exact":
            needed = f"None, because only {name}='exact' keeps documents apart"
            raise expected("segment_ids", needed, f"an array with {name}={option!r}")


@functools.partial(documents_in_turn, check=_check_packed)
def nystrom_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_mask: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    conv_weight: jax.Array | None = None,
    num_landmarks: int = 64,
    iterations: int = 6,
    initialisation: str = "exact",
    padding: str = "exact",
    precision: jax.lax.PrecisionLike = None,
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes Nystrom attention.

    Args:
      query, key, value, mask: as in `linear_attention`.
      is_causal: must be False; there is no causal form.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
        Only with ``padding="exact"`` and ``initialisation="exact"``.
      query_mask: boolean, True = a real query: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`; None = all. With ``padding="exact"`` other output rows are zero.
      conv_weight: `[N, W]`, W odd: adds ``sum_w conv_weight[w] v[i + w - W // 2]`` to
        row i; needs T == S. None = no convolution.
      num_landmarks: m.
      iterations: of the pseudo-inverse.
      initialisation: "exact" scales each matrix by its own sums; "original" by the
        largest sums in the whole batch, as published.
      padding: "exact", "published" or "front" (`lra_jax.attention.low_rank.landmarks`).
      deterministic: from Flax's layers; with it, ``decode=True`` is refused.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype. A sample with no real positions gives zeros.

    Raises:
      ValueError: shapes, dtypes, a mask or an option do not fit, or `is_causal`.
    """
    count = inputs.check_size("num_landmarks", num_landmarks)
    inputs.check_size("iterations", iterations, 0)
    known("initialisation", initialisation, INITIALISATIONS)
    known("padding", padding, landmarks.PADDINGS)
    call = Call.of(query, key, value, mask, query_mask=query_mask, precision=precision)
    inputs.refuse_decoding(deterministic, query, key, "nystrom")
    length, num_heads, head_dim = query.shape[1:]
    of_queries, of_keys, dtype = call.query_mask, call.mask, call.dtype
    # Not the call's query: its broken rows would count as zeros in the landmarks.
    query = masking.by_head(query, num_heads, of_queries, dtype)
    key, value = (
        masking.by_head(x, num_heads, of_keys, dtype) for x in (call.key, call.value)
    )
    if padding == "front":
        query, key, value = (_in_front(x, count, 2) for x in (query, key, value))
        of_queries, of_keys = (_in_front(x, count, 1) for x in (of_queries, of_keys))
    lengths = query.shape[2], key.shape[2]
    plan = landmarks.plan(padding, count, lengths, of_queries, of_keys, dtype)
    query = query * jnp.asarray(math.sqrt(1 / head_dim), dtype)
    # With a landmark for each position their code computes softmax attention.
    is_full = padding == "published" and lengths == (count, count)
    invert = functools.partial(
        _pseudo_inverse,
        iterations=iterations,
        initialisation=initialisation,
        precision=precision,
    )
    out = _attend(plan, query, key, value, None if is_full else invert, precision)
    out = out[:, :, -length:]
    if conv_weight is not None:
        out = out + _convolve(call, value[:, :, -length:], conv_weight)
    if padding == "exact":
        out = masking.hide_by_head(out, of_queries)
    return jnp.swapaxes(out, 1, 2).astype(call.out_dtype)


def _attend(
    plan: landmarks.Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    invert: Callable[[jax.Array], jax.Array] | None,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """The three matrices times the values; without ``invert``, softmax attention.

    Arrays are `[B, N, T, ...]`, with queries already scaled.
    """
    product = functools.partial(jnp.matmul, precision=precision)

    def scores(
        rows: jax.Array, columns: jax.Array, mask: jax.Array | None
    ) -> jax.Array:
        return plan.softmax(product(rows, jnp.swapaxes(columns, -1, -2)), mask)

    if invert is None:
        return product(scores(query, key, plan.of_keys), value)
    query_marks = product(plan.query_means[:, None], query)
    key_marks = product(plan.key_means[:, None], key)
    first = scores(query, key_marks, plan.of_queries)
    middle = scores(query_marks, key_marks, plan.of_landmarks)
    last = scores(query_marks, key, plan.of_keys)
    # The landmark side first: the inverse is then applied to m rows, not T.
    return product(first, product(invert(middle), product(last, value)))


nystrom_weights = dense.weights_of(
    nystrom_attention,
    "Entries may be negative, and rows sum only approximately to one.",
)


def nystrom_parameters(
    rng_key: jax.Array,
    *,
    num_heads: int,
    conv_kernel: int | None = None,
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `nystrom_attention` takes as keywords.

    Args:
      rng_key: a key of ``jax.random``.
      num_heads: N.
      conv_kernel: W, odd; None = no convolution, and no arrays. It is 35 in the
        published LRA configurations.
      dtype: of the arrays.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      `conv_weight` `[N, W]`, uniform in +-1/sqrt(W), torch's default; or an empty dict.

    Raises:
      ValueError: W is not a positive odd int.
    """
    inputs.check_sizes(nystrom_parameters, sizes)
    heads = inputs.check_size("num_heads", num_heads)
    if conv_kernel is None:
        return {}
    width = inputs.check_size("conv_kernel", conv_kernel)
    if width % 2 == 0:
        raise expected("conv_kernel", "an odd number", width)
    bound, shape = width**-0.5, (heads, width)
    return {"conv_weight": jax.random.uniform(rng_key, shape, dtype, -bound, bound)}


def _pseudo_inverse(
    matrix: jax.Array,
    iterations: int,
    initialisation: str,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """Approximate pseudo-inverse of `[B, N, m, m]`; zero rows and columns stay zero."""
    axes = None if initialisation == "original" else (-2, -1)
    norm = jnp.ones((), matrix.dtype)
    for axis in (-2, -1):  # of column sums and of row sums; no entry is negative
        norm = norm * matrix.sum(axis, keepdims=True).max(axes, keepdims=True)
    inverse = jnp.swapaxes(matrix, -1, -2) / jnp.where(norm > 0, norm, 1)
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None, None]
    product = functools.partial(jnp.matmul, precision=precision)
    for _ in range(iterations):
        step = product(matrix, inverse)
        inner = 15 * identity - product(step, 7 * identity - step)
        inverse = product(inverse, 13 * identity - product(step, inner)) / 4
    return inverse


def _convolve(call: Call, value: jax.Array, weight: jax.Array) -> jax.Array:
    """The depthwise convolution of `[B, N, T, Hv]`, as products with a band matrix."""
    length, heads, keys = value.shape[2], value.shape[1], call.key.shape[1]
    weight = inputs.check_array("conv_weight", weight, "N W", heads, None)
    width = weight.shape[1]
    if width % 2 == 0:
        needed = f"[N, W] with N={heads} and an odd W"
        raise expected("conv_weight", needed, weight.shape)
    if call.query.shape[1] != keys:
        raise expected(
            "conv_weight",
            "None for cross attention, because it adds the values around each query's "
            "position",
            f"an array where T={call.query.shape[1]} and S={keys}",
        )
    size = min(64, length)
    windows = key_sets.windows(value, size, width // 2, width // 2)
    tap = np.arange(windows.shape[3])[None] - np.arange(size)[:, None]
    inside = (tap >= 0) & (tap < width)
    band = weight.astype(value.dtype)[:, np.where(inside, tap, 0)]
    band = jnp.where(inside[None], band, 0)
    terms = "ncw,bnpwh->bnpch"
    out = jnp.einsum(terms, band, windows, precision=call.precision)
    return out.reshape(*value.shape[:2], -1, value.shape[-1])[:, :, :length]


def _in_front(x: Any, count: int, axis: int) -> Any:
    """Prepends zeros to an axis until the number of landmarks divides its length."""
    if x is None:
        return None
    missing = -x.shape[axis] % count
    return jnp.pad(x, [(missing if i == axis else 0, 0) for i in range(x.ndim)])
