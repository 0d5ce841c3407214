"""The mechanisms as the tests call them: every one as ``f(query, key, value, mask)``.

Which there are and what they can do is read from the registry. The rest is a `Case`:
its formula, its options, what its numbers are like. It stands in the mechanism's own
test file, or beside the formulas of its family.

Lengths go up to LENGTH: cosFormer's M is fixed there and Linformer's matrices have that
many columns, so that a sample means the same alone and in a padded batch.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

LENGTH = 16
SMALL = Chunking(2, 4)
# Padded, scattered, nothing visible.
MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7], bool)
# With a row that is padded on the left.
FOUR_ROWS = np.insert(MASK, 2, [0, 0, 1, 1, 1, 1, 1], axis=0)
# The same kinds of padding, in rows of LENGTH positions.
ROWS = np.array(
    [[1] * 11 + [0] * 5, [0, 1, 0, 0, 1, 1, 0, 1] * 2, [0] * 5 + [1] * 11, [0] * 16],
    bool,
)


def _no_gates(key: Any, xp: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """All that the common tests must know of a mechanism besides its entry.

    Attributes:
      formula: ``f(query, key, value, mask=None, **keywords)``, and ``causal`` where it
        has a causal form: its equation in numpy, float64, independent of the package.
      keywords: of its function, for up to LENGTH positions; or a function of the number
        of heads and their width that gives them.
      causal_formula: of a causal form that is more than a mask on the other.
      gates: ``f(key, numpy or jax.numpy)``: its gates, made of the key.
      level: keywords under which equal positions come out as they are, or as one if
        they ask for a norm; None = they do not.
      cache: keywords of its stream's start, if its state holds every position.
      every_call: its stream wants the keywords in every call.
      weighted: its output is a weighted sum of the values.
      mean: the weights are positive and sum to one.
      signed: the weights of its causal form may be negative.
      normalised: its output is normalised unless ``norm=None``.
      unordered: which of "query" and "key" may come in any order.
      pair_masks: it takes a mask of single pairs of query and key.
      products: its function has matrix products, or Fourier transforms in their place.
      paired: its heads have an even number of columns.
      largest: entries of query and key that float32 has room for; its square is 1e38.
    """

    formula: Callable[..., np.ndarray]
    keywords: dict[str, Any] | Callable[[int, int], dict[str, Any]] = field(
        default_factory=dict
    )
    causal_formula: Callable[..., np.ndarray] | None = None
    gates: Callable[[Any, Any], dict[str, Any]] = _no_gates
    level: dict[str, Any] | None = field(default_factory=dict)
    cache: dict[str, Any] | None = None
    every_call: bool = False
    weighted: bool = True
    mean: bool = False
    signed: bool = False
    normalised: bool = False
    unordered: tuple[str, ...] = ()
    pair_masks: bool = False
    products: bool = True
    paired: bool = False
    largest: float = 1e18


# Files of formulas with the `CASES` of several mechanisms, by name.
FAMILIES = ("gated_units.units", "recurrent.formulas", "softmax.patterns")


@functools.cache
def case(name: str) -> Case:
    """A family's, or the ``CASE`` of a test file that lies where the module does."""
    for family in FAMILIES:
        cases = importlib.import_module(f"attention.{family}").CASES
        if name in cases:
            return cases[name]
    folder, _, module = attention.MECHANISMS[name].module.rpartition(".")
    folder = folder.removeprefix("lra_jax.")
    return importlib.import_module(f"{folder}.test_{module}").CASE


def _able(capability: str) -> tuple[str, ...]:
    return tuple(k for k, m in attention.MECHANISMS.items() if getattr(m, capability))


NAMES = attention.names()
CAUSAL, CROSS, STREAMS = (_able(name) for name in ("causal", "cross", "stream"))
# Each mechanism in its full form, and in its causal one if that has a stream.
FORMS = [(name, "full") for name in NAMES] + [(name, "causal") for name in STREAMS]
# And those without a stream.
ALL_FORMS = FORMS[: len(NAMES)] + [(name, "causal") for name in CAUSAL]
# One of each family, whose shared code derives streams, weights, packed rows.
FAMILY = ("softmax", "linear", "cosformer", "flow", "performer", "retention", "gla")
FAMILY += ("gated_delta", "hgrn", "local", "reformer", "linformer", "nystrom", "gau")
FAMILY_STREAMS = tuple(name for name in FAMILY if name in STREAMS)


