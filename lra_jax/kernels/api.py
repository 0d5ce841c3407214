"""Linear attention, Flow-Attention and recurrences by kernels, with gradients."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.errors import expected, known
from lra_jax.kernels import mesh
from lra_jax.kernels.selection import Target, highest
from lra_jax.kernels.spec import (
    MAPS,
    FeatureMap,
    FlowSpec,
    Inputs,
    RecurrentSpec,
    Scanned,
    ScanSpec,
    Spec,
    Weighting,
)

AnySpec = Spec | FlowSpec | RecurrentSpec | ScanSpec
Arrays = Inputs | Scanned

# Positions of a chunk and of a block. A TPU's matrix unit is 128 wide, and a step of
# its grid costs as much as reading about 100 KB. On a GPU a block is a segment: there
# are just enough for its 132 processors, but none is shorter than this. The CPU's
# kernels do not read them.
_SIZES = {"tpu": (128, 512), "gpu": (64, 256), "cpu": (64, 64)}
_PROCESSORS = 132


def attend(
    target: Target,
    arrays: Inputs,
    weighting: Weighting,
    *,
    is_causal: bool,
    chunking: Any,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """Linear attention, see `Weighting`.

    Products take operands in the inputs' dtype and sum in float32; so do the states
    between chunks. For bfloat16 inputs this rounds the features, unlike the XLA form,
    which computes in float32 throughout. A named feature map, cosines and decays are
    computed in the kernel. Slopes have no gradient.

    Args:
      target: from `choose`.
      arrays: query, key, value, the mask of the keys and the documents.
      weighting: of the pairs.
      is_causal: sum over j <= i only.
      chunking: `causal.Chunking`: sizes of chunks and blocks; None = the target's.
      precision: of float32 products, as in ``jnp.einsum``.

    Returns:
      `[B, T, N, Hv]` in the inputs' dtype. Gradients are of first order only.
    """
    query, key = arrays.query, arrays.key
    # A CPU's kernels skip hidden positions, which saves a pass over the array.
    if target[0] != "cpu" or callable(weighting.feature_map):
        key = _hide(key, arrays.mask)
    query, key, feature_map = _features(query, key, weighting.feature_map)
    name, interpret = target
    chunk, block = _sizes(target, chunking, query, key)
    slopes = weighting.slopes
    spec = Spec(
        is_causal=is_causal,
        feature_map=feature_map,
        chunk=chunk,
        block=block,
        precision=highest(precision),
        target=name,
        interpret=interpret,
        rotate=weighting.max_length is not None,
        denominator=weighting.denominator,
        eps=weighting.eps,
        decay=slopes is not None,
        packed=arrays.documents is not None,
    )
    if slopes is not None:
        shape = (query.shape[0], *slopes.shape)
        slopes = jnp.broadcast_to(slopes.astype(jnp.float32), shape)
    scale = _scale(weighting.max_length, query.shape[0])
    arrays = arrays._replace(query_mask=None, scale=scale, slopes=slopes)
    return _attend_jitted(spec, _operands(arrays, query, key))


def attend_flow(arrays: Inputs, options: Any, *, is_causal: bool) -> jax.Array:
    """Flow-Attention, as `lra_jax.attention.flow.flow` defines it, on a CPU.

    Sums and per-position values are float32, and products take operands in the inputs'
    dtype.

    Args:
      arrays: query, key, value, the masks of sources and sinks, and the documents.
      options: of Flow-Attention, with its feature map: a named map is computed in the
        kernel, a function before it. The competition is over the sources.
      is_causal: the causal definition.

    Returns:
      `[B, T, N, Hv]` in the inputs' dtype. Gradients are of first order only.
    """
    query, key = arrays.query, arrays.key
    phi: FeatureMap = options.feature_map
    if callable(phi):
        key = _hide(key, arrays.mask)
    # The causal form's product knows no mask of queries.
    if is_causal or callable(phi):
        query = _hide(query, arrays.query_mask)
    query, key, feature_map = _features(query, key, phi)
    spec = FlowSpec(
        is_causal=is_causal,
        feature_map=feature_map,
        clip=options.clip,
        eps=options.eps,
        extra_eps=options.extra_eps,
    )
    return _attend_jitted(spec, _operands(arrays, query, key))


def attend_recurrent(
    arrays: Inputs,
    *,
    is_causal: bool,
    feature_map: FeatureMap | None = None,
    eps: float = 0.0,
) -> jax.Array:
    """Gated linear attention or the delta rule on a CPU, ``out_t = S_t^T q_t``.

    ``S_t = a_t S_(t-1) + k_t v_t^T``; with beta, ``S_t = a_t (I - b_t k_t k_t^T)
    S_(t-1) + b_t k_t v_t^T``.

    Args:
      arrays: query, key, value, documents, log_decay and beta, all but the query and
        the documents zero at hidden positions.
      is_causal: otherwise a query also reads the recurrence over later positions, from
        the end.
      feature_map: phi of queries and keys, which are then divided by their length; a
        named map is computed in the kernel, a function before it. None = neither.
      eps: added to the square of the length.

    Returns:
      `[B, T, N, Hv]`, float32. Gradients are of first order only.
    """
    query, key, phi = arrays.query, arrays.key, None
    if feature_map is not None:
        query, key, phi = _features(query, key, feature_map)
    spec = RecurrentSpec(is_causal=is_causal, feature_map=phi, eps=eps)
    return _attend_jitted(spec, _operands(arrays, query, key))


def scan(factors: jax.Array, values: jax.Array, forth: int) -> jax.Array:
    """``h_t = f_t h_(t-1) + x_t`` for each column, from zero, on a CPU.

    Args:
      factors: f, `[B, T, C]`.
      values: x, `[B, T, C]`.
      forth: columns from this one on run from the last position to the first.

    Returns:
      h, `[B, T, C]`. Gradients are of first order only.
    """
    return _attend_jitted(ScanSpec(forth=forth), Scanned(factors, values))


def _features(
    query: jax.Array, key: jax.Array, feature_map: FeatureMap
) -> tuple[jax.Array, jax.Array, str]:
    """Query, key and the feature map still to be applied in the kernel."""
    if not callable(feature_map):
        return query, key, known("feature_map", feature_map, MAPS)
    query, key = (
        feature_map(x.astype(jnp.float32)).astype(query.dtype) for x in (query, key)
    )
    return query, key, "identity"


def _hide(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """`[B, T, N, H]` with the hidden positions zeroed, even if they held NaN."""
    if mask is None:
        return x
    return jnp.where(mask[:, :, None, None], x, jnp.zeros((), x.dtype))


def _operands(arrays: Inputs, query: jax.Array, key: jax.Array) -> Inputs:
    """The inputs as kernels read them: all heads, and masks and numbers as float32."""
    documents = arrays.documents
    return arrays._replace(
        query=query,
        key=_match_heads(key, query.shape[2]),
        value=_match_heads(arrays.value, query.shape[2]),
        mask=_numbers(arrays.mask),
        query_mask=_numbers(arrays.query_mask),
        documents=None if documents is None else documents.astype(jnp.float32),
    )


def _numbers(mask: jax.Array | None) -> jax.Array | None:
    """A mask `[B, S]` as float32 `[B, 1, S]`."""
    return None if mask is None else mask[:, None].astype(jnp.float32)


def _match_heads(x: jax.Array, heads: int) -> jax.Array:
    """`[B, S, n, H]` with each head repeated for the query heads that it serves.

    The gradient is summed over the copies in float32.
    """
    if x.shape[2] == heads:
        return x
    copies = jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2)
    return copies.astype(x.dtype)


def _sizes(
    target: Target, chunking: Any, query: jax.Array, key: jax.Array
) -> tuple[int, int]:
    """Positions of a chunk and of a block."""
    name, interpret = target
    batch, length, heads, _ = query.shape
    longest = max(length, key.shape[1])
    chunk, block = _SIZES[name]
    if name == "gpu":
        programs = batch // (mesh.parts(batch) or 1) * heads
        block = max(block, -(-longest // max(1, _PROCESSORS // programs)))
    if chunking is not None:
        chunk, block = chunking.chunk, chunking.segment or block
    # On a TPU, blocks of a mask are whole registers.
    unit = chunk if interpret or name != "tpu" else math.lcm(chunk, 128)
    return chunk, -(-min(block, longest) // unit) * unit


def _scale(max_length: int | jax.Array | None, batch: int) -> jax.Array:
    """The angle between neighbouring positions, float32 `[B]`."""
    if max_length is None or isinstance(max_length, int):
        return jnp.full((batch,), math.pi / 2 / (max_length or 1), jnp.float32)
    return math.pi / 2 / jnp.maximum(max_length, 1).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: AnySpec, arrays: Arrays) -> jax.Array:
    return _forward_kernels(spec, arrays, False)[0]


def _forward(spec: AnySpec, arrays: Arrays) -> tuple[jax.Array, tuple]:
    out, saved = _forward_kernels(spec, arrays, True)
    return out, (arrays, saved)


def _backward(spec: AnySpec, kept: tuple, of_out: jax.Array) -> tuple[Arrays]:
    kernels = _transform(spec, functools.partial(_kernels(spec).backward, spec))
    arrays, _ = kept
    return (type(arrays)(*kernels(*kept, of_out)),)


_attend.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=0)
def _attend_jitted(spec: AnySpec, arrays: Arrays) -> jax.Array:
    split: Any = mesh.on_each_device if isinstance(arrays, Inputs) else mesh.by_sample
    return split(functools.partial(_attend, spec), arrays)


def _forward_kernels(
    spec: AnySpec, arrays: Arrays, save: bool
) -> tuple[jax.Array, Any]:
    def forward(arrays: Arrays) -> tuple[jax.Array, Any]:
        return _kernels(spec).forward(spec, arrays, save)

    return _transform(spec, forward)(arrays)


def _transform(spec: AnySpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a rule for ``jax.vmap``, and without a derivative.

    The calls of Hopper's kernels cannot be batched, so they are made one after another.
    """
    if spec.target == "gpu":
        function = jax.custom_batching.sequential_vmap(function)
    function = jax.custom_jvp(function)

    @function.defjvp
    def refuse(*_: Any) -> Any:
        needed = "'xla' for second derivatives, which the kernels do not have"
        raise expected("implementation", needed, f"the kernels of {spec.target!r}")

    return function


def _kernels(spec: AnySpec) -> Any:
    # Imported when needed: Pallas takes longer to import than all of this package.
    return importlib.import_module(f"{__package__}.{spec.module}")
