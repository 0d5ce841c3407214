"""Synthesizer (Tay et al. 2021, "Synthesizer: Rethinking Self-Attention for Transformer
Models").

``out = softmax(R) v`` with scores R that are no products of queries and keys. With
learned arrays for inputs of up to L positions, the variants are

- "dense": ``R_i = relu(q_i) W + b``;
- "factorised_dense": ``R_ij = x_i[j // L2] y_i[j % L2]`` with x and y made like that,
  of L1 and L2 columns;
- "random": R is learned itself, the same for every input;
- "factorised_random": ``R = E F^T`` with E and F of k columns.

The two layers of the paper's dense form, ``relu(x W_1) W_2``, are the query projection
and W here; keys are not read, and queries by the dense variants only. There is no
1 / sqrt(H).

Cost: O(T S (H + Hv)) time and O(T S) memory, as for softmax attention: the matrix is
there, only the product with the keys is saved.

Columns belong to positions counted from 0, so padding is exact on the right.
Deviations: padding is left out of the softmax, where the arena's code ignores it; no
mixtures of variants.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.registry import Mechanism

__all__ = ["synthesizer_attention", "synthesizer_parameters", "synthesizer_weights"]

MECHANISM = Mechanism(
    name="synthesizer",
    causal=True,
    cross=True,
    stream=False,
    cost="T S H",
    summary="softmax of learned scores, without products of query and key",
    source="Tay et al. 2021",
    parameters="synthesizer_parameters",
    projections=("query", "value", "out"),
)

VARIANTS = ("dense", "factorised_dense", "random", "factorised_random")
DEFAULT = "factorised_random"

_NAMES = ("first", "first_bias", "second", "second_bias")
_LAYOUTS = {
    "dense": {"first": "[N, H, L]", "first_bias": "[N, L]"},
    "factorised_dense": {
        "first": "[N, H, L1]",
        "first_bias": "[N, L1]",
        "second": "[N, H, L2]",
        "second_bias": "[N, L2]",
    },
    "random": {"first": "[N, L, L]"},
    "factorised_random": {"first": "[N, L, k]", "second": "[N, L, k]"},
}


def synthesizer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    first: jax.Array | None = None,
    first_bias: jax.Array | None = None,
    second: jax.Array | None = None,
    second_bias: jax.Array | None = None,
    variant: str = DEFAULT,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes attention with synthetic scores.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; not read.
      value: `[B, S, N, Hv]`; its heads may be a divisor of N.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, N, T, S]`. Padding is exact on the right.
      is_causal: position i sees keys 0..i only; needs T == S.
      first: W `[N, H, L]` ("dense") or `[N, H, L1]` ("factorised_dense"), R `[N, L, L]`
        ("random"), or E `[N, L, k]` ("factorised_random").
      first_bias: `[N, L]` or `[N, L1]` for the dense variants; None = zero.
      second: `[N, H, L2]` ("factorised_dense"), or F `[N, L, k]` ("factorised_random").
      second_bias: `[N, L2]` ("factorised_dense"); None = zero.
      variant: one of the four.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; softmax and sums are float32 or wider.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, the arrays are not those of the
        variant, or the input is longer than they were made for.
    """
    inputs.check_inputs(query, key, value, is_causal)
    arrays = _checked(variant, query, key, (first, first_bias, second, second_bias))
    weights = _weights(query, key, mask, is_causal, variant, arrays, precision)
    batch, length, num_heads = query.shape[:3]
    pairs = inputs.pair_mask(mask, batch, num_heads, length, key.shape[1])
    value = inputs.hide_padding(value, pairs)
    value = inputs.by_head(value, num_heads, dtype=weights.dtype)
    out = jnp.matmul(weights, value, precision=precision)
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def synthesizer_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    first: jax.Array | None = None,
    first_bias: jax.Array | None = None,
    second: jax.Array | None = None,
    second_bias: jax.Array | None = None,
    variant: str = DEFAULT,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, S]`, float32 or wider; rows sum to one or zero.

    Arguments and errors are those of `synthesizer_attention`.
    """
    inputs.check_inputs(query, key, None, is_causal)
    arrays = _checked(variant, query, key, (first, first_bias, second, second_bias))
    weights = _weights(query, key, mask, is_causal, variant, arrays, precision)
    return jnp.broadcast_to(weights, (query.shape[0], *weights.shape[1:]))


def synthesizer_parameters(
    rng_key: jax.Array,
    *,
    max_length: int,
    num_heads: int,
    head_dim: int,
    variant: str = DEFAULT,
    rank: int = 8,
    dtype: Any = jnp.float32,
    **_: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `synthesizer_attention` takes as keywords.

    Args:
      rng_key: a key of ``jax.random``.
      max_length: L, the longest input.
      num_heads: N.
      head_dim: H.
      variant: one of the four.
      rank: k, for "factorised_random".
      dtype: of the arrays.
      **_: further keywords, so that every mechanism can be called alike; ignored.

    Returns:
      ``first`` and, of the factorised variants, ``second``, Glorot uniform; of the
      dense ones the biases as well, zero. L2 is sqrt(L), rounded up.

    Raises:
      ValueError: a size is not positive, or the variant is unknown.
    """
    _check_variant(variant)
    sizes = {"max_length": max_length, "num_heads": num_heads}
    sizes |= {"head_dim": head_dim, "rank": rank}
    longest, heads, width, rank = (
        inputs.check_size(name, size) for name, size in sizes.items()
    )
    columns = math.isqrt(longest - 1) + 1
    rows = -(-longest // columns)
    made = {
        "dense": {"first": (width, longest)},
        "factorised_dense": {"first": (width, rows), "second": (width, columns)},
        "random": {"first": (longest, longest)},
        "factorised_random": {"first": (longest, rank), "second": (longest, rank)},
    }[variant]
    init = jax.nn.initializers.glorot_uniform(batch_axis=0)
    keys = jax.random.split(rng_key, len(made))
    arrays = {
        name: init(key, (heads, *shape), dtype)
        for (name, shape), key in zip(made.items(), keys, strict=True)
    }
    if "dense" in variant:
        arrays |= {
            f"{name}_bias": jnp.zeros((heads, columns), dtype)
            for name, (_, columns) in made.items()
        }
    return arrays


Arrays = dict[str, jax.Array]


def _weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    variant: str,
    arrays: Arrays,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """`[1 or B, N, T, S]`."""
    batch, length, num_heads = query.shape[:3]
    keys = key.shape[1]
    dtype = inputs.accumulation_dtype(query)
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    if "dense" in variant:
        hidden = jax.nn.relu(inputs.by_head(query, num_heads, dtype=dtype))
        scores = _dense(hidden, arrays, keys, precision)
    elif variant == "random":
        scores = arrays["first"][None, :, :length, :keys]
    else:
        rows, columns = arrays["first"][:, :length], arrays["second"][:, :keys]
        product = functools.partial(jnp.einsum, precision=precision)
        scores = product("ntk,nsk->nts", rows, columns)[None]
    pairs = inputs.pair_mask(mask, batch, num_heads, length, keys)
    if is_causal:
        earlier = jnp.tri(length, dtype=bool)[None, None]
        pairs = earlier if pairs is None else earlier & pairs
    if pairs is not None and pairs.shape[0] > scores.shape[0]:
        scores = jnp.broadcast_to(scores, (batch, *scores.shape[1:]))
    return feature_maps.masked_softmax(scores, pairs, axis=-1)


def _dense(
    hidden: jax.Array,
    arrays: Arrays,
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


def _check_variant(variant: str) -> None:
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {VARIANTS}, got {variant!r}")


def _checked(
    variant: str,
    query: jax.Array,
    key: jax.Array,
    given: tuple[jax.Array | None, ...],
) -> Arrays:
    """The arrays of a variant by name, without those that are not given."""
    _check_variant(variant)
    layouts, heads, width = _LAYOUTS[variant], query.shape[2], query.shape[3]
    sizes = {"N": heads, "H": width}
    arrays: Arrays = {}
    for name, array in zip(_NAMES, given, strict=True):
        layout = layouts.get(name)
        if (array is None) != (layout is None) and not (array is None and "_" in name):
            got = "None" if array is None else f"shape {jnp.shape(array)}"
            raise ValueError(
                f"{name}: expected {layout} for variant={variant!r}, got {got}; "
                "synthesizer_parameters makes what a variant needs"
            )
        if array is None or layout is None:
            continue
        letters, shape = layout[1:-1].split(", "), jnp.shape(array)
        if len(letters) != len(shape) or any(
            sizes.setdefault(letter, size) != size
            for letter, size in zip(letters, shape, strict=True)
        ):
            raise ValueError(
                f"{name}: expected {layout} with N={heads} and H={width}, and sizes "
                f"as in the other arrays, got shape {shape}"
            )
        arrays[name] = array
    longest = sizes["L"] if "L" in sizes else sizes["L1"] * sizes["L2"]
    needed = key.shape[1] if "dense" in variant else max(query.shape[1], key.shape[1])
    if longest < needed:
        raise ValueError(
            f"first: expected room for {needed} positions, got {longest}: the input is "
            "longer than the arrays were made for"
        )
    return arrays
