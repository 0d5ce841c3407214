"""Streams: decoding one position at a time, written once for all causal mechanisms.

A mechanism computes ``run(call, **options) -> (output, state)``, see `Call`. Its
``X_prefill`` runs a prompt, or a later part of one, and returns the causal attention
and the state after the last real position. ``X_step`` and ``X_init`` follow from it: a
step is a prompt of length 1, and, because padding is exact, the initial state is the
state after a prompt whose only position is hidden. One device's slice of a longer
sequence is also a call (`make_slice`).

The options of all of these are the parameters of ``X_attention``, declared once.
"""

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import chex
import jax
import jax.numpy as jnp

from lra_jax.attention import inputs
from lra_jax.attention.call import Call, bind, split
from lra_jax.errors import a_thing, expected

State = TypeVar("State", covariant=True)
AnyState = TypeVar("AnyState")
Options = ParamSpec("Options")

_PREFILL = """Processes a whole prompt, or a later part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, arrays, mask and options as in `{attention}`,
        the same in every call of a stream, but for a ``max_length``, which the state
        keeps.
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


# Parameters of a prefill that are not options of init and step.
_OF_PREFILL = {"query", "key", "value", "mask", "chunking", "state", "segment_ids"}
# Fields of a call that a prefill does not take.
_NOT_STREAMED = {"is_causal", "implementation", "deterministic"}


class Prefill(Protocol[Options, AnyState]):
    """The type of an ``X_prefill``; options are passed by keyword."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        state: AnyState | None = None,
        *args: Options.args,
        **options: Options.kwargs,
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


def show_shapes(self: Any) -> str:
    """The ``__repr__`` of a state: its arrays as dtypes and shapes.

    As in ``LinearState(sums=Sums(summary=float32[2, 2, 16, 16], ...), ...)``.
    """
    fields = (f"{n}={_shape(x)}" for n, x in self._asdict().items())
    return f"{type(self).__name__}({', '.join(fields)})"


def _shape(x: Any) -> str:
    known = hasattr(x, "dtype") and hasattr(x, "shape")
    return f"{x.dtype}{list(x.shape)}" if known else repr(x)


def check_sums(state: Any, empty: Any) -> Any:
    """Returns the state so far, or the empty one for None.

    Raises:
      ValueError: its arrays do not have the shapes of the empty one's.
    """
    if state is None:
        return empty
    for name, array, example in zip(empty._fields, state, empty, strict=True):
        words = f"{name} of shape {example.shape} for these inputs"
        with inputs.chex_as_value_error("state", words, jnp.shape(array)):
            chex.assert_shape(array, example.shape)
    return state


def make_prefill(
    attention: Callable[
        Concatenate[jax.Array, jax.Array, jax.Array, jax.Array | None, bool, Options],
        jax.Array,
    ],
    run: Callable[..., tuple[jax.Array, AnyState]],
    kind: type[AnyState],
) -> Prefill[Options, AnyState]:
    """Makes the ``X_prefill`` of a mechanism from its ``X_attention``.

    Args:
      attention: ``X_attention``.
      run: ``run(call, **options)``, see `call.attention_of`.
      kind: the class of the state, which only this mechanism has.
    """
    parameters = _parameters(attention)
    names = list(parameters)
    # Those before is_causal stay positional: the arrays and the mask.
    first = names[: names.index("is_causal")]
    positional = [parameters.pop(name) for name in first]
    state_so_far = inspect.Parameter(
        "state", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind | None
    )
    options = [
        p.replace(kind=p.KEYWORD_ONLY)
        for name, p in parameters.items()
        if name not in _NOT_STREAMED
    ]
    signature = inspect.Signature([*positional, state_so_far, *options])

    def prefill(*args: Any, **keywords: Any) -> tuple[jax.Array, AnyState]:
        arguments = bind(prefill.__name__, signature, args, keywords)
        state = arguments.pop("state")
        _check_state(state, kind)
        fields, options = split(arguments)
        fields |= {"is_causal": True, "implementation": "xla"}
        return run(Call.of(**fields, state=state, streams=True), **options)

    words = {"attention": getattr(attention, "__name__", "")}
    return _name_after(prefill, "prefill", attention, _PREFILL, signature, **words)


def make_slice(
    attention: Callable[..., jax.Array], run: Callable[..., tuple[jax.Array, Any]]
) -> Callable[..., jax.Array]:
    """Makes the function of one device's slice, see `lra_jax.attention.sharded`.

    It takes the arrays of the slice, the mesh axis ``axis``, and the options of
    ``X_attention``; others are ignored.
    """
    defaults = {
        name: p.default
        for name, p in _parameters(attention).items()
        if name not in {"query", "key", "value", "implementation"}
    }

    def attend_slice(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None,
        query_mask: jax.Array | None,
        segment_ids: jax.Array | None = None,
        *,
        axis: str,
        is_causal: bool,
        **keywords: Any,
    ) -> jax.Array:
        known = {name: x for name, x in keywords.items() if name in defaults}
        masks = {"mask": mask, "query_mask": query_mask, "segment_ids": segment_ids}
        fields, rest = split(defaults | known)
        fields |= masks | {"axis": axis, "implementation": "xla"}
        fields["is_causal"] = is_causal
        return run(Call.of(query, key, value, **fields), **rest)[0]

    return attend_slice


def _parameters(attention: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of an ``X_attention``, without those for Flax."""
    parameters = inspect.signature(attention).parameters.values()
    return {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}


def _check_state(state: Any, kind: type) -> None:
    """Raises ``ValueError`` unless this is None or a state of this mechanism."""
    if state is None:
        return
    if type(state) is not kind:
        raise expected("state", f"None or a {kind.__name__}", a_thing(state))
    for x in jax.tree.leaves(state.sums):
        if jnp.result_type(x) not in (jnp.float32, jnp.float64):
            needed = "sums of float32 or float64, which run over all positions"
            raise expected("state", needed, jnp.result_type(x))


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
        dtype = jnp.dtype(dtype)
        if dtype not in (jnp.float32, jnp.float64):
            needed = "float32 or float64, because a state sums over all positions"
            raise expected("dtype", needed, dtype)
        value_dim = head_dim if value_dim is None else value_dim
        query = jnp.zeros((batch_size, 1, num_heads, head_dim), dtype)
        value = jnp.zeros((batch_size, 1, num_heads, value_dim), dtype)
        hidden = jnp.zeros((batch_size, 1), bool)
        return prefill(query, query, value, mask=hidden, **options)[1]

    words = {"prefill": prefill.__name__}
    signature = _signature(init, prefill)
    return _name_after(init, "init", prefill, _INIT, signature, **words)


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
        arrays = {"query": query, "key": key, "value": value}
        for name, x in arrays.items():
            axes = "B N Hv" if name == "value" else "B N H"
            inputs.check_shape(name, x, axes, None, None, None)
        each = (x[:, None] for x in arrays.values())
        out, state = prefill(*each, *arguments, state=state, **options)
        return out[:, 0], state

    note = f"; without the axis T: {', '.join(gates)}" if gates else ""
    name = prefill.__name__
    words = {"prefill": name, "init": name.replace("_prefill", "_init"), "gates": note}
    signature = _signature(step, prefill)
    return _name_after(step, "step", prefill, _STEP, signature, **words)


def _signature(function: Any, prefill: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function, then the options of the prefill as keywords."""
    positional = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    taken = {p.name for p in positional} | _OF_PREFILL
    options = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in inspect.signature(prefill).parameters.values()
        if p.name not in taken
    ]
    return inspect.Signature(positional + options)


def _name_after(
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
