"""The mechanisms by name: the one list of them, and what each says that it can do.

A mechanism is a module of this package, one line of `MODULES`, whose last part is its
name. Its ``MECHANISM`` entry is a plain literal, read from the source without running
the module: command lines list and check mechanisms without importing jax. The functions
are imported when they are first asked for.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lra_jax.errors import did_you_mean, expected

__all__ = [
    "MECHANISMS",
    "MODULES",
    "Gate",
    "Mechanism",
    "accepted_keywords",
    "as_causal",
    "names",
    "public_names",
    "resolve",
    "sizes",
]

MODULES = (
    "lra_jax.attention.softmax.softmax",
    "lra_jax.attention.linear.linear",
    "lra_jax.attention.linear.cosformer",
    "lra_jax.attention.flow.flow",
    "lra_jax.attention.linear.norm",
    "lra_jax.attention.linear.retention",
    "lra_jax.attention.linear.lightning",
    "lra_jax.attention.low_rank.linformer",
    "lra_jax.attention.linear.performer",
    "lra_jax.attention.softmax.local",
    "lra_jax.attention.softmax.longformer",
    "lra_jax.attention.softmax.bigbird",
    "lra_jax.attention.softmax.sparse",
    "lra_jax.attention.low_rank.nystrom",
    "lra_jax.attention.low_rank.fnet",
    "lra_jax.attention.softmax.synthesizer",
    "lra_jax.attention.softmax.sinkhorn",
    "lra_jax.attention.softmax.reformer",
    "lra_jax.attention.low_rank.luna",
    "lra_jax.attention.gated_units.gau",
    "lra_jax.attention.gated_units.flash",
    "lra_jax.attention.recurrent.gla",
    "lra_jax.attention.recurrent.delta",
    "lra_jax.attention.recurrent.gated_delta",
    "lra_jax.attention.recurrent.hgrn",
)


@dataclass(frozen=True)
class Gate:
    """A further dense projection of a layer, which the function takes by keyword.

    Attributes:
      name: the keyword.
      of: "query" or "key": whose positions it is made from and belongs to.
      width: columns in each head: "head" (H), "value" (Hv), or "one", an array without
        a last axis.
      activation: what the projection goes through, of `lra_jax.attention.gates`.
      rank: columns between two matrices in place of one; None = one matrix.
      bias: what the projection's bias is at first; "spread" lets a sigmoid of it have
        time constants from 2 to 2,000 positions, evenly in their logarithm.
    """

    name: str
    of: str = "key"
    width: str = "head"
    activation: str = "identity"
    rank: int | None = None
    bias: float | str = 0.0


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism.

    The capabilities are None for a function from outside this package: unknown.

    Attributes:
      name: as given to ``--attention``.
      module: the module that holds its functions; an entry leaves it out.
      causal: has an autoregressive form.
      cross: query and key may differ in length.
      stream: has ``<name>_init``, ``<name>_prefill`` and ``<name>_step``, with a state
        of constant size.
      packed: computes the documents of a packed row (``segment_ids``) in one pass;
        otherwise one after the other, each at the cost of the whole row.
      kernels: has Pallas kernels, chosen by its ``implementation``.
      sharded: name of the function that computes one device's slice of a sequence that
        is split over devices; None = it cannot be split.
      rotary: its scores are inner products of queries and keys, so that rotary
        positions suit it.
      cost: leading term of the time, in T, S, H and the mechanism's own sizes.
      summary: one line.
      source: the paper.
      parameters: name of the function that makes its own arrays, if it has any.
      buffers: which of those arrays are not trained but stay as they were made.
      projections: those of a layer's dense projections that it has a use for. Without
        "query" or "key" it does not read that argument; without "value" it takes the
        layer's input as it is, and without "out" its output is the layer's.
      activation: applied to queries, keys and values after their projections, of
        `lra_jax.attention.gates`.
      gates: further projections of the layer.
      layout: name of the function that gives the widths of a layer's heads from the
        width of its input, where they are not the layer's own to choose.
      mlp: False if a layer does the MLP's work too. A block of a model then holds a
        second such layer in the MLP's place.
      memory: name of the function that takes a ``memory`` and returns, beside the
        output, what the next layer's memory is made of; None = it has no memory.
      presets: what a named preset of a task changes for this mechanism: a pattern of
        preset names (``official``, ``modern*``), then one of task names (``*``, which
        is all of LRA's, or ``path*``, ``mad-*``), then flags and their values. A later
        pattern overrules an earlier one.
      function: the function itself, for one from outside this package.
    """

    name: str
    module: str = ""
    causal: bool | None = None
    cross: bool | None = None
    stream: bool | None = None
    packed: bool = False
    kernels: bool = False
    sharded: str | None = None
    rotary: bool = False
    cost: str = "unknown"
    summary: str = ""
    source: str = ""
    parameters: str | None = None
    buffers: tuple[str, ...] = ()
    projections: tuple[str, ...] = ("query", "key", "value", "out")
    activation: str = "identity"
    gates: tuple[Gate, ...] = ()
    layout: str | None = None
    mlp: bool = True
    memory: str | None = None
    presets: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(
        default_factory=dict, hash=False
    )
    function: Callable[..., Any] | None = None

    @property
    def attention(self) -> Callable[..., Any]:
        """``<name>_attention``, or the function given; imports it if need be."""
        if self.function is not None:
            return self.function
        return self._find(f"{self.name}_attention")

    @property
    def weights(self) -> Callable[..., Any]:
        """``<name>_weights``, the dense `[B, N, T, S]` form.

        Raises:
          ValueError: the mechanism is a function from outside, which has none.
        """
        if self.function is not None:
            wanted = "a registered mechanism for its dense weights"
            raise expected("attention", wanted, f"the function {self.name!r}")
        return self._find(f"{self.name}_weights")

    @property
    def make_parameters(self) -> Callable[..., dict[str, Any]] | None:
        """The function that makes its own arrays; None if it has none."""
        return None if self.parameters is None else self._find(self.parameters)

    @property
    def make_layout(self) -> Callable[..., Any] | None:
        """The function that gives its heads' widths; None if a layer may choose."""
        return None if self.layout is None else self._find(self.layout)

    @property
    def with_memory(self) -> Callable[..., Any] | None:
        """The function that takes a memory; None if it has none."""
        return None if self.memory is None else self._find(self.memory)

    @property
    def slice_attention(self) -> Callable[..., Any] | None:
        """The function of one device's slice of a sequence; None if it has none."""
        return None if self.sharded is None else self._find(self.sharded)

    def _find(self, name: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), name)


