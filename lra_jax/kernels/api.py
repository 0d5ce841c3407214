"""Linear attention by kernels, with gradients."""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.kernels.selection import highest
from lra_jax.kernels.spec import MAPS, Spec

# Positions of a chunk and of a block. A TPU's matrix unit is 128 wide, and a step of
# its grid costs as much as reading some 100 KB. A block of a GPU is a segment: as few
# as give each of its 132 processors a program, but no shorter than this.
_SIZES = {"tpu": (128, 512), "gpu": (64, 256)}
_PROCESSORS = 132


def attend(
    target: tuple[str, bool],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    feature_map: feature_maps.FeatureMap,
    denominator: str,
    eps: float,
    max_length: int | jax.Array | None,
    chunking: Any,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """``sum_j w_ij v_j / (sum_j w_ij, bounded)`` with ``w_ij = phi(q_i) . phi(k_j)``.

    Products take operands in the inputs' dtype and sum in float32; so do the states
    between chunks. For bfloat16 inputs that rounds the features, as the XLA form, which
    computes in float32 throughout, does not.

    Args:
      target: from `choose`.
      query: `[B, T, N, H]`; key `[B, S, N, H]` and value `[B, S, N, Hv]`, whose heads
        may be fewer, of one dtype.
      mask: boolean `[B, S]`, True = may be attended; None = all.
      is_causal: sum over j <= i only.
      feature_map: phi. Those of `MAPS` are computed in the kernel, others before it.
      denominator: "add" divides by the sum + eps, "clamp" by its maximum with eps.
      eps: see `denominator`.
      max_length: M, one or `[B]`: multiplies w_ij by ``cos(pi (i - j) / 2M)``, whose
        cosines and sines are made in the kernel; None = does not.
      chunking: `causal.Chunking`: sizes of chunks and blocks; None = the target's.
      precision: of float32 products, as in ``jnp.einsum``.

    Returns:
      `[B, T, N, Hv]` in the inputs' dtype. Gradients are of first order only.
    """
    query, key, feature_map = given_features(query, inputs.hide(key, mask), feature_map)
    name, interpret = target
    chunk, block = sizes(name, interpret, chunking, query.shape, key.shape[1])
    spec = Spec(
        is_causal=is_causal,
        feature_map=feature_map,
        chunk=chunk,
        block=block,
        precision=highest(precision),
        target=name,
        interpret=interpret,
        rotate=max_length is not None,
        denominator=denominator,
        eps=eps,
    )
    key, value = (inputs.match_heads(x, query.shape[2]) for x in (key, value))
    if mask is not None:
        mask = mask[:, None].astype(jnp.float32)
    scale = _scale(max_length, query.shape[0])
    return compiled(spec, query, key, value, mask, scale)


def given_features(
    query: jax.Array, key: jax.Array, feature_map: feature_maps.FeatureMap
) -> tuple[jax.Array, jax.Array, str]:
    """Query, key and the feature map that is left to do in the kernel."""
    if isinstance(feature_map, str) and feature_map in MAPS:
        return query, key, feature_map
    phi, dtype = feature_maps.feature_map(feature_map), query.dtype
    query, key = (phi(x.astype(jnp.float32)).astype(dtype) for x in (query, key))
    return query, key, "given"


def sizes(
    name: str,
    interpret: bool,
    chunking: Any,
    shape: tuple[int, ...],
    key_length: int,
) -> tuple[int, int]:
    """Positions of a chunk and of a block."""
    batch, length, heads, _ = shape
    longest = max(length, key_length)
    chunk, block = _SIZES[name]
    if name == "gpu":
        block = max(block, -(-longest // max(1, _PROCESSORS // (batch * heads))))
    if chunking is not None:
        chunk, block = chunking.chunk, chunking.segment or block
    # A TPU's blocks of a mask are whole registers.
    unit = chunk if interpret or name == "gpu" else math.lcm(chunk, 128)
    return chunk, -(-min(block, longest) // unit) * unit


def _scale(max_length: int | jax.Array | None, batch: int) -> jax.Array:
    """The angle between neighbouring positions, float32 `[B]`."""
    if max_length is None or isinstance(max_length, int):
        return jnp.full((batch,), math.pi / 2 / (max_length or 1), jnp.float32)
    return math.pi / 2 / jnp.maximum(max_length, 1).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    spec: Spec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
) -> jax.Array:
    return _kernels(spec).forward(spec, query, key, value, mask, scale, False)[0]


def _forward(spec: Spec, *arrays: Any) -> tuple[jax.Array, tuple]:
    out, saved = _kernels(spec).forward(spec, *arrays, True)
    return out, (*arrays, saved)


def _backward(spec: Spec, kept: tuple, of_out: jax.Array) -> tuple:
    slopes = _kernels(spec).backward(spec, *kept, of_out)
    return *slopes, None, None


_attend.defvjp(_forward, _backward)
compiled = jax.jit(_attend, static_argnums=0)


def _kernels(spec: Spec) -> Any:
    # Imported when needed: Pallas takes longer to import than all of this package.
    name = "hopper.programs"
    if spec.target == "tpu":
        name = "tpu.causal" if spec.is_causal else "tpu.product"
    return importlib.import_module(f"{__package__}.{name}")
