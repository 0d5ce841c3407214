"""The mechanisms as the tests call them: every one as ``f(query, key, value, mask)``.

Lengths go up to LENGTH: cosFormer's M is fixed there and Linformer's matrices have that
many columns, so that a sample means the same alone and in a padded batch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import attention
from lra_jax.attention.causal.sums import Chunking

from . import reference
from .gated_units import units
from .recurrent import formulas as recurrent
from .softmax import grouping, patterns

LENGTH = 16
PATTERNS = ("local", "longformer", "bigbird", "sparse")
RECURRENT = ("gla", "delta", "gated_delta")
NAMES = (
    "softmax",
    "linear",
    "cosformer",
    "flow",
    "norm",
    "retention",
    "lightning",
    "linformer",
    "performer",
    *PATTERNS,
    "nystrom",
    "fnet",
    "synthesizer",
    "sinkhorn",
    "reformer",
    "luna",
    "gau",
    "flash",
    *RECURRENT,
)
# Those whose queries enter sums, so that padded ones must be named.
QUERY_MASKED = ("flow", "nystrom")
# Those whose output is a weighted sum of the values.
WEIGHTED = tuple(name for name in NAMES if name != "fnet")
# Those that take queries and keys of different lengths.
CROSS = tuple(name for name in NAMES if attention.resolve(name).cross)
STREAMS = ("softmax", "linear", "cosformer", "flow", "norm", "retention")
STREAMS += ("lightning", "performer", *RECURRENT)
# Those with a state of sums, whose size depends on no length.
LINEAR_STREAMS = STREAMS[1:]
# Their weights depend on positions; may be negative; make no output until normalised.
POSITIONAL = ("cosformer", "retention", "lightning", *RECURRENT)
SIGNED = ("retention", "lightning", *RECURRENT)
NORMALISED = ("norm", "retention", *RECURRENT)

SMALL = Chunking(2, 4)

_rng = np.random.default_rng(5)
E = _rng.normal(size=(6, LENGTH)).astype("float32") / 2
F = _rng.normal(size=(6, LENGTH)).astype("float32") / 2


@functools.cache
def projection(head_dim: int, features: int = 6) -> np.ndarray:
    """Performer's, for a head width."""
    rng = np.random.default_rng(head_dim)
    return rng.normal(size=(features, head_dim)).astype("float32")


# For inputs of 4 columns; `keywords` has them for others.
KEYWORDS = {
    "softmax": {},
    "linear": {},
    "cosformer": {"max_length": LENGTH},
    "flow": {},
    "norm": {},
    "retention": {},
    "lightning": {},
    "linformer": {"key_projection": E, "value_projection": F},
    "performer": {"projection": projection(4)},
    "local": {"window": 2},
    "longformer": {"window": 1, "global_tokens": 2},
    "bigbird": {"block": 1, "num_random": 1},
    "sparse": {"stride": 3},
    "nystrom": {"num_landmarks": 3},
    "fnet": {},
    "synthesizer": {"variant": "dense"},
    "sinkhorn": {"block": 3},
    "reformer": {"chunk": 2, "num_buckets": 4},
    "gau": {},
    "flash": {"chunk": 3},
    "luna": {},
    "gla": {},
    "delta": {},
    "gated_delta": {},
}
# Gated units, and how many queries and keys they make of one projection.
UNITS = {"gau": 2, "flash": 4}
# Those that a stream needs again in each call.
EVERY_CALL = {name: {} for name in STREAMS} | {"performer": KEYWORDS["performer"]}


def keywords(name: str, heads: int, head_dim: int) -> dict[str, Any]:
    """`KEYWORDS` and the arrays that a mechanism has for these sizes."""
    if name == "performer":
        return {"projection": projection(head_dim)}
    if name == "luna":
        rng = np.random.default_rng(head_dim)
        return {"memory": rng.normal(size=(1, 3, heads, head_dim)).astype("float32")}
    if name in UNITS:
        return KEYWORDS[name] | unit_arrays(UNITS[name], heads, head_dim)
    if name not in ("synthesizer", "sinkhorn"):
        return KEYWORDS[name]
    rng = np.random.default_rng(heads)
    kernel = rng.normal(size=(heads, head_dim, LENGTH)).astype("float32")
    bias = rng.normal(size=(heads, LENGTH)).astype("float32")
    names = {"synthesizer": "first", "sinkhorn": "sort_kernel"}
    biases = {"synthesizer": "first_bias", "sinkhorn": "sort_bias"}
    return KEYWORDS[name] | {names[name]: kernel, biases[name]: bias}


def unit_arrays(count: int, heads: int, head_dim: int) -> dict[str, np.ndarray]:
    """The arrays of a gated unit."""
    rng = np.random.default_rng(count)
    shapes = {"scale": (count, heads, head_dim), "offset": (count, heads, head_dim)}
    shapes["relative_bias"] = (32, heads)
    return {k: rng.normal(size=x).astype("float32") / 2 for k, x in shapes.items()}


