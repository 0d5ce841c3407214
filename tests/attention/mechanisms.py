"""The mechanisms as the tests call them: every one as ``f(query, key, value, mask)``.

Lengths go up to LENGTH: cosFormer's M is fixed there and Linformer's matrices have that
many columns, so that a sample means the same alone and in a padded batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lra_jax import attention
from lra_jax.attention.causal import Chunking

from . import reference

LENGTH = 16
NAMES = (
    "softmax",
    "linear",
    "cosformer",
    "flow",
    "norm",
    "retention",
    "lightning",
    "linformer",
)
STREAMS = ("linear", "cosformer", "flow", "norm", "retention", "lightning")
# Their weights depend on positions; may be negative; make no output until normalised.
POSITIONAL = ("cosformer", "retention", "lightning")
SIGNED = ("retention", "lightning")
NORMALISED = ("norm", "retention")

SMALL = Chunking(2, 4)

_rng = np.random.default_rng(5)
E = _rng.normal(size=(6, LENGTH)).astype("float32") / 2
F = _rng.normal(size=(6, LENGTH)).astype("float32") / 2

KEYWORDS = {
    "softmax": {},
    "linear": {},
    "cosformer": {"max_length": LENGTH},
    "flow": {},
    "norm": {},
    "retention": {},
    "lightning": {},
    "linformer": {"key_projection": E, "value_projection": F},
}


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

    def call(query, key, value, mask=None, **keywords):
        return function(query, key, value, mask=mask, **KEYWORDS[name] | keywords)

    return call


def weights(name: str) -> Callable[..., jax.Array]:
    """``f(query, key, mask=None, **keywords)``."""
    function = getattr(attention, f"{name}_weights")

    def call(query, key, mask=None, **keywords):
        return function(query, key, mask=mask, **KEYWORDS[name] | keywords)

    return call


def unnormed(name: str) -> dict[str, Any]:
    """Keywords under which the output is the weights times the values."""
    return {"norm": None} if name in NORMALISED else {}


def formula(name: str) -> Callable[..., np.ndarray]:
    """The same from `reference`."""
    if name == "linformer":
        return lambda q, k, v, mask=None: reference.linformer(q, k, v, E, F, mask)
    keywords = KEYWORDS[name]
    return lambda q, k, v, mask=None, **more: getattr(reference, name)(
        q, k, v, mask, **keywords | more
    )


def causal(name: str, **more: Any) -> Callable[..., jax.Array]:
    """`run` in its causal form, cut small: several chunks in several super-blocks."""
    keywords = {"chunking": SMALL} | more
    return functools.partial(run(name), is_causal=True, **keywords)


@functools.cache
def jitted_causal(name: str) -> Callable[..., jax.Array]:
    """`causal`, compiled."""
    return fast_jit(causal(name))


def causal_formula(name: str) -> Callable[..., np.ndarray]:
    """The causal form from `reference`; Flow's is one of its own."""
    if name == "flow":
        return reference.flow_causal
    function, keywords = getattr(reference, name), KEYWORDS[name]
    return functools.partial(function, causal=True, **keywords)


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


def assert_close(got, wanted, tolerance: float = 1e-5) -> None:
    """The largest error, relative to the largest value, is within the tolerance."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    scale = np.abs(wanted).max() or 1.0
    error = np.abs(got - wanted).max() / scale
    assert error <= tolerance, f"{error:.2e} of the largest value"