def having(trait: str, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    """Those of the names whose `Case` has a trait."""
    return tuple(name for name in names if getattr(case(name), trait))


def takes(name: str, keyword: str) -> bool:
    """Whether a mechanism's function names a keyword."""
    return keyword in inspect.signature(attention.resolve(name).attention).parameters


def keywords(name: str, heads: int, head_dim: int) -> dict[str, Any]:
    """The arguments of a mechanism's function, for these sizes."""
    sizes = case(name).keywords
    return sizes(heads, head_dim) if callable(sizes) else sizes


def gates(name: str, key: Any) -> dict[str, Any]:
    """The gates of a mechanism, made of the key."""
    # A value that is no key is refused by the function itself.
    fits = jnp.ndim(key) > 2 and jnp.issubdtype(key.dtype, jnp.floating)
    return case(name).gates(key, jnp) if fits else {}


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


def pulled_back(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The output of a function of arrays, and the gradients of all, compiled."""

    def both(*arrays):
        out, pullback = jax.vjp(function, *arrays)
        return out, pullback(jnp.cos(out))

    return fast_jit(both)


@functools.cache
def jitted(name: str, form: str = "full") -> Callable[..., jax.Array]:
    """`run`, compiled; tests with the same shapes share one compilation."""
    return fast_jit(run(name, form))


def masks(name: str, form: str, mask: Any) -> dict[str, Any]:
    """The mask, also as that of the queries where these are not the keys' positions."""
    apart = form == "full" and takes(name, "query_mask")
    return {"mask": mask} | ({"query_mask": mask} if apart else {})


@functools.cache
def gradients(
    name: str, form: str = "full", mask_queries: bool = False, **options: Any
) -> Callable[..., Any]:
    """``f(query, key, value, mask, upstream)``: the output, and the gradients.

    A causal form's queries are masked if asked for. Tests with the shapes of
    `row_inputs` share a compilation.
    """

    def both(query, key, value, mask, upstream):
        masked = masks(name, "full" if mask_queries else form, mask)
        attend = functools.partial(run(name, form, **options), **masked)
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(upstream)

    return fast_jit(both)


def run(name: str, form: str = "full", **options: Any) -> Callable[..., jax.Array]:
    """``f(query, key, value, mask=None, **options)``.

    A causal form is cut small: several chunks in several segments.
    """
    function = attention.resolve(name).attention
    if form == "causal":
        cut = cuts(name, options.pop("chunking", SMALL))
        options = {"is_causal": True, **cut, **options}

    def call(query, key, value, mask=None, **more):
        usual = keywords(name, *query.shape[-2:]) | gates(name, key)
        return function(query, key, value, mask=mask, **usual | options | more)

    return call


def weights(name: str, form: str = "full") -> Callable[..., jax.Array]:
    """``f(query, key, mask=None, **options)``."""
    function = attention.resolve(name).weights
    options = {"is_causal": True} if form == "causal" else {}

    def call(query, key, mask=None, **more):
        usual = keywords(name, *query.shape[-2:]) | gates(name, key)
        return function(query, key, mask=mask, **usual | options | more)

    return call


def unnormed(name: str) -> dict[str, Any]:
    """Keywords under which the output is the weights times the values."""
    return {"norm": None} if case(name).normalised else {}


def formula(name: str, form: str = "full") -> Callable[..., np.ndarray]:
    """The mechanism's formula, with the keywords of `run`."""
    function = case(name).formula
    if form == "causal":
        function = functools.partial(function, causal=True)
        function = case(name).causal_formula or function

    def call(q, k, v, mask=None, **more):
        return function(q, k, v, mask, **keywords(name, *q.shape[2:]) | more)

    return call


def cuts(name: str, chunking: Chunking | None) -> dict[str, Any]:
    """The keywords that cut a causal form; softmax has blocks of one size."""
    if takes(name, "chunking"):
        return {"chunking": chunking}
    if chunking is None or name != "softmax":
        return {}
    return {"implementation": "blocks", "block": chunking.chunk}


def matrix(formula: Callable[..., np.ndarray], query, key, *args, **more) -> np.ndarray:
    """The weights `[B, N, T, S]` of a formula that is linear in the values."""
    batch, length, heads = key.shape[:3]
    units = np.broadcast_to(np.eye(length), (batch, heads, length, length))
    out = formula(query, key, np.swapaxes(units, 1, 2), *args, **more)
    return np.swapaxes(out, 1, 2)


def init(name: str, *sizes: int, **more: Any):
    """The state of a stream before its first position."""
    options = keywords(name, *sizes[1:3]) | (case(name).cache or {})
    return getattr(attention, f"{name}_init")(*sizes, **options | more)


def prefill(name: str, *arrays, chunking: Chunking = SMALL, **more: Any):
    """A prompt in one pass: its output, and the state after it."""
    options = gates(name, arrays[1]) | cuts(name, chunking)
    if more.get("state") is None:
        options |= keywords(name, *arrays[0].shape[2:]) | (case(name).cache or {})
    elif case(name).every_call:
        options |= keywords(name, *arrays[0].shape[2:])
    options |= more
    traced = {key: x for key, x in options.items() if _is_traced(x)}
    fixed = {key: x for key, x in options.items() if key not in traced}
    return _prefill(name, frozenset(fixed.items()))(*arrays, **traced)


def _is_traced(x: Any) -> bool:
    """Whether it is an array, or a tree of arrays."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(isinstance(x, (np.ndarray, jax.Array)) for x in leaves)


@functools.cache
def _prefill(name: str, fixed: frozenset) -> Callable[..., Any]:
    # Compiled: one program is quicker than one for each of a hundred operations.
    function = getattr(attention, f"{name}_prefill")
    return jax.jit(functools.partial(function, **dict(fixed)))


@functools.cache
def one_step(name: str, **more: Any):
    """``f(state, query, key, value)`` of one position, compiled."""
    function = getattr(attention, f"{name}_step")

    @jax.jit
    def step(state, query, key, value):
        options = gates(name, key)
        if case(name).every_call:
            options |= keywords(name, *query.shape[-2:])
        return function(state, query, key, value, **options | more)

    return step


def steps(name: str, state, query, key, value, **more: Any):
    """Every position by a step of its own, in one loop."""
    function = one_step(name, **more)

    def step(state, position):
        out, state = function(state, *position)
        return state, out

    arrays = [jnp.swapaxes(x, 0, 1) for x in (query, key, value)]
    state, out = jax.lax.scan(step, state, arrays)
    return jnp.swapaxes(out, 0, 1), state


def queries(name: str, count: int, length: int = 7) -> int:
    """How many queries a test may have for so many keys: ``count`` or that."""
    return count if name in CROSS else length


def inputs(
    seed: int,
    batch: int = 2,
    query_length: int = 7,
    length: int = 7,
    heads: int = 2,
    head_dim: int = 4,
    value_dim: int | None = None,
    key_heads: int | None = None,
) -> tuple[Any, Any, Any]:
    """Normal query, key and value, float32 of numpy, for functions of jax too."""
    rng = np.random.default_rng(seed)
    key_heads = key_heads or heads
    return (
        rng.normal(size=(batch, query_length, heads, head_dim)).astype("float32"),
        rng.normal(size=(batch, length, key_heads, head_dim)).astype("float32"),
        rng.normal(size=(batch, length, key_heads, value_dim or head_dim)).astype(
            "float32"
        ),
    )


def row_inputs(seed: int) -> tuple[list[Any], Any]:
    """Query, key and value of four rows for `ROWS`; and a gradient of the output."""
    *arrays, upstream = (
        x
        for one in (seed, seed + 1000)
        for x in inputs(one, 4, LENGTH, LENGTH, value_dim=3)
    )
    return arrays[:3], upstream


def extremes(name: str, *arrays: np.ndarray) -> dict[str, tuple[np.ndarray, ...]]:
    """Normal query, key and value, brought to the edges of float32, by kind."""
    q, k, v = arrays
    top, most = np.float32(case(name).largest), np.float32(1e18)
    return {
        "zero": (0 * q, 0 * k, v),
        "negative queries": (-np.abs(q), k, v),
        "negative": (-np.abs(q), -np.abs(k), v),
        "large negative": (-top * np.abs(q), -top * np.abs(k), v),
        "hundredfold": (100 * q, 100 * k, v),
        "large": (top * q, top * k, v),
        "large queries": (top * q, k, v),
        "large keys": (q, top * k, v),
        "large values": (q, k, most * v),
    }


def assert_extremes(
    name: str,
    pulled_back: Callable[..., Any],
    formula: Callable[..., np.ndarray],
    *arrays: np.ndarray,
) -> None:
    """Outputs are those of the formula, and gradients finite, for all `extremes`.

    Of a hundredfold input the outputs are finite: products of small features, which
    float64 knows, are zero in float32.
    """
    for kind, edges in extremes(name, *arrays).items():
        out, gradients = pulled_back(*edges)
        for array in (out, *gradients):
            assert np.isfinite(np.asarray(array)).all(), kind
        if kind == "hundredfold":
            continue
        with np.errstate(over="ignore"):
            expected = formula(*(x.astype("float64") for x in edges))
        error = np.abs(np.asarray(out, np.float64) - expected).max()
        assert error <= 1e-4 * np.abs(expected).max(), kind


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


def largest_of_slope(
    attend: Callable[[Any], jax.Array], length: int, heads: int = 1
) -> int:
    """`largest_array` of the gradient of self-attention over so many positions."""
    x = jax.ShapeDtypeStruct((1, length, heads, 4), jnp.float32)
    return largest_array(jax.grad(lambda x: attend(x).sum()), x)


def assert_close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """The largest error of every array, relative to its largest value, is this small.

    Args:
      got: an array or a tree of them.
      expected: the same in float64 or as precise as it can be.
      tolerance: the bound.
    """
    got, expected = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
        for tree in (got, expected)
    )
    chex.assert_trees_all_equal_shapes(got, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    scales = jax.tree.map(lambda x: np.abs(x).max(initial=0) or 1.0, expected)
    got, expected = (jax.tree.map(np.divide, tree, scales) for tree in (got, expected))
    chex.assert_trees_all_close(got, expected, rtol=0, atol=tolerance)


def assert_rejects(call: Callable[[], Any], *parts: str) -> None:
    """A ``ValueError`` with all these parts in its message."""
    with pytest.raises(ValueError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def assert_refuses(name: str, options: dict[str, Any], *parts: str) -> None:
    """A mechanism and its weights reject options, with all these parts."""
    q, k, v = inputs(2, query_length=5)
    assert_rejects(lambda: run(name)(q, k, v, **options), *options, *parts)
    assert_rejects(lambda: weights(name)(q, k, **options), *options, *parts)
