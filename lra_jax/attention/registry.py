"""The mechanisms by name, what each can do, and where to find its functions.

Importing this module does not import jax: command lines list and check mechanisms
before they pay for it. The functions are imported when they are first asked for.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["MECHANISMS", "Gate", "Mechanism", "accepted_keywords", "names", "resolve"]

_PACKAGE = "lra_jax.attention"


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
      bias: what the projection's bias is at first.
    """

    name: str
    of: str = "key"
    width: str = "head"
    activation: str = "identity"
    rank: int | None = None
    bias: float = 0.0


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism.

    The capabilities are None for a function from outside this package: unknown.

    Attributes:
      name: as given to ``--attention``.
      module: the module that holds its functions.
      causal: has an autoregressive form.
      cross: query and key may differ in length.
      padding: a padding mask is exact: a padded batch equals each sample run alone.
      stream: has ``<name>_init``, ``<name>_prefill`` and ``<name>_step``, with a state
        of constant size.
      cost: leading term of the time, in T, S, H and the mechanism's own sizes.
      summary: one line.
      source: the paper.
      parameters: name of the function that makes its own arrays, if it has any.
      buffers: which of those arrays are not trained but stay as they were made.
      projections: those of a layer's dense projections that it has a use for. Without
        "query" or "key" it does not read that argument; without "value" it takes the
        layer's input as it is, and without "out" its output is the layer's.
      activation: what queries, keys and values go through behind their projections,
        of `lra_jax.attention.gates`.
      gates: further projections of the layer.
      layout: name of the function that gives the widths of a layer's heads from the
        width of its input, where they are not the layer's own to choose.
      mlp: False if a layer does the MLP's work too. A block of a model then holds a
        second such layer in the MLP's place.
      memory: name of the function that takes a ``memory`` and returns, beside the
        output, what the next layer's memory is made of; None = it has no memory.
      function: the function itself, for one from outside this package.
    """

    name: str
    module: str
    causal: bool | None = None
    cross: bool | None = None
    padding: bool | None = None
    stream: bool | None = None
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
            raise ValueError(
                "attention: expected a registered mechanism for its dense weights, "
                f"got the function {self.name!r}"
            )
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

    def _find(self, name: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), name)


MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            name="softmax",
            module=f"{_PACKAGE}.softmax",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="T S H",
            summary="softmax of scaled dot products, the quadratic baseline",
            source="Vaswani et al. 2017",
        ),
        Mechanism(
            name="linear",
            module=f"{_PACKAGE}.linear",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="(T + S) H^2",
            summary="elu(x) + 1 features, normalised (Linear Transformer)",
            source="Katharopoulos et al. 2020",
        ),
        Mechanism(
            name="cosformer",
            module=f"{_PACKAGE}.cosformer",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="2 (T + S) H^2",
            summary="ReLU features re-weighted by the cosine of distance",
            source="Qin et al. 2022",
        ),
        Mechanism(
            name="flow",
            module=f"{_PACKAGE}.flow",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="(T + S) H^2",
            summary="conserved flows: sources compete, sinks allocate (Flowformer)",
            source="Wu et al. 2022",
        ),
        Mechanism(
            name="norm",
            module=f"{_PACKAGE}.norm",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="(T + S) H^2",
            summary="a norm of the output in place of the denominator (TransNormer)",
            source="Qin et al. 2022b",
        ),
        Mechanism(
            name="retention",
            module=f"{_PACKAGE}.retention",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="2 (T + S) H^2",
            summary="rotated products that fade with distance, a norm for each head",
            source="Sun et al. 2023",
        ),
        Mechanism(
            name="lightning",
            module=f"{_PACKAGE}.lightning",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="2 (T + S) H^2",
            summary="products that fade with distance, not normalised (TransNormerLLM)",
            source="Qin et al. 2024",
        ),
        Mechanism(
            name="linformer",
            module=f"{_PACKAGE}.linformer",
            causal=False,
            cross=True,
            padding=True,
            stream=False,
            cost="2 (T + S) K H",
            summary="softmax over K learned mixtures of the positions",
            source="Wang et al. 2020",
            parameters="linformer_parameters",
        ),
        Mechanism(
            name="performer",
            module=f"{_PACKAGE}.performer",
            causal=True,
            cross=True,
            padding=True,
            stream=True,
            cost="(T + S) M H",
            summary="random features of the softmax kernel (FAVOR+), or of another",
            source="Choromanski et al. 2021",
            parameters="performer_parameters",
            buffers=("projection",),
        ),
        Mechanism(
            name="local",
            module=f"{_PACKAGE}.local",
            causal=True,
            cross=False,
            padding=True,
            stream=False,
            cost="3 T w H",
            summary="softmax over a window of w positions a side, or over blocks",
            source="Tay et al. 2021",
        ),
        Mechanism(
            name="longformer",
            module=f"{_PACKAGE}.longformer",
            causal=True,
            cross=False,
            padding=True,
            stream=False,
            cost="3 T w H",
            summary="softmax over a window and the first tokens, which see everything",
            source="Beltagy et al. 2020",
        ),
        Mechanism(
            name="bigbird",
            module=f"{_PACKAGE}.bigbird",
            causal=True,
            cross=False,
            padding=True,
            stream=False,
            cost="(7 + R) T C H",
            summary="softmax over neighbouring, global and R random blocks of C",
            source="Zaheer et al. 2020",
        ),
        Mechanism(
            name="sparse",
            module=f"{_PACKAGE}.sparse",
            causal=True,
            cross=False,
            padding=True,
            stream=False,
            cost="4 T^1.5 H",
            summary="softmax over strided or fixed positions (Sparse Transformer)",
            source="Child et al. 2019",
        ),
        Mechanism(
            name="nystrom",
            module=f"{_PACKAGE}.nystrom",
            causal=False,
            cross=True,
            padding=True,
            stream=False,
            cost="2 (T + S) m H + m^3",
            summary="softmax by m landmarks and a pseudo-inverse (Nystromformer)",
            source="Xiong et al. 2021",
            parameters="nystrom_parameters",
        ),
        Mechanism(
            name="fnet",
            module=f"{_PACKAGE}.fnet",
            causal=False,
            cross=False,
            padding=True,
            stream=False,
            cost="2 T log(T) N H",
            summary="Fourier transforms over positions and columns, no parameters",
            source="Lee-Thorp et al. 2022",
            projections=(),
        ),
        Mechanism(
            name="synthesizer",
            module=f"{_PACKAGE}.synthesizer",
            causal=True,
            cross=True,
            padding=True,
            stream=False,
            cost="T S H",
            summary="softmax of learned scores, without products of query and key",
            source="Tay et al. 2021",
            parameters="synthesizer_parameters",
            projections=("query", "value", "out"),
        ),
        Mechanism(
            name="sinkhorn",
            module=f"{_PACKAGE}.sinkhorn",
            causal=False,
            cross=False,
            padding=True,
            stream=False,
            cost="4 T C H + 2 T^2 / C H",
            summary="softmax over the own block of C and a softly sorted one",
            source="Tay et al. 2020",
            parameters="sinkhorn_parameters",
        ),
        Mechanism(
            name="reformer",
            module=f"{_PACKAGE}.reformer",
            causal=False,
            cross=False,
            padding=True,
            stream=False,
            cost="4 R T C H",
            summary="softmax within the buckets of R hashes, queries as keys",
            source="Kitaev et al. 2020",
            projections=("query", "value", "out"),
        ),
        Mechanism(
            name="luna",
            module=f"{_PACKAGE}.luna",
            causal=True,
            cross=True,
            padding=True,
            stream=False,
            cost="2 (T + S) L H",
            summary="keys packed by a memory of L vectors, unpacked by the queries",
            source="Ma et al. 2021",
            parameters="luna_parameters",
            memory="luna_packed",
        ),
        Mechanism(
            name="gau",
            module=f"{_PACKAGE}.gau",
            causal=True,
            cross=False,
            padding=True,
            stream=False,
            cost="T^2 (H + Hv)",
            summary="squared ReLU of scores and a gate, in place of attention and MLP",
            source="Hua et al. 2022",
            parameters="gau_parameters",
            projections=("query", "value", "out"),
            activation="silu",
            gates=(Gate("gate", of="query", width="value", activation="silu"),),
            layout="gau_layout",
            mlp=False,
        ),
        Mechanism(
            name="flash",
            module=f"{_PACKAGE}.flash",
            causal=True,
            cross=False,
            padding=True,
            stream=False,
            cost="T (C + H) (H + Hv)",
            summary="a gated unit within chunks of C, linear attention between them",
            source="Hua et al. 2022",
            parameters="flash_parameters",
            projections=("query", "value", "out"),
            activation="silu",
            gates=(Gate("gate", of="query", width="value", activation="silu"),),
            layout="flash_layout",
            mlp=False,
        ),
        Mechanism(
            name="gla",
            module=f"{_PACKAGE}.gla",
            causal=True,
            cross=False,
            padding=True,
            stream=True,
            cost="2 T (16 + Hv) H",
            summary="a state that fades by gates of the input, column by column",
            source="Yang et al. 2024a",
            gates=(
                Gate("log_decay", activation="slow_decay", rank=16),
                Gate("gate", of="query", width="value", activation="silu"),
            ),
        ),
        Mechanism(
            name="delta",
            module=f"{_PACKAGE}.delta",
            causal=True,
            cross=False,
            padding=True,
            stream=True,
            cost="2 T (64 + H) H",
            summary="a state where a key's old value is replaced (DeltaNet)",
            source="Yang et al. 2024b",
            gates=(Gate("beta", width="one", activation="sigmoid"),),
        ),
        Mechanism(
            name="gated_delta",
            module=f"{_PACKAGE}.gated_delta",
            causal=True,
            cross=False,
            padding=True,
            stream=True,
            cost="2 T (64 + H) H",
            summary="the delta rule with a decay and an output gate (Gated DeltaNet)",
            source="Yang et al. 2025",
            gates=(
                Gate("beta", width="one", activation="sigmoid"),
                Gate("log_decay", width="one", activation="softplus_decay", bias=-3.0),
                Gate("gate", of="query", width="value", activation="silu"),
            ),
        ),
    )
}


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
        raise ValueError(
            "attention: expected a registered name, 'package.module:function' or a "
            f"function, got {spec!r}"
        )
    if ":" in spec:
        return _foreign(_load(spec), spec)
    if spec not in MECHANISMS:
        near = difflib.get_close_matches(spec.lower(), MECHANISMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"attention: expected one of {', '.join(MECHANISMS)}, or "
            f"'package.module:function', got {spec!r}{hint}"
        )
    return MECHANISMS[spec]


def _foreign(function: Callable[..., Any], name: str | None = None) -> Mechanism:
    module = getattr(function, "__module__", None) or ""
    own_name = getattr(function, "__qualname__", type(function).__name__)
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
        raise ValueError(f"attention: expected 'package.module:function', got {spec!r}")
    try:
        found = importlib.import_module(path)
    except Exception as error:
        raise ValueError(
            f"attention: expected a module that imports before ':' in {spec!r}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"attention: expected {attribute!r} in the module {path!r}, "
                f"got no attribute {part!r}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"attention: expected {spec!r} to be a function, got a "
            f"{type(found).__name__}"
        )
    return found


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords that may be passed to an attention function.

    Its first three positional parameters, query, key and value, are left out. None
    means that any keyword may be passed (it has a ``**keywords``).
    """
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
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
