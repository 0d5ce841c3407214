"""Attention over a sequence that is split over devices.

Each device holds T / P consecutive positions of query, key and value. The slices
of other devices enter through their *states*, the sums of ``phi(k_j) v_j^T`` and of
``phi(k_j)`` over their positions; cosFormer's features are rotated by their place in
the whole sequence first. So the devices exchange

- forward: one all-reduce of the states; or, if causal, one all-gather, after which each
  device adds up those before it;
- backward: the transpose, one all-reduce or reduce-scatter of the states' gradients.

Each moves N M (Hv + 1) float32 numbers per sample and device, whatever the length. A
device's state is a product of its own keys and values, so no device waits for another;
the causal form then starts from the sum of the states before it. This is LASP-2 (Sun
et al. 2025, "LASP-2: Rethinking Sequence Parallelism for Linear Attention"), with the
denominators that it leaves out.

Each device runs the function that the mechanism's entry names as ``sharded``.
Flow-Attention, which has no causal form here, needs several exchanges.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lra_jax.attention import inputs, masking, packed, registry
from lra_jax.errors import expected

__all__ = ["sequence_parallel"]

Mask = jax.Array | None


@functools.cache
def sequence_parallel(
    mechanism: str | registry.Mechanism,
    *,
    axis: str = "seq",
    batch_axis: str | None = "data",
    mesh: Mesh | None = None,
) -> registry.Mechanism:
    """Splits the positions of a mechanism over the devices of a mesh axis.

    Args:
      mechanism: one whose entry has ``sharded``; no causal form for Flow-Attention.
      axis: the mesh axis that the positions are split over.
      batch_axis: the axis that the samples are split over; None = each device has all.
      mesh: the mesh; None = that of ``jax.set_mesh`` when the function is called.

    Returns:
      The mechanism with another function: the same arguments (after ``is_causal`` by
      name) and results, as whole arrays, inside or outside ``jax.jit``. Self-attention
      only (T == S); the axes must divide the length and the batch. On a mesh of
      ``AxisType.Explicit`` the arrays must already be split in this way. cosFormer's
      ``max_length`` is an int or None.

    Raises:
      ValueError: the mechanism has no such form; or, when called, the arrays, the mask
        or the mesh do not fit.
    """
    entry = registry.resolve(mechanism)
    local = entry.slice_attention
    if local is None:
        able = (name for name, one in registry.MECHANISMS.items() if one.sharded)
        needed = f"one of {', '.join(able)} to split the sequence over devices"
        raise expected("attention", needed, f"{entry.name!r}")

    @functools.wraps(entry.attention)
    def attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: Mask = None,
        is_causal: bool = False,
        *,
        query_mask: Mask = None,
        segment_ids: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        keywords = {**options}
        if query_mask is not None:
            keywords["query_mask"] = query_mask
        names = registry.accepted_keywords(entry.attention) or ()
        unknown = {name: x for name, x in keywords.items() if name not in names}
        inputs.check_keywords(entry.attention, unknown, options.get("deterministic"))
        inputs.check_inputs(query, key, value, is_causal)
        inputs.check_self(query, key, f"sequence-parallel {entry.name}")
        if (forced := options.get("implementation")) in ("pallas", "native"):
            needed = "'auto' or 'xla' for a sequence that is split over devices"
            raise expected("implementation", needed, f"{forced!r}")
        _check_mesh(mesh, query, {axis: 1, batch_axis: 0})
        batch, length = query.shape[:2]
        masks = (
            masking.padding_mask(mask, batch, length),
            masking.padding_mask(query_mask, batch, length, "query_mask"),
        )
        packed.documents(segment_ids, query, key)
        spec = P(batch_axis, axis)
        return jax.shard_map(
            functools.partial(local, axis=axis, is_causal=is_causal, **options),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )(query, key, value, *masks, segment_ids)

    return dataclasses.replace(entry, function=attention)


def _check_mesh(
    mesh: Mesh | None, query: jax.Array, axes: dict[str | None, int]
) -> None:
    sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    for name, place in axes.items():
        if name is None:
            continue
        if name not in sizes:
            needed = f"one with the axis {name!r}, from this argument or jax.set_mesh"
            raise expected("mesh", needed, f"the axes {tuple(sizes)}")
        if query.shape[place] % sizes[name]:
            kind = "length T" if place else "batch B"
            devices = f"{sizes[name]} devices of the mesh axis {name!r}"
            raise expected("query", f"{kind} a multiple of the {devices}", query.shape)
