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
from lra_jax.kernels.selection import (
    Implementation,
    Mechanism,
    Refusal,
    Target,
    choose,
    highest,
)
from lra_jax.kernels.spec import (
    MAPS,
    FeatureMap,
    FlowSpec,
    Form,
    Inputs,
    RecurrentSpec,
    Scanned,
    ScanSpec,
    Spec,
)

AnySpec = Form | RecurrentSpec | ScanSpec
Given = Inputs | Scanned

# Positions of a chunk and of a block. A TPU's matrix unit is 128 wide, and a step of
# its grid costs as much as reading about 100 KB. On a GPU a block is a segment: there
# are just enough for its 132 processors, but none is shorter than this. The CPU's
# kernels do not read them.
_SIZES = {"tpu": (128, 512), "gpu": (64, 256), "cpu": (64, 64)}
_PROCESSORS = 132


def attend(
    target: Target,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    feature_map: FeatureMap,
    denominator: str,
    eps: float,
    max_length: int | jax.Array | None,
    chunking: Any,
    precision: jax.lax.PrecisionLike,
    slopes: jax.Array | None = None,
    documents: jax.Array | None = None,
) -> jax.Array:
    """``sum_j w_ij v_j / (sum_j w_ij, bounded)`` with ``w_ij = phi(q_i) . phi(k_j)``.

    Products take operands in the inputs' dtype and sum in float32; so do the states
    between chunks. For bfloat16 inputs this rounds the features, unlike the XLA form,
    which computes in float32 throughout.

    Args:
      target: from `choose`.
      query: `[B, T, N, H]`; key `[B, S, N, H]` and value `[B, S, N, Hv]`, whose heads
        may be fewer, of one dtype.
      mask: boolean `[B, S]`, True = may be attended; None = all.
      is_causal: sum over j <= i only.
      feature_map: phi. A named map is computed in the kernel, a function before it.
      denominator: "add" divides by the sum + eps, "clamp" by max(sum, eps), "absolute"
        by max(|sum|, eps), "none" by nothing.
      eps: see `denominator`.
      max_length: M, a number or `[B]`: multiplies w_ij by ``cos(pi (i - j) / 2M)``,
        with cosines and sines computed in the kernel; None = no such factor.
      chunking: `causal.Chunking`: sizes of chunks and blocks; None = the target's.
      precision: of float32 products, as in ``jnp.einsum``.
      slopes: `[N]`, without a gradient: multiplies w_ij by ``exp(-slope |i - j|)``;
        None = no such factor. Needs T == S.
      documents: integers `[B, T]`, increasing along a row: each position sees only
        those with its own number; None = all. Needs T == S.

    Returns:
      `[B, T, N, Hv]` in the inputs' dtype. Gradients are of first order only.
    """
    if not _skips_hidden(target, feature_map):
        key = _hidden(key, mask)
    query, key, feature_map = _given_features(query, key, feature_map)
    name, interpret = target
    chunk, block = _sizes(target, chunking, query, key)
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
        decay=slopes is not None,
        packed=documents is not None,
    )
    key, value = (_matched(x, query.shape[2]) for x in (key, value))
    if mask is not None:
        mask = mask[:, None].astype(jnp.float32)
    scale = _scale(max_length, query.shape[0])
    if slopes is not None:
        shape = (query.shape[0], *slopes.shape)
        slopes = jnp.broadcast_to(slopes.astype(jnp.float32), shape)
    if documents is not None:
        documents = documents.astype(jnp.float32)
    others = {"scale": scale, "slopes": slopes, "documents": documents}
    return _compiled(spec, Inputs(query, key, value, mask=mask, **others))


