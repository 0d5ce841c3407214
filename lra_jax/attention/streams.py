"""Streams: decoding one position at a time, written once for all causal mechanisms.

A mechanism has ``X_prefill(query, key, value, ..., mask=None, state=None)``, which
processes a prompt, or a later part of one, and returns its causal attention and the
state after the last real position. If one function computes both ``X_prefill`` and
``X_attention``, the prefill is made from it here. ``X_step`` and ``X_init`` follow from
the prefill: a step is a prompt of length 1, and, because padding is exact, the initial
state is the state after a prompt whose only position is hidden.
"""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import chex
import jax
import jax.numpy as jnp

from lra_jax.attention import inputs, masking, packed
from lra_jax.errors import expected

State = TypeVar("State", covariant=True)
AnyState = TypeVar("AnyState")

_PREFILL = """Processes a whole prompt, or a later part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, arrays, mask and options as in `{attention}`,
        the same in every call of a stream.
      state: the state so far; None = a new stream. In a packed row, the first document
        continues it, and the returned state is that of the last.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position.

    Raises:
      ValueError: shapes, dtypes, the mask, an option or the state do not fit.
    """
_INIT = """Returns the state of a stream before its first position.

    Args:
      batch_size: B.
      num_heads: N, the query's heads.
      head_dim: H.
      value_dim: Hv; None = H.
      dtype: of the sums and of all later computation: float32, or float64 for float64
        inputs.
      **options: as in `{prefill}`; those that affect the state's shape are needed. A
        state keeps only a ``max_length``: pass the others to every step, too.

    Raises:
      ValueError: the dtype or an option does not fit.
    """
_STEP = """Processes one position of each sample: `[B, N, H]` -> `[B, N, Hv]`.

    Args:
      state: from `{init}`, `{prefill}` or the previous step.
      query: `[B, N, H]`.
      key: `[B, N, H]`.
      value: `[B, N, Hv]`.
      *arguments, **options: other arguments of `{prefill}`{gates}.

    Returns:
      The output `[B, N, Hv]` and the new state.

    Raises:
      ValueError: as for `{prefill}`.
    """


# Parameters of an attention that are not options of its prefill.
_ATTENTION = {"query", "key", "value", "is_causal", "implementation", "deterministic"}
# Parameters of a prefill that are not options of init and step.
_WHOLE = {"query", "key", "value", "mask", "chunking", "state", "segment_ids"}


