"""Flow-Attention on Hopper GPUs, not causal: flows by XLA, the product by kernels.

With the flows I, the competition c and the allocation a (`lra_jax.attention.flow.flow`)

    out_i = (a_i / I_i) phi(q_i)^T sum_j phi(k_j) (c_j v_j)^T

is a row's factor times the numerator of linear attention over weighted values, whose
kernels (`gpu`) make the features on the way in. The flows are sums over rows and
columns of features, each of which has to be complete before the next: query and key are
read four times for them, whoever does it. XLA makes these sums, for which it keeps the
features in float32, and a pass over the values and one over the output for their
factors.

Gradients are those of the parts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention.flow import parts as flow_parts
from lra_jax.kernels import api
from lra_jax.kernels.spec import MAPS, FlowSpec, Spec

Rows = tuple[jax.Array | None, ...]


def forward(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: Rows,
    save: bool,
) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and what `backward` needs."""

    if not save:
        return _attend(spec, rows, query, key, value), ()
    return jax.vjp(functools.partial(_attend, spec, rows), query, key, value)


def backward(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: Rows,
    saved: Any,
    of_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value."""
    del spec, query, key, value, rows
    return saved(of_out)


def _attend(
    spec: FlowSpec, rows: Rows, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    sources, sinks = rows
    options = flow_parts.Options(
        clip=spec.clip,
        competition_axis="source",
        competition=True,
        allocation=True,
        eps=spec.eps,
        extra_eps=spec.extra_eps,
        precision=spec.precision,
    )
    features = _features(spec, query, sinks), _features(spec, key, sources)
    masks = _seen(sources), _seen(sinks)
    terms = flow_parts.terms(*features, *masks, options)
    value = _times(value, terms.competition)
    scale = jnp.zeros(query.shape[:1], jnp.float32)
    product = api.compiled(_linear(spec), query, key, value, sources, scale)
    weights = terms.allocation / flow_parts.divisor(terms.incoming)
    if sinks is not None:
        weights = jnp.where(sinks > 0, weights, 0.0)
    return _times(product, weights)


def _linear(spec: FlowSpec) -> Spec:
    """Linear attention's numerators of these sizes."""
    return Spec(
        is_causal=False,
        feature_map=spec.feature_map,
        chunk=spec.chunk,
        block=spec.block,
        precision=spec.precision,
        target=spec.target,
        interpret=spec.interpret,
        denominator="none",
        eps=0.0,
    )


def _seen(row: jax.Array | None) -> jax.Array | None:
    return None if row is None else row[:, 0] > 0


def _features(spec: FlowSpec, x: jax.Array, row: jax.Array | None) -> jax.Array:
    """phi of `[B, T, N, H]` with the heads first, float32, zero where hidden."""
    x = MAPS[spec.feature_map](jnp.swapaxes(x, 1, 2).astype(jnp.float32))[0]
    return x if row is None else jnp.where(row[..., None] > 0, x, 0.0)


def _times(x: jax.Array, weights: jax.Array) -> jax.Array:
    """`[B, T, N, Hv]` by `[B, N, T]`, in the dtype of the first."""
    weights = jnp.swapaxes(weights, 1, 2)[..., None]
    return (x.astype(jnp.float32) * weights).astype(x.dtype)
