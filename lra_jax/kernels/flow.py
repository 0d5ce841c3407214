"""Flow-Attention by kernels, with gradients."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.flow.parts import Options
from lra_jax.kernels.api import given_features, sizes
from lra_jax.kernels.selection import highest
from lra_jax.kernels.spec import FlowSpec


def attend_flow(
    target: tuple[str, bool],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: tuple[jax.Array | None, jax.Array | None],
    is_causal: bool,
    options: Options,
    feature_map: feature_maps.FeatureMap,
    chunking: Any,
) -> jax.Array:
    """Flow-Attention, as `lra_jax.attention.flow.flow` defines it.

    Sums and what every position has are float32, and products take operands in the
    inputs' dtype. For bfloat16 inputs that rounds features, flows as weights, and the
    terms of sums over a head's columns, as the XLA form does not.

    Args:
      target: from `choose`, asked with `flow.parts.refusal`.
      query: `[B, T, N, H]`; key `[B, S, N, H]` and value `[B, S, N, Hv]`, whose heads
        may be fewer, of one dtype.
      masks: boolean, of the sources `[B, S]` and of the sinks `[B, T]`, True = real;
        None = all.
      is_causal: the causal definition.
      options: of Flow-Attention; the competition is over the sources.
      feature_map: phi. Those of `MAPS` are computed in the kernel, others before it.
      chunking: `causal.Chunking`: sizes of chunks and blocks; None = the target's.

    Returns:
      `[B, T, N, Hv]` in the inputs' dtype. Gradients are of first order only.
    """
    mask, query_mask = masks
    query, key, feature_map = given_features(
        inputs.hide(query, query_mask), inputs.hide(key, mask), feature_map
    )
    name, interpret = target
    chunk, block = sizes(name, interpret, chunking, query.shape, key.shape[1])
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
        fitted=chunking is None,
    )
    key, value = (inputs.match_heads(x, query.shape[2]) for x in (key, value))
    rows = tuple(None if x is None else x[:, None].astype(jnp.float32) for x in masks)
    return _compiled(spec, query, key, value, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: tuple[jax.Array | None, ...],
) -> jax.Array:
    return _kernels(spec).forward(spec, query, key, value, rows, False)[0]


def _forward(spec: FlowSpec, *arrays: Any) -> tuple[jax.Array, tuple]:
    out, saved = _kernels(spec).forward(spec, *arrays, True)
    return out, (*arrays, saved)


def _backward(spec: FlowSpec, kept: tuple, of_out: jax.Array) -> tuple:
    return *_kernels(spec).backward(spec, *kept, of_out), None


_attend.defvjp(_forward, _backward)
_compiled = jax.jit(_attend, static_argnums=0)


def _kernels(spec: FlowSpec) -> Any:
    folder = "tpu" if spec.target == "tpu" else "hopper"
    name = f"{folder}.flow_causal" if spec.is_causal else f"{folder}.flow"
    return importlib.import_module(f"{__package__}.{name}")