def attended(
    implementation: Implementation,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    *,
    mechanism: Mechanism,
    refusal: Refusal | None,
    feature_map: FeatureMap,
    denominator: str,
    eps: float,
    chunking: Any,
    precision: jax.lax.PrecisionLike,
    max_length: int | jax.Array | None = None,
    slopes: jax.Array | None = None,
    documents: jax.Array | None = None,
) -> jax.Array | None:
    """`attend` by the kernels that `choose` takes; None = it takes the XLA form."""
    target = choose(
        implementation,
        query,
        key,
        value,
        feature_map,
        chunking,
        refusal,
        mechanism=mechanism,
        is_causal=is_causal,
        packed=documents is not None,
    )
    if target is None:
        return None
    return attend(
        target,
        query,
        key,
        value,
        mask,
        is_causal,
        feature_map=feature_map,
        denominator=denominator,
        eps=eps,
        max_length=max_length,
        chunking=chunking,
        precision=precision,
        slopes=slopes,
        documents=documents,
    )


def attend_flow(
    target: Target,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: tuple[jax.Array | None, jax.Array | None],
    is_causal: bool,
    options: Any,
    chunking: Any,
    documents: jax.Array | None = None,
) -> jax.Array:
    """Flow-Attention, as `lra_jax.attention.flow.flow` defines it, on a CPU.

    Sums and per-position values are float32, and products take operands in the inputs'
    dtype. For bfloat16 inputs this rounds features, flows used as weights, and the
    terms of sums over a head's columns, unlike the XLA form.

    Args:
      target: from `choose`, a CPU.
      query: `[B, T, N, H]`; key `[B, S, N, H]` and value `[B, S, N, Hv]`, whose heads
        may be fewer, of one dtype.
      masks: boolean, of the sources `[B, S]` and of the sinks `[B, T]`, True = real;
        None = all.
      is_causal: the causal definition.
      options: of Flow-Attention, with its feature map: a named map is computed in the
        kernel, a function before it. The competition is over the sources.
      chunking: `causal.Chunking`: sizes of chunks and blocks; None = the target's.
      documents: as in `attend`.

    Returns:
      `[B, T, N, Hv]` in the inputs' dtype. Gradients are of first order only.
    """
    mask, query_mask = masks
    skips = _skips_hidden(target, options.feature_map)
    if not skips:
        key = _hidden(key, mask)
    # The causal form's product knows no mask of queries.
    if is_causal or not skips:
        query = _hidden(query, query_mask)
    query, key, feature_map = _given_features(query, key, options.feature_map)
    name, interpret = target
    chunk, block = _sizes(target, chunking, query, key)
    spec = FlowSpec(
        is_causal=is_causal,
        feature_map=feature_map,
        chunk=chunk,
        block=block,
        precision=highest(options.precision),
        target=name,
        interpret=interpret,
        clip=options.clip,
        largest=not options.sums_as_is,
        eps=options.eps,
        extra_eps=options.extra_eps,
    )
    key, value = (_matched(x, query.shape[2]) for x in (key, value))
    mask, query_mask = (
        None if x is None else x[:, None].astype(jnp.float32) for x in masks
    )
    if documents is not None:
        documents = documents.astype(jnp.float32)
    others = {"mask": mask, "query_mask": query_mask, "documents": documents}
    return _compiled(spec, Inputs(query, key, value, **others))


def attend_recurrent(
    target: Target,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_causal: bool,
    log_decay: jax.Array | None,
    beta: jax.Array | None = None,
    documents: jax.Array | None = None,
    feature_map: FeatureMap | None = None,
    eps: float = 0.0,
) -> jax.Array:
    """Gated linear attention or the delta rule, ``out_t = S_t^T q_t``.

    ``S_t = a_t S_(t-1) + k_t v_t^T``; with beta, ``S_t = a_t (I - b_t k_t k_t^T)
    S_(t-1) + b_t k_t v_t^T``.

    Args:
      target: from `choose`.
      query: `[B, T, N, H]`; key `[B, T, N, H]` and value `[B, T, N, Hv]`, whose heads
        may be fewer; these are zero at hidden positions.
      is_causal: otherwise a query also reads the recurrence over later positions, from
        the end.
      log_decay: `[B, T, N, H]`, or with beta `[B, T, N]`; zero at hidden positions,
        None = no decay.
      beta: `[B, T, N]`, zero at hidden positions; None = gated linear attention.
      documents: integers `[B, T]`: a state starts anew wherever they change; None =
        nowhere.
      feature_map: phi of queries and keys, which are then divided by their length; a
        named map is computed in the kernel, a function before it. None = neither.
      eps: added to the square of the length.

    Returns:
      `[B, T, N, Hv]`, float32. Gradients are of first order only.
    """
    phi = None
    if feature_map is not None:
        query, key, phi = _given_features(query, key, feature_map)
    spec = RecurrentSpec(
        is_causal=is_causal, target=target[0], feature_map=phi, eps=eps
    )
    key, value = (_matched(x, query.shape[2]) for x in (key, value))
    if documents is not None:
        documents = documents.astype(jnp.float32)
    gates = {"log_decay": log_decay, "beta": beta}
    given = Inputs(query, key, value, documents=documents, **gates)
    return _compiled(spec, given)


