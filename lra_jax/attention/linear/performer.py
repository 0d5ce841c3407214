"""Performer (Choromanski et al. 2021, "Rethinking Attention with Performers", FAVOR+).

``out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j))``. With
x' = x / H^(1/4) and the rows w_r of a random projection W `[M, H]`, the features
``phi_r(x) = exp(w_r . x' - |x'|^2 / 2) / sqrt(M)`` make this an unbiased estimate of
softmax attention's sums, whose error falls as 1 / sqrt(M). Other kernels are defined by
their features, ``f(W x') + eps``.

Cost: O((T + S) M (H + Hv)) time. The causal form (`performer_causal`) sums over j <= i.

The projection is drawn once (`performer_projection`, `performer_parameters`) and passed
to each call; it is not trained. To redraw it during training, pass another.

Deviations from the published code, by default. Its exponents have one reference for all
keys, the largest over positions and features, and an eps is added to the features: for
queries and keys of large norm all features are below eps, and later keys change earlier
outputs. Here the references are exact (`random_features`), there is no eps, and in the
causal form later keys do not change a single bit of earlier outputs. Its masks zero
only the values (pass zeroed values without a mask to get the same); here hidden keys
are left out of the denominator too. Its projections are biased; here they are not.
``dialect`` reproduces the published numbers:

- "google" (google-research, long-range-arena): eps 1e-6, and twice the eps added to
  denominators within eps of zero; other kernels without the latter, without the scale
  H^(-1/4), and by default without a projection;
- "lucidrains" (lucidrains/performer-pytorch): eps 1e-4, no gradient through the
  maximum, and causally 1e-6 added to the sums of key features;
- "fast_transformers" (idiap/fast-transformers, Favor; there ``hyperbolic=True``): no
  maximum and no eps, 1e-6 added to the denominator.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, packed, streams
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import performer_causal, random_features
from lra_jax.attention.linear.linear import causal_sums, document_sums, read, summed
from lra_jax.attention.linear.performer_causal import PerformerSums
from lra_jax.attention.linear.random_features import (
    Options,
    performer_parameters,
    performer_projection,
)
from lra_jax.attention.linear.sums import Sums
from lra_jax.attention.registry import Mechanism, sizes
from lra_jax.errors import expected

__all__ = [
    "PerformerState",
    "PerformerSums",
    "performer_attention",
    "performer_init",
    "performer_parameters",
    "performer_prefill",
    "performer_projection",
    "performer_step",
    "performer_weights",
]

MECHANISM = Mechanism(
    name="performer",
    causal=True,
    cross=True,
    stream=True,
    packed=True,
    kernels=("cpu",),
    cost="(T + S) M H",
    summary="random features of the softmax kernel (FAVOR+), or of another",
    source="Choromanski et al. 2021",
    parameters="performer_parameters",
    buffers=("projection",),
    presets={
        "official": {
            "*": {
                "model.attention_options": "kernel=relu,dialect=google,"
                "feature_eps=0.001"
            },
            # Not those of the repository's file: its maintainer gives these for the
            # published accuracy (google-research/long-range-arena, issue 37).
            "pathfinder": sizes(
                num_layers=1, num_heads=8, embed_dim=128, qkv_dim=64, mlp_dim=128
            ),
        }
    },
)


class PerformerState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: PerformerSums  # [B, N, M, Hv], [B, N, M] and [B, N, M]
    position: jax.Array  # of the next token in each sample, [B] int32

    __repr__ = streams.shapes_shown


@masking.guarded
def performer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    projection: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    kernel: feature_maps.FeatureMap = "softmax",
    dialect: str = "exact",
    hyperbolic: bool = False,
    feature_eps: float | None = None,
    scale: float | None = None,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **flax: Any,
) -> jax.Array:
    """Computes attention with random features.

    Args:
      query, key, value: as in `linear_attention`.
      projection: W, `[M, H]`, as drawn by `performer_projection`. None, for kernels
        other than "softmax" only, computes features of x itself.
      mask: as in `linear_attention`.
      is_causal: position i sees keys 0..i only; needs T == S.
      segment_ids: as in `linear_attention`.
      kernel: "softmax" (FAVOR+), or the f of ``f(W x') + eps``: "relu" (the paper's
        second choice), "exp", "elu" (elu(x) + 1), "sigmoid", or a non-negative function
        of an array.
      dialect: "exact", "google", "lucidrains" or "fast_transformers": see the module.
        Causal softmax features of "google" and "lucidrains" depend slightly on later
        keys.
      hyperbolic: softmax features in pairs ``exp(+-w_r . x' - |x'|^2 / 2)``: 2M
        features, with a lower variance.
      feature_eps: added to every feature; None = the dialect's value: 0 for "softmax"
        ("google" 1e-6, "lucidrains" 1e-4), 1e-3 for other kernels.
      scale: of query and key before the projection; None = H^(-1/4) (1 for "google"
        with another kernel).
      implementation: as in `norm_attention`. There are no kernels for the causal form
        of exact softmax features, and where a dialect's denominators get more than a
        constant.
      chunking, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; zero in rows without visible keys.

    Raises:
      ValueError: shapes, dtypes, the mask, the projection or an option do not fit.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> from lra_jax.attention import performer_parameters, softmax_attention
      >>> arrays = performer_parameters(jax.random.key(1), head_dim=16, features=1024)
      >>> out = performer_attention(query / 2, key / 2, value, **arrays)
      >>> exact = softmax_attention(query / 2, key / 2, value)
      >>> bool(jnp.abs(out - exact).mean() < 0.02)  # It estimates softmax attention.
      True
    """
    inputs.check_keywords(performer_attention, flax)
    inputs.check_inputs(query, key, value, is_causal)
    options = Options(kernel, dialect, hyperbolic, feature_eps, scale, precision)
    matrix = options.matrix(projection, query.shape[-1])
    target = kernels.choose(
        implementation,
        query,
        key,
        value,
        functools.partial(options.project, matrix=matrix),
        chunking,
        _kernel_refusal(options, is_causal),
        "performer",
        is_causal,
        packed=segment_ids is not None,
    )
    found = packed.packed(segment_ids, query, key)
    if target is not None:
        return _by_kernels(
            target, query, key, value, matrix, mask, is_causal, options, found
        )
    if is_causal:
        return _causal(query, key, value, matrix, mask, None, options, chunking, found)[
            0
        ]
    mask = masking.padding_mask(mask, query.shape[0], key.shape[1])
    mask = packed.shown(mask, found)
    dtype = inputs.accumulation_dtype(query, key, value)
    rows, columns, values = _by_head(query, key, value, mask, dtype)
    features = random_features.features(rows, columns, matrix, mask, options, found)
    if found is not None:
        rows, columns = (jnp.swapaxes(x, 1, 2) for x in features)
        plain = feature_maps.Options("identity", dtype, precision)
        out, sums = document_sums(
            plain, rows, columns, value, found, mask=mask, chunking=chunking
        )
        out = random_features.divided(out, sums, rows, False, options)
        return out.astype(query.dtype)
    rows, columns = features
    out, sums = read(rows, summed(columns, values, precision), precision)
    out = random_features.divided(out, sums, rows, False, options)
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


performer_weights = dense.weights_of(
    performer_attention, "Rows sum to one, or to zero where no key is visible."
)


def performer_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    projection: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    state: PerformerState | None = None,
    segment_ids: jax.Array | None = None,
    kernel: feature_maps.FeatureMap = "softmax",
    dialect: str = "exact",
    hyperbolic: bool = False,
    feature_eps: float | None = None,
    scale: float | None = None,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, PerformerState]:
    """Processes a whole prompt, or a later part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, projection, mask and options as in
        `performer_attention`. Every call of a stream needs the same projection.
      state: the state so far; None = a new stream. In a packed row, the first document
        continues it, and the returned state is that of the last.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position.

    Raises:
      ValueError: shapes, dtypes, the mask, the projection, an option or the state do
        not fit, or the dialect's softmax features have no stream.
    """
    options = Options(kernel, dialect, hyperbolic, feature_eps, scale, precision)
    if options.whole_keys:
        raise expected(
            "dialect",
            "'exact' or 'fast_transformers' for a stream with kernel='softmax', since "
            "the others take a maximum over all keys, including later ones",
            f"{dialect!r}",
        )
    matrix = options.matrix(projection, query.shape[-1])
    found = packed.packed(segment_ids, query, key)
    return _causal(query, key, value, matrix, mask, state, options, chunking, found)


performer_init = streams.make_init(performer_prefill)
performer_step = streams.make_step(performer_prefill)


def _kernel_refusal(options: Options, is_causal: bool) -> kernels.Refusal | None:
    """The option that kernels do not support; None = they support all."""
    if options.exact and is_causal:
        wanted = "False for kernel='softmax' with dialect='exact'"
        return "is_causal", wanted, "True"
    if options.denominator_eps(is_causal) is None:
        wanted = "one that adds no more than a constant to denominators"
        return "dialect", wanted, f"{options.dialect!r}"
    return None


def _by_kernels(
    target: kernels.Target,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    matrix: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
    options: Options,
    found: packed.Packed | None,
) -> jax.Array:
    """`performer_attention`, whose features are computed before the kernel."""
    mask = masking.padding_mask(mask, query.shape[0], key.shape[1])
    mask = packed.shown(mask, found)
    key = inputs.match_heads(masking.hide(key, mask), query.shape[2])
    features = random_features.features(
        query, key, matrix, mask, options, found, heads_first=False
    )
    return kernels.attend(
        target,
        *features,
        value,
        mask,
        is_causal,
        feature_map="identity",
        denominator="add",
        eps=options.denominator_eps(is_causal) or 0.0,
        max_length=None,
        chunking=None,
        precision=options.precision,
        documents=packed.numbers(found),
    )


def _by_head(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_heads = query.shape[2]
    return (
        masking.by_head(query, num_heads, dtype=dtype),
        masking.by_head(key, num_heads, mask, dtype),
        masking.by_head(value, num_heads, mask, dtype),
    )


def _causal(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    matrix: jax.Array | None,
    mask: jax.Array | None,
    state: PerformerState | None,
    options: Options,
    chunking: engine.Chunking | None,
    found: packed.Packed | None,
) -> tuple[jax.Array, PerformerState]:
    mask, dtype, position = streams.begun(state, query, key, value, mask, found)
    start = None if state is None else state.sums
    if options.exact and matrix is not None:
        out, sums = performer_causal.causal_softmax_features(
            query,
            key,
            value,
            matrix,
            mask,
            options,
            dtype=dtype,
            state=start,
            resets=packed.resets(found),
            chunking=chunking,
        )
        return out, PerformerState(sums, position)
    # Features with a fixed reference need not be computed in the loop.
    rows, columns, _ = _by_head(query, key, value, mask, dtype)
    features = random_features.features(rows, columns, matrix, mask, options, found)
    rows, columns = (jnp.swapaxes(x, 1, 2) for x in features)
    before = None if start is None else Sums(start.summary, start.total)
    (numerator, denominator), after = causal_sums(
        feature_maps.Options("identity", dtype, options.precision),
        rows,
        columns,
        value.astype(dtype),
        mask=mask,
        state=before,
        resets=packed.resets(found),
        chunking=chunking,
    )
    out = random_features.divided(numerator, denominator, rows, True, options)
    peak = jnp.zeros_like(after.total) + random_features.lowest(dtype)
    sums = PerformerSums(after.summary, after.total, peak)
    return out.astype(query.dtype), PerformerState(sums, position)