def gates(name: str, key: Any) -> dict[str, Any]:
    """The gates of a recurrent mechanism, made of the key."""
    # What is no key is refused by the function itself.
    fits = jnp.ndim(key) > 2 and jnp.issubdtype(key.dtype, jnp.floating)
    return recurrent.gates(name, key, jnp) if fits else {}


@functools.cache
def _compiler_options() -> dict[str, Any]:
    options = {"xla_backend_optimization_level": 0}
    older = options | {"xla_cpu_use_fusion_emitters": False}
    try:  # newer versions have one emitter only
        jax.jit(lambda: 0, compiler_options=older)()
    except jax.errors.JaxRuntimeError:
        return options
    return older


def fast_jit(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """``jax.jit`` that compiles quickly and optimises nothing.

    Nearly all of the tests' time is compilation, and their programs are too small to
    gain from it.
    """
    return jax.jit(function, compiler_options=_compiler_options(), **keywords)


@functools.cache
def jitted(name: str) -> Callable[..., jax.Array]:
    """`run`, compiled; tests with the same shapes share one compilation."""
    return fast_jit(run(name))


def run(name: str) -> Callable[..., jax.Array]:
    """``f(query, key, value, mask=None, **keywords)``."""
    function = getattr(attention, f"{name}_attention")

    def call(query, key, value, mask=None, **more):
        given = keywords(name, *query.shape[-2:]) | gates(name, key)
        return function(query, key, value, mask=mask, **given | more)

    return call


def weights(name: str) -> Callable[..., jax.Array]:
    """``f(query, key, mask=None, **keywords)``."""
    function = getattr(attention, f"{name}_weights")

    def call(query, key, mask=None, **more):
        given = keywords(name, *query.shape[-2:]) | gates(name, key)
        return function(query, key, mask=mask, **given | more)

    return call


def unnormed(name: str) -> dict[str, Any]:
    """Keywords under which the output is the weights times the values."""
    return {"norm": None} if name in NORMALISED else {}


def formula(name: str) -> Callable[..., np.ndarray]:
    """The same from `reference`."""
    if name == "linformer":
        return lambda q, k, v, mask=None: reference.linformer(q, k, v, E, F, mask)
    if name in PATTERNS:
        return functools.partial(patterns.attention, name, **KEYWORDS[name])
    modules = (grouping, units, recurrent, reference)
    module = next(x for x in modules if hasattr(x, name))

    def call(q, k, v, mask=None, **more):
        given = keywords(name, *q.shape[2:])
        return getattr(module, name)(q, k, v, mask, **given | more)

    return call


def causal(name: str, **more: Any) -> Callable[..., jax.Array]:
    """`run` in its causal form, cut small: several chunks in several super-blocks."""
    cut = cuts(name, more.pop("chunking", SMALL))
    return functools.partial(run(name), is_causal=True, **cut | more)


def cuts(name: str, chunking: Chunking | None) -> dict[str, Any]:
    """The keywords that cut a causal form; softmax has blocks of one size."""
    if name != "softmax":
        return {"chunking": chunking}
    if chunking is None:
        return {}
    return {"implementation": "blocks", "block": chunking.chunk}


@functools.cache
def jitted_causal(name: str) -> Callable[..., jax.Array]:
    """`causal`, compiled."""
    return fast_jit(causal(name))


def causal_formula(name: str) -> Callable[..., np.ndarray]:
    """The causal form from `reference`; Flow's is one of its own."""
    if name == "flow":
        return reference.flow_causal
    return functools.partial(formula(name), causal=True)


def queries(name: str, wanted: int, length: int = 7) -> int:
    """How many queries a test may have for so many keys: the wanted number or that."""
    return wanted if name in CROSS else length


def inputs(
    seed: int,
    batch: int = 2,
    query_length: int = 7,
    length: int = 7,
    heads: int = 2,
    head_dim: int = 4,
    value_dim: int | None = None,
    key_heads: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal query, key and value, float32."""
    rng = np.random.default_rng(seed)
    key_heads = key_heads or heads
    return (
        rng.normal(size=(batch, query_length, heads, head_dim)).astype("float32"),
        rng.normal(size=(batch, length, key_heads, head_dim)).astype("float32"),
        rng.normal(size=(batch, length, key_heads, value_dim or head_dim)).astype(
            "float32"
        ),
    )


def largest_array(function: Callable[..., Any], *arrays: Any) -> int:
    """Elements of the largest array that a function forms on its way."""

    def walk(jaxpr: Any) -> int:
        sizes = [math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
        for eqn in jaxpr.eqns:
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    sizes.append(walk(inner))
        return max(sizes, default=0)

    return walk(jax.make_jaxpr(function)(*arrays).jaxpr)


def assert_close(got, wanted, tolerance: float = 1e-5) -> None:
    """The largest error, relative to the largest value, is within the tolerance."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    scale = np.abs(wanted).max() or 1.0
    error = np.abs(got - wanted).max() / scale
    assert error <= tolerance, f"{error:.2e} of the largest value"