def scan(
    target: Target, factors: jax.Array, values: jax.Array, forth: int
) -> jax.Array:
    """``h_t = f_t h_(t-1) + x_t`` for each column, from zero.

    Args:
      target: from `choose`.
      factors: f, `[B, T, C]`.
      values: x, `[B, T, C]`.
      forth: columns from this one on run from the last position to the first.

    Returns:
      h, `[B, T, C]`. Gradients are of first order only.
    """
    return _scanned(ScanSpec(forth=forth, target=target[0]), Scanned(factors, values))


def _given_features(
    query: jax.Array, key: jax.Array, feature_map: FeatureMap
) -> tuple[jax.Array, jax.Array, str]:
    """Query, key and the feature map still to be applied in the kernel."""
    if not callable(feature_map):
        return query, key, known("feature_map", feature_map, MAPS)
    query, key = (
        feature_map(x.astype(jnp.float32)).astype(query.dtype) for x in (query, key)
    )
    return query, key, "identity"


def _skips_hidden(target: Target, feature_map: FeatureMap) -> bool:
    """Whether hidden positions are never read, which saves a pass over the array."""
    return target[0] == "cpu" and not callable(feature_map)


def _hidden(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """`[B, T, N, H]` with the hidden positions zeroed, even if they held NaN."""
    if mask is None:
        return x
    return jnp.where(mask[:, :, None, None], x, jnp.zeros((), x.dtype))


def _matched(x: jax.Array, heads: int) -> jax.Array:
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
def _attend(spec: AnySpec, given: Given) -> jax.Array:
    return _forward_kernels(spec, given, False)[0]


def _forward(spec: AnySpec, given: Given) -> tuple[jax.Array, tuple]:
    out, saved = _forward_kernels(spec, given, True)
    return out, (given, saved)


def _backward(spec: AnySpec, kept: tuple, of_out: jax.Array) -> tuple[Given]:
    kernels = _transformed(spec, functools.partial(_kernels(spec).backward, spec))
    given, _ = kept
    return (type(given)(*kernels(*kept, of_out)),)


_attend.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(spec: AnySpec, given: Inputs) -> jax.Array:
    return mesh.on_each_device(functools.partial(_attend, spec), given)


@functools.partial(jax.jit, static_argnums=0)
def _scanned(spec: ScanSpec, given: Scanned) -> jax.Array:
    return mesh.by_sample(functools.partial(_attend, spec), given)


def _forward_kernels(spec: AnySpec, given: Given, save: bool) -> tuple[jax.Array, Any]:
    def forward(given: Given) -> tuple[jax.Array, Any]:
        return _kernels(spec).forward(spec, given, save)

    return _transformed(spec, forward)(given)


def _transformed(spec: AnySpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a rule for ``jax.vmap``, and without a derivative.

    The calls of Hopper's kernels cannot be batched, so they are made one after another.
    """
    if spec.target == "gpu":
        function = jax.custom_batching.sequential_vmap(function)
    function = jax.custom_jvp(function)

    @function.defjvp
    def refuse(*_: Any) -> Any:
        wanted = "'xla' for second derivatives, which the kernels do not have"
        raise expected("implementation", wanted, f"the kernels of {spec.target!r}")

    return function


def _kernels(spec: AnySpec) -> Any:
    # Imported when needed: Pallas takes longer to import than all of this package.
    return importlib.import_module(f"{__package__}.{spec.module}")