def sizes(**sizes: int) -> dict[str, int]:
    """Flags of the model, as in ``sizes(num_layers=2)`` for ``model.num_layers``."""
    return {f"model.{name}": size for name, size in sizes.items()}


class _Mechanisms(MutableMapping[str, Mechanism]):
    """The entries by name, each read when it is first asked for."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = {module.rpartition(".")[2]: module for module in modules}
        self._entries: dict[str, Mechanism] = {}

    def __getitem__(self, name: str) -> Mechanism:
        if name not in self._entries:
            self._entries[name] = _read_entry(self._modules[name])
        return self._entries[name]

    def __setitem__(self, name: str, mechanism: Mechanism) -> None:
        self._modules[name] = mechanism.module
        self._entries[name] = mechanism

    def __delitem__(self, name: str) -> None:
        del self._modules[name]
        self._entries.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules


def public_names(module: str) -> list[str]:
    """The ``__all__`` of a module, which is not run for it."""
    return ast.literal_eval(_assigned(module, "__all__"))


def _read_entry(module: str) -> Mechanism:
    """The ``MECHANISM`` of a module, which is not run for it."""
    code = compile(ast.Expression(_assigned(module, "MECHANISM")), module, "eval")
    names = {"Gate": Gate, "Mechanism": Mechanism, "sizes": sizes}
    return replace(eval(code, names), module=module)


@functools.cache
def _assigned(module: str, name: str) -> ast.expr:
    """The expression that the source of a module assigns to a name.

    Raises:
      ValueError: there is no such module, or it assigns nothing to the name.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise expected("attention", f"a module {module!r}", "none")
    for node in ast.parse(Path(spec.origin).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise expected("attention", f"{name} = ... in {spec.origin}", "none")


MECHANISMS: MutableMapping[str, Mechanism] = _Mechanisms(MODULES)


def names() -> tuple[str, ...]:
    """The registered names, in the order of the table."""
    return tuple(MECHANISMS)


def resolve(spec: "str | Callable[..., Any] | Mechanism") -> Mechanism:
    """Finds a mechanism.

    Args:
      spec: a registered name, a function ``(query, key, value, ...)``, the string
        "package.module:function", or a `Mechanism`, which is returned as it is.

    Returns:
      The mechanism. A function of this package, however it was given, is its registered
      mechanism; for any other the capabilities are None.

    Raises:
      ValueError: no such name, module or attribute, or it cannot be called.
    """
    if isinstance(spec, Mechanism):
        return spec
    if callable(spec):
        return _foreign(spec)
    if not isinstance(spec, str):
        wanted = "a registered name, 'package.module:function' or a function"
        raise expected("attention", wanted, f"{spec!r}")
    if ":" in spec:
        return _foreign(_load(spec), spec)
    if spec not in MECHANISMS:
        wanted = f"one of {', '.join(MECHANISMS)}, or 'package.module:function'"
        hint = did_you_mean(spec.lower(), MECHANISMS)
        raise expected("attention", wanted, f"{spec!r}{hint}")
    return MECHANISMS[spec]


def _foreign(function: Callable[..., Any], name: str | None = None) -> Mechanism:
    module = getattr(function, "__module__", None) or ""
    own_name = getattr(function, "__qualname__", type(function).__name__)
    try:
        inspect.signature(function).bind_partial("query", "key", "value")
    except (TypeError, ValueError) as error:
        wanted = f"{name or own_name!r} to take (query, key, value, ...)"
        raise expected("attention", wanted, error) from error
    for mechanism in MECHANISMS.values():
        if (module, own_name) == (mechanism.module, f"{mechanism.name}_attention"):
            return mechanism
    return Mechanism(
        name=name or own_name,
        module=module,
        summary="a function from outside lra_jax",
        function=function,
    )


def _load(spec: str) -> Callable[..., Any]:
    path, _, attribute = spec.partition(":")
    if not path or not attribute:
        raise expected("attention", "'package.module:function'", f"{spec!r}")
    try:
        found = importlib.import_module(path)
    except (Exception, SystemExit) as error:
        wanted = f"a module that imports before ':' in {spec!r}"
        got = f"{type(error).__name__}: {error}"
        raise expected("attention", wanted, got) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            wanted = f"{attribute!r} in the module {path!r}"
            raise expected("attention", wanted, f"no attribute {part!r}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise expected("attention", f"{spec!r} to be a function", f"a {kind}")
    return found


def as_causal(function: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that is causal, whatever ``is_causal`` it is called with.

    For ``nnx.MultiHeadAttention(attention_fn=...)``, which passes ``is_causal=False``
    itself and so overrules that of a ``functools.partial``. With ``decode=True`` that
    layer gives one query and all keys, but not its position, and the function raises:
    our streams decode (``X_prefill`` and ``X_step``).

    Args:
      function: ``f(query, key, value, ..., is_causal=...)``; also a partial of one.

    Raises:
      ValueError: it has no causal form, or, when called, query and key differ in
        length.
    """
    mechanism = resolve(getattr(function, "func", function))
    accepted = accepted_keywords(function)
    takes = accepted is None or "is_causal" in accepted
    if mechanism.causal is False or not takes:
        able = (name for name, one in MECHANISMS.items() if one.causal)
        wanted = f"one with a causal form, as {', '.join(able)} have"
        raise expected("attention", wanted, f"{mechanism.name!r}")

    @functools.wraps(function, assigned=functools.WRAPPER_ASSIGNMENTS[2:])
    def causal(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords | {"is_causal": True})

    return causal


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords that may be passed to an attention function.

    Its first three positional parameters, query, key and value, are left out. None
    means that any keyword may be passed (it has a ``**keywords``). The ``**flax`` of
    our own functions is not counted: they ignore what Flax passes, and refuse the rest.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD and p.name != "flax" for p in parameters):
        return None
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ][:3]
    return frozenset(
        p.name
        for p in parameters
        if p.name not in positional
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
