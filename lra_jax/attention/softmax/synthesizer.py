"""Synthesizer (Tay et al. 2021, "Synthesizer: Rethinking Self-Attention for Transformer
Models").

``out = softmax(R) v`` with scores R that are not products of queries and keys. With
learned arrays for inputs of up to L positions, the variants are

- "dense": ``R_i = relu(q_i) W + b``;
- "factorised_dense": ``R_ij = x_i[j // L2] y_i[j % L2]`` with x and y computed in the
  same way, with L1 and L2 columns;
- "random": R itself is learned, the same for every input;
- "factorised_random": ``R = E F^T`` with E and F of k columns.

The two layers of the paper's dense form, ``relu(x W_1) W_2``, are the query projection
and W here; keys are not read, and queries only by the dense variants. There is no
1 / sqrt(H).

Cost: O(T S (H + Hv)) time and O(T S) memory, as for softmax attention: the matrix is
formed, and only the product with the keys is avoided.

Columns belong to positions counted from 0, so padding is exact on the right.
Deviations: there are no mixtures of variants, and LRA's models are one: "random" scores
plus ``q_i . k_j / sqrt(H)``, which is why this mechanism has no options in
``--preset=official``. Padding is left out of the softmax, where LRA's layer ignores it
if it has no such products. A layer projects queries for every variant, because options
do not change which projections it has; the random variants do not read them, so these
parameters get no gradient and never change.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, feature_maps, inputs, masking
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.errors import expected, known

__all__ = ["synthesizer_attention", "synthesizer_parameters", "synthesizer_weights"]


DEFAULT = "factorised_random"
_RANK = 8

# The arrays of each variant and their axes; biases may be left out.
_LAYOUTS = {
    "dense": {"first": "N H L", "first_bias": "N L"},
    "factorised_dense": {
        "first": "N H L1",
        "first_bias": "N L1",
        "second": "N H L2",
        "second_bias": "N L2",
    },
    "random": {"first": "N L L"},
    "factorised_random": {"first": "N L k", "second": "N L k"},
}
VARIANTS = tuple(_LAYOUTS)


@documents_in_turn
def synthesizer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    first: jax.Array | None = None,
    first_bias: jax.Array | None = None,
    second: jax.Array | None = None,
    second_bias: jax.Array | None = None,
    variant: str = DEFAULT,
    precision: jax.lax.PrecisionLike = None,
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes attention with synthetic scores.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; not read.
      value: `[B, S, N, Hv]`; its heads may be a divisor of N.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, N, T, S]`. Padding is exact on the right.
      is_causal: position i sees keys 0..i only; needs T == S.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      first: W `[N, H, L]` ("dense") or `[N, H, L1]` ("factorised_dense"), R `[N, L, L]`
        ("random"), or E `[N, L, k]` ("factorised_random").
      first_bias: `[N, L]` or `[N, L1]` for the dense variants; None = zero.
      second: `[N, H, L2]` ("factorised_dense"), or F `[N, L, k]` ("factorised_random").
      second_bias: `[N, L2]` ("factorised_dense"); None = zero.
      variant: one of the four.
      deterministic: from Flax's layers; with it, ``decode=True`` is refused.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; softmax and sums are float32 or wider.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, the arrays do not belong to the
        variant, or the input is longer than they allow.
    """
    inputs.check_inputs(query, key, value, is_causal)
    inputs.refuse_decoding(deterministic, query, key, "synthesizer")
    batch, length, num_heads = query.shape[:3]
    keys = key.shape[1]
    arrays = _check_arrays(
        variant,
        query,
        keys,
        first=first,
        first_bias=first_bias,
        second=second,
        second_bias=second_bias,
    )
    dtype = inputs.accumulation_dtype(query)
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    finite = None
    if "dense" in variant:
        query, finite = masking.hide_broken(query, mask)
        hidden = jax.nn.relu(masking.by_head(query, num_heads, dtype=dtype))
        scores = _dense(hidden, arrays, keys, precision)
    elif variant == "random":
        scores = arrays["first"][None, :, :length, :keys]
    else:
        rows, columns = arrays["first"][:, :length], arrays["second"][:, :keys]
        scores = feature_maps.products(rows[None], columns[None], precision)
    pairs = masking.pair_mask(mask, batch, num_heads, length, keys)
    value = masking.by_head(masking.hide_unseen(value, pairs), num_heads, dtype=dtype)
    if is_causal:
        pairs = masking.both(pairs, jnp.tri(length, dtype=bool)[None, None])
    if pairs is not None and pairs.shape[0] != scores.shape[0]:
        scores = jnp.broadcast_to(scores, (batch, *scores.shape[1:]))
    weights = feature_maps.masked_softmax(scores, pairs)
    out = jnp.swapaxes(jnp.matmul(weights, value, precision=precision), 1, 2)
    return masking.broken_again(out, finite).astype(query.dtype)


