"""Attention over a sequence that is split over devices.

Each device holds T / P consecutive positions of query, key and value. What the other
devices hold enters through their *states*, the sums of ``phi(k_j) v_j^T`` and of
``phi(k_j)`` over their positions; cosFormer's features are rotated by their place in
the whole sequence first. So the devices exchange

- forward: one all-gather of the states, of which a device adds up those before it
  (causal) or all the others;
- backward: one reduce-scatter of the states' gradients, the transpose of that.

Both move N M (Hv + 1) float32 numbers a sample and device, whatever the length. The
states come from the pass over a device's own positions, which waits for nobody. This is
LASP-2 (Sun et al. 2025, "LASP-2: Rethinking Sequence Parallelism for Linear
Attention"), with the denominators that it leaves out.

Flow-Attention, which is not causal here, needs several exchanges
(`lra_jax.attention.sharded.flow_slice`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lra_jax.attention import feature_maps, inputs, registry
from lra_jax.attention.causal import sums as causal
from lra_jax.attention.linear import angles
from lra_jax.attention.sharded.flow_slice import flow_slice

__all__ = ["SEQUENCE_PARALLEL", "sequence_parallel"]

SEQUENCE_PARALLEL = ("linear", "cosformer", "flow")

Mask = jax.Array | None


@functools.cache
def sequence_parallel(
    mechanism: str | registry.Mechanism,
    *,
    axis: str = "seq",
    batch_axis: str | None = "data",
    mesh: Mesh | None = None,
) -> registry.Mechanism:
    """A mechanism whose positions are split over the devices of a mesh axis.

    Args:
      mechanism: "linear", "cosformer", or "flow", which is not causal here.
      axis: the mesh axis that the positions are split over.
      batch_axis: the one that the samples are split over; None = each device has all.
      mesh: the mesh; None = that of ``jax.set_mesh`` when the function is called.

    Returns:
      The mechanism with another function: the same arguments and results, as whole
      arrays, inside ``jax.jit`` or out of it. Self-attention only (T == S), of a length
      and a batch that the axes divide; cosFormer's ``max_length`` is an int or None.

    Raises:
      ValueError: the mechanism has no such form; and, when called, the arrays, the mask
        or the mesh do not fit.
    """
    found = registry.resolve(mechanism)
    if found.name not in SEQUENCE_PARALLEL:
        raise ValueError(
            f"attention: expected one of {', '.join(SEQUENCE_PARALLEL)} to split the "
            f"sequence over devices, got {found.name!r}"
        )
    local = _LOCAL[found.name]

    @functools.wraps(found.attention)
    def attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: Mask = None,
        is_causal: bool = False,
        query_mask: Mask = None,
        **options: Any,
    ) -> jax.Array:
        inputs.check_inputs(query, key, value, is_causal)
        inputs.check_self(query, key, f"sequence-parallel {found.name}")
        if options.get("implementation") == "pallas":
            raise ValueError(
                "implementation: expected 'auto' or 'xla' for a sequence that is split "
                "over devices, got 'pallas'"
            )
        _check_mesh(mesh, query, {axis: 1, batch_axis: 0})
        batch, length = query.shape[:2]
        masks = (
            inputs.padding_mask(mask, batch, length),
            inputs.padding_mask(query_mask, batch, length, "query_mask"),
        )
        spec = P(batch_axis, axis)
        return jax.shard_map(
            functools.partial(local, axis=axis, is_causal=is_causal, **options),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )(query, key, value, *masks)

    return dataclasses.replace(found, function=attention)


def _check_mesh(
    mesh: Mesh | None, query: jax.Array, axes: dict[str | None, int]
) -> None:
    sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    for name, place in axes.items():
        if name is None:
            continue
        if name not in sizes:
            raise ValueError(
                f"mesh: expected one with the axis {name!r}, given here or by "
                f"jax.set_mesh, got the axes {tuple(sizes)}"
            )
        if query.shape[place] % sizes[name]:
            raise ValueError(
                f"query: expected {'length T' if place else 'batch B'} a multiple of "
                f"the {sizes[name]} devices of the mesh axis {name!r}, "
                f"got shape {query.shape}"
            )


def _linear(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    query_mask: Mask,
    *,
    axis: str,
    is_causal: bool,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """One device's part of `linear.linear_attention`."""
    dtype = inputs.accumulation_dtype(query, key, value)
    features = feature_maps.features(query, key, feature_map, dtype, mask)
    value = inputs.by_head(value, query.shape[2], mask, dtype)
    numerator, denominator = _combined(
        features, value, None, axis, is_causal, chunking, precision
    )
    out = numerator / (denominator + eps)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def _cosformer(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    query_mask: Mask,
    *,
    axis: str,
    is_causal: bool,
    max_length: int | None = None,
    denominator: str = "clamp",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """One device's part of `cosformer.cosformer_attention`."""
    if denominator not in ("clamp", "add"):
        raise ValueError(f"denominator: expected 'clamp' or 'add', got {denominator!r}")
    dtype = inputs.accumulation_dtype(query, key, value)
    num_heads, length = query.shape[2], query.shape[1]
    features = (
        jax.nn.relu(inputs.by_head(query, num_heads, None, dtype)),
        jax.nn.relu(inputs.by_head(key, num_heads, mask, dtype)),
    )
    value = inputs.by_head(value, num_heads, mask, dtype)
    whole = length * jax.lax.axis_size(axis)
    longest = angles.fixed(whole if max_length is None else max_length, whole)
    start = jax.lax.axis_index(axis) * length
    tables = tuple(
        jax.lax.dynamic_slice_in_dim(table, start, length, 2)
        for table in angles.tables(whole, longest, dtype)
    )
    numerator, sums = _combined(
        features, value, tables, axis, is_causal, chunking, precision
    )
    bounded = feature_maps.at_least(sums, eps) if denominator == "clamp" else sums + eps
    return jnp.swapaxes(numerator / bounded[..., None], 1, 2).astype(query.dtype)


def _combined(
    features: tuple[jax.Array, jax.Array],
    value: jax.Array,
    tables: Any,
    axis: str,
    is_causal: bool,
    chunking: causal.Chunking | None,
    precision: jax.lax.PrecisionLike,
) -> tuple[jax.Array, jax.Array]:
    """Numerators and denominators over the devices, heads first."""
    product = functools.partial(jnp.einsum, precision=precision)
    query, key = features
    if tables is not None:
        query, key = (feature_maps.rotated(x, *tables) for x in features)
    near = None
    if is_causal:
        options: dict[str, Any] = {"chunking": chunking, "precision": precision}
        *near, own = causal.causal_linear(*features, value, angles=tables, **options)
    else:
        own = causal.Sums(product("bnsm,bnsv->bnmv", key, value), key.sum(2))
    others = _exchanged(own, axis, is_causal)
    numerator = product("bntm,bnmv->bntv", query, others.summary)
    denominator = feature_maps.project(query, others.total, precision)
    if near is None:
        return numerator, denominator
    return near[0] + numerator, near[1] + denominator


def _exchanged(own: causal.Sums, axis: str, is_causal: bool) -> causal.Sums:
    """The sum of all devices' states, or of those before this one; one all-gather."""
    packed = jnp.concatenate([own.summary, own.total[..., None]], -1)
    states = jax.lax.all_gather(packed, axis)
    if is_causal:
        places = np.arange(states.shape[0], dtype=np.int32)
        before = (places < jax.lax.axis_index(axis)).astype(states.dtype)
        states = states * before.reshape(-1, *[1] * packed.ndim)
    total = states.sum(0)
    return causal.Sums(total[..., :-1], total[..., -1])


_LOCAL: dict[str, Callable[..., jax.Array]] = {
    "linear": _linear,
    "cosformer": _cosformer,
    "flow": flow_slice,
}
