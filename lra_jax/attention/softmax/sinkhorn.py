"""Sinkhorn attention (Tay et al. 2020, "Sparse Sinkhorn Attention").

The sequence is cut into P blocks of C positions. A sorting network reads the mean key
x_c of every block and scores how well each block s would fit in its place,
``R_cs = x_c . w_s + b_s``; Sinkhorn's iterations make ``exp(R / temperature)`` doubly
stochastic: a soft permutation S of the blocks. A query of block c then attends, in one
softmax with 1 / sqrt(H), to the keys of its own block and to the C sorted keys
``sum_s S_cs k_s``, with values sorted in the same way.

Cost: O(T C (H + Hv)) time for the attention and O(T P (H + Hv)) for the soft sorting;
O(T C) memory. For a fixed C the sorting is quadratic in T, with the factor 1 / C.

There is no causal form: the columns of S are normalised over all blocks, so the keys
sorted into an early block depend on later ones.

Blocks with no real positions take no part in the sorting, and blocks are counted from
position 0: padding is exact on the right. Deviations: block means of the keys
replace the paper's block sums of the layer's input; no Gumbel noise; the sorting
network is one linear map. In LRA's code the learned permutation cancels, since every
block attends to the sum of all; its blocks are strided, and its output is the sum of
two softmaxes, one over the own block and one over the sorted one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, inputs
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.softmax import key_sets, patterns
from lra_jax.errors import expected

__all__ = ["sinkhorn_attention", "sinkhorn_parameters", "sinkhorn_weights"]


BLOCK = 64


@documents_in_turn
def sinkhorn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sort_kernel: jax.Array | None = None,
    sort_bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    block: int = BLOCK,
    iterations: int = 8,
    temperature: float = 0.75,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes attention to a query's own block and the one sorted into its place.

    Args:
      query, key, value: as in `linear_attention`, of one length T.
      sort_kernel: w, `[N, H, L]` with L >= P = ceil(T / C).
      sort_bias: b, `[N, L]`; None = zero.
      mask: as in `linear_attention`. Padding is exact on the right.
      is_causal: must be False; there is no causal form.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      block: C.
      iterations: of row and column normalisation.
      temperature: below 1 sharpens the permutation.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, the input has more
        blocks than the kernel has columns, query and key differ in length, or
        `is_causal` is True.
    """
    inputs.check_size("block", block)
    inputs.check_size("iterations", iterations, 0)
    inputs.check_number("temperature", temperature)
    call = Call.of(query, key, value, mask, precision=precision)
    kernel = _check_network(sort_kernel, sort_bias, call.query, block)

    def compute(
        queries: jax.Array, place: jax.Array, sequence: key_sets.Sequence
    ) -> jax.Array:
        keys, values, number = (key_sets.cut(x, block) for x in sequence)
        real = number[:, 0, :, :, 0] > 0
        scores = _scores(keys, real, kernel, sort_bias, precision)
        live = real.any(-1)
        sorting = _permutation(scores / temperature, live, iterations)
        sorting = sorting.astype(keys.dtype)

        def sort(x: jax.Array) -> jax.Array:
            return jnp.einsum("bnps,bnsch->bnpch", sorting, x, precision=precision)

        # A sorted place exists if any block has a real position there.
        here = jnp.where(real.any(1), 0, -1)[:, None, None, None]
        sets = [
            key_sets.band(sequence, block, 0, 0, key_sets.always),
            key_sets.Keys("block", sort(keys), sort(values), here, key_sets.always),
        ]
        return patterns.attend(queries, place, sets, precision)[0]

    return patterns.in_blocks(call, "sinkhorn", block, compute)


sinkhorn_weights = dense.weights_of(
    sinkhorn_attention, "No entry is negative; rows sum only approximately to one."
)


def sinkhorn_parameters(
    rng_key: jax.Array,
    *,
    max_length: int,
    num_heads: int,
    head_dim: int,
    block: int = BLOCK,
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `sinkhorn_attention` takes as keywords.

    Args:
      rng_key: a key of ``jax.random``.
      max_length: the longest input; L = ceil(max_length / C).
      num_heads: N.
      head_dim: H.
      block: C, as in `sinkhorn_attention`.
      dtype: of the arrays.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      `sort_kernel` `[N, H, L]`, Glorot uniform, and `sort_bias` `[N, L]`, zero.

    Raises:
      ValueError: a size is not positive.
    """
    inputs.check_sizes(sinkhorn_parameters, sizes)
    count = -(
        -inputs.check_size("max_length", max_length)
        // inputs.check_size("block", block)
    )
    heads = inputs.check_size("num_heads", num_heads)
    width = inputs.check_size("head_dim", head_dim)
    init = jax.nn.initializers.glorot_uniform(batch_axis=0)
    return {
        "sort_kernel": init(rng_key, (heads, width, count), dtype),
        "sort_bias": jnp.zeros((heads, count), dtype),
    }


def _scores(
    keys: jax.Array,
    real: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """R `[B, N, P, P]` from keys `[B, N, P, C, H]`, real at `[1 or B, P, C]`."""
    dtype = inputs.accumulation_dtype(keys)
    count = keys.shape[2]
    sizes = jnp.maximum(real.sum(-1), 1).astype(dtype)
    means = keys.astype(dtype).sum(3) / sizes[:, None, :, None]
    kernel = kernel[None, :, :, :count].astype(dtype)
    scores = jnp.matmul(means, kernel, precision=precision)
    if bias is None:
        return scores
    return scores + bias[None, :, None, :count].astype(dtype)


def _permutation(scores: jax.Array, live: jax.Array, iterations: int) -> jax.Array:
    """S `[B, N, P, P]` from scores; zero for blocks not live, `[1 or B, P]`."""
    both = (live[:, :, None] & live[:, None])[:, None]
    lowest = jnp.finfo(scores.dtype).min

    def normalise(scores: jax.Array, _: None) -> tuple[jax.Array, None]:
        for axis in (-1, -2):
            total = jax.nn.logsumexp(scores, axis=axis, keepdims=True)
            scores = jnp.where(both, scores - total, lowest)
        return scores, None

    scores = jnp.where(both, scores, lowest)
    scores, _unused = jax.lax.scan(normalise, scores, length=iterations)
    return jnp.where(both, jnp.exp(scores), 0)


def _check_network(
    kernel: jax.Array | None, bias: jax.Array | None, query: jax.Array, block: int
) -> jax.Array:
    _, length, heads, width = query.shape
    source = "sinkhorn_parameters"
    kernel = inputs.check_array(
        "sort_kernel", kernel, "N H L", heads, width, None, source=source
    )
    columns, count = kernel.shape[2], -(-length // block)
    if columns < count:
        raise expected(
            "sort_kernel",
            f"at least {count} columns, one for each block of {block} positions",
            f"{kernel.shape}: the input is longer than the kernel was made for",
        )
    if bias is not None:
        inputs.check_array("sort_bias", bias, "N L", heads, columns)
    return kernel