class Prefill(Protocol[AnyState]):
    """The type of an ``X_prefill`` made by `make_prefill`."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *arguments: Any,
        state: AnyState | None = None,
        **options: Any,
    ) -> tuple[jax.Array, AnyState]: ...


class Init(Protocol[State]):
    """The type of ``X_init``."""

    def __call__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        **options: Any,
    ) -> State: ...


class Step(Protocol[AnyState]):
    """The type of ``X_step``."""

    def __call__(
        self,
        state: AnyState,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *arguments: Any,
        **options: Any,
    ) -> tuple[jax.Array, AnyState]: ...


def shapes_shown(self: Any) -> str:
    """The ``__repr__`` of a state: its arrays as dtypes and shapes.

    As in ``LinearState(sums=Sums(summary=float32[2, 2, 16, 16], ...), ...)``.
    """
    fields = (f"{n}={_shape(x)}" for n, x in self._asdict().items())
    return f"{type(self).__name__}({', '.join(fields)})"


def _shape(x: Any) -> str:
    known = hasattr(x, "dtype") and hasattr(x, "shape")
    return f"{x.dtype}{list(x.shape)}" if known else repr(x)


def checked(state: Any, empty: Any) -> Any:
    """Returns the state so far, or the empty one for None.

    Raises:
      ValueError: its arrays do not have the shapes of the empty one's.
    """
    if state is None:
        return empty
    for name, given, example in zip(empty._fields, state, empty, strict=True):
        words = f"{name} of shape {example.shape} for these inputs"
        with inputs.asserted("state", words, jnp.shape(given)):
            chex.assert_shape(given, example.shape)
    return state


def begun(
    state: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    rows: packed.Packed | None = None,
) -> tuple[jax.Array | None, jnp.dtype, jax.Array]:
    """Checks a prefill's arrays, and returns what it needs to start.

    Args:
      state: the state so far, with ``sums`` and ``position``; None = a new stream.
      query: `[B, T, N, H]`.
      key: `[B, T, N, H]`.
      value: `[B, T, N, Hv]`.
      mask: as given by the caller.
      rows: where packed documents are; None = one per row.

    Returns:
      The mask as `[B, T]` or None, the dtype of the sums, and the position after each
      sample's last real one, `[B]`, counted in its document.

    Raises:
      ValueError: the arrays or the mask do not fit.
    """
    inputs.check_inputs(query, key, value, True)
    batch, length = query.shape[:2]
    mask = packed.shown(masking.padding_mask(mask, batch, length), rows)
    before = None if state is None else state.position
    position = packed.next_position(mask, rows, batch, length, before)
    if state is None:
        return mask, inputs.accumulation_dtype(query, key, value), position
    return mask, jax.tree.leaves(state.sums)[0].dtype, position


def make_prefill(
    attention: Callable[..., jax.Array], run: Callable[..., tuple[jax.Array, AnyState]]
) -> Prefill[AnyState]:
    """Makes the ``X_prefill`` of a mechanism from its ``X_attention``.

    Args:
      attention: ``X_attention``.
      run: computes it and returns the state as well: ``f(query, key, value, mask,
        is_causal=..., state=..., **options)``. Those of its options that are parameters
        of the attention become the options of the prefill; with ``**options`` in its
        signature, all of them.
    """
    taken = inspect.signature(run).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    parameters = inspect.signature(attention).parameters
    names = list(parameters)
    # Those before is_causal stay positional: the mask, and arrays before it.
    places = names[names.index("value") + 1 : names.index("is_causal")]
    options = {
        p.name: p if p.name in places else p.replace(kind=p.KEYWORD_ONLY)
        for p in parameters.values()
        if p.kind is not p.VAR_KEYWORD
        and p.name not in _ATTENTION
        and (every or p.name in taken)
    }
    defaults = {name: p.default for name, p in options.items()}

    def prefill(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *arguments: Any,
        state: AnyState | None = None,
        **keywords: Any,
    ) -> tuple[jax.Array, AnyState]:
        keywords |= dict(zip(places, arguments, strict=False))
        unknown = [name for name in keywords if name not in options]
        if unknown:
            name = prefill.__name__
            raise TypeError(
                f"{name}() got an unexpected keyword argument {unknown[0]!r}"
            )
        keywords = defaults | keywords
        return run(query, key, value, is_causal=True, state=state, **keywords)

    parameters = inspect.signature(prefill).parameters
    signature = inspect.Signature(
        [
            *(parameters[name] for name in ("query", "key", "value")),
            *(options[name] for name in places),
            parameters["state"],
            *(p for name, p in options.items() if name not in places),
        ]
    )
    words = {"attention": attention.__name__}
    return _named(prefill, "prefill", attention, _PREFILL, signature, **words)


def make_init(prefill: Callable[..., tuple[jax.Array, State]]) -> Init[State]:
    """Makes the ``X_init`` of a mechanism from its ``X_prefill``."""

    def init(
        batch_size: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        **options: Any,
    ) -> State:
        dtype = _state_dtype(dtype)
        value_dim = head_dim if value_dim is None else value_dim
        query = jnp.zeros((batch_size, 1, num_heads, head_dim), dtype)
        value = jnp.zeros((batch_size, 1, num_heads, value_dim), dtype)
        hidden = jnp.zeros((batch_size, 1), bool)
        return prefill(query, query, value, mask=hidden, **options)[1]

    words = {"prefill": prefill.__name__}
    signature = _signature(init, prefill)
    return _named(init, "init", prefill, _INIT, signature, **words)


def make_step(
    prefill: Callable[..., tuple[jax.Array, AnyState]], *gates: str
) -> Step[AnyState]:
    """Makes the ``X_step`` of a mechanism from its ``X_prefill``.

    Args:
      prefill: ``X_prefill``.
      *gates: its keywords that are arrays with one entry per position.
    """

    def step(
        state: AnyState,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *arguments: Any,
        **options: Any,
    ) -> tuple[jax.Array, AnyState]:
        for name in gates:
            if options.get(name) is not None:
                options[name] = jnp.asarray(options[name])[:, None]
        arrays = _one_position(query, key, value)
        out, state = prefill(*arrays, *arguments, state=state, **options)
        return out[:, 0], state

    own = f"; without the axis T: {', '.join(gates)}" if gates else ""
    name = prefill.__name__
    words = {"prefill": name, "init": name.replace("_prefill", "_init"), "gates": own}
    signature = _signature(step, prefill)
    return _named(step, "step", prefill, _STEP, signature, **words)


def _state_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype of a stream's state; ``ValueError`` unless float32 or float64."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.float64):
        wanted = "float32 or float64, because a state sums over all positions"
        raise expected("dtype", wanted, jnp.dtype(dtype))
    return jnp.dtype(dtype)


def _one_position(
    query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds an axis of length T = 1 to the arrays of a stream's step, `[B, N, H]`.

    Raises:
      ValueError: an array does not have three axes.
    """
    given = {
        "query": (query, "B N H"),
        "key": (key, "B N H"),
        "value": (value, "B N Hv"),
    }
    for name, (array, axes) in given.items():
        inputs.check_shape(name, array, axes, None, None, None)
    return query[:, None], key[:, None], value[:, None]


def _signature(function: Any, prefill: Callable[..., Any]) -> inspect.Signature:
    """A function's own parameters, then the options of the prefill as keywords."""
    own = inspect.signature(function).parameters.values()
    kept = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = {p.name for p in kept} | _WHOLE
    options = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in inspect.signature(prefill).parameters.values()
        if p.name not in taken
    ]
    return inspect.Signature(kept + options)


def _named(
    function: Any,
    part: str,
    source: Callable[..., Any],
    text: str,
    signature: inspect.Signature,
    **words: str,
) -> Any:
    """Makes a stream function look as if the mechanism's module had defined it."""
    name = source.__name__.rpartition("_")[0]
    function.__signature__ = signature
    function.__name__ = function.__qualname__ = f"{name}_{part}"
    function.__module__ = source.__module__
    function.__doc__ = text.format(**words)
    return function