synthesizer_weights = dense.weights_of(
    synthesizer_attention, "Rows sum to one or zero."
)


def synthesizer_parameters(
    rng_key: jax.Array,
    *,
    max_length: int,
    num_heads: int,
    head_dim: int,
    variant: str = DEFAULT,
    rank: int | None = None,
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `synthesizer_attention` takes as keywords.

    Args:
      rng_key: a key of ``jax.random``.
      max_length: L, the longest input.
      num_heads: N.
      head_dim: H.
      variant: one of the four.
      rank: k, for "factorised_random" only; None = 8.
      dtype: of the arrays.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      ``first`` and, for the factorised variants, ``second``, Glorot uniform; for the
      dense variants also the biases, zero. L2 is sqrt(L), rounded up.

    Raises:
      ValueError: a size is not positive, or the variant is unknown.
    """
    inputs.check_sizes(synthesizer_parameters, sizes)
    known("variant", variant, VARIANTS)
    longest = inputs.check_size("max_length", max_length)
    heads = inputs.check_size("num_heads", num_heads)
    width = inputs.check_size("head_dim", head_dim)
    rank = inputs.check_size("rank", _RANK if rank is None else rank)
    columns = math.isqrt(longest - 1) + 1
    rows = -(-longest // columns)
    sizes = {"N": heads, "H": width, "k": rank}
    sizes |= {"L": longest, "L1": rows, "L2": columns}
    shapes = {
        name: [sizes[letter] for letter in letters.split()]
        for name, letters in _LAYOUTS[variant].items()
    }
    init = jax.nn.initializers.glorot_uniform(batch_axis=0)
    matrices = [name for name in shapes if not name.endswith("_bias")]
    keys = jax.random.split(rng_key, len(matrices))
    arrays = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    for name, key in zip(matrices, keys, strict=True):
        arrays[name] = init(key, shapes[name], dtype)
    return arrays


def _dense(
    hidden: jax.Array,
    arrays: dict[str, jax.Array],
    keys: int,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """The scores of the dense variants, `[B, N, T, S]`."""

    def layer(name: str, width: int | None = None) -> jax.Array:
        kernel = arrays[name][None, :, :, :width]
        out = jnp.matmul(hidden, kernel, precision=precision)
        if f"{name}_bias" not in arrays:
            return out
        return out + arrays[f"{name}_bias"][None, :, None, :width]

    if "second" not in arrays:
        return layer("first", keys)
    rows, columns = layer("first"), layer("second")
    tiles = rows[..., :, None] * columns[..., None, :]
    return tiles.reshape(*tiles.shape[:3], -1)[..., :keys]


def _check_arrays(
    variant: str, query: jax.Array, keys: int, **passed: jax.Array | None
) -> dict[str, jax.Array]:
    """The arrays of a variant, by name."""
    layouts = _LAYOUTS[known("variant", variant, VARIANTS)]
    sizes = {"N": query.shape[2], "H": query.shape[3]}
    for name, array in passed.items():
        if array is not None and name not in layouts:
            needed = f"None, because variant={variant!r} has no such array"
            raise expected(name, needed, "an array")
    arrays = {}
    for name, axes in layouts.items():
        if passed[name] is None and name.endswith("_bias"):
            continue
        letters = axes.split()
        for _ in range(2):  # again, because a letter may occur twice
            arrays[name] = inputs.check_array(
                name,
                passed[name],
                axes,
                *(sizes.get(letter) for letter in letters),
                source="synthesizer_parameters",
            )
            sizes |= zip(letters, arrays[name].shape, strict=True)
    longest = sizes["L"] if "L" in sizes else sizes["L1"] * sizes["L2"]
    needed = keys if "dense" in variant else max(query.shape[1], keys)
    if longest < needed:
        raise expected(
            "first",
            f"room for {needed} positions",
            f"{longest}: the input is longer than the arrays were made for",
        )
    return arrays
