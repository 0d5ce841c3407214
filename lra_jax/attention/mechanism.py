"""The registry entry of an attention mechanism."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lra_jax.errors import expected


@dataclass(frozen=True)
class Gate:
    """An additional dense projection of a layer, passed to the function by keyword.

    Attributes:
      name: the keyword.
      of: "query" or "key": the input that it is computed from, position by position.
      width: columns of each head: "head" (H), "value" (Hv), or "one", for an array
        without a last axis.
      activation: applied to the projection; a name in `lra_jax.attention.gates`.
      rank: inner width if the projection is a product of two matrices; None = one
        matrix.
      bias: initial bias; "spread" gives its sigmoid time constants from 2 to 2,000
        positions, evenly spaced in their logarithm.
      option: the projection is made only where this option of the mechanism is True;
        None = always.
    """

    name: str
    of: str = "key"
    width: str = "head"
    activation: str = "identity"
    rank: int | None = None
    bias: float | str = 0.0
    option: str | None = None


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism.

    For a function from outside this package the capabilities are None: unknown.

    Attributes:
      name: as in ``--attention``.
      module: the module that holds its functions.
      causal: has an autoregressive form.
      cross: query and key may differ in length.
      stream: has ``<name>_init``, ``<name>_prefill`` and ``<name>_step``, with a state
        of constant size.
      packed: computes the documents of a packed row (``segment_ids``) in one pass;
        otherwise one by one, each at the cost of the whole row.
      kernels: the kinds of devices for which it has kernels, of "cpu", "gpu" (Hopper)
        and "tpu", selected by its ``implementation`` argument.
      sharded: name of the function that computes one device's slice when a sequence is
        split over devices; None = it cannot be split.
      rotary: its scores are inner products of queries and keys, so rotary positions
        work with it.
      cost: leading term of the running time, in T, S, H and the mechanism's own sizes.
      summary: one line.
      source: the paper.
      parameters: the function that creates its parameter arrays, or that function's
        name; None if it has none.
      buffers: which of those arrays are fixed, not trained.
      projections: which of a layer's dense projections it uses. Without "query" or
        "key" it ignores that argument; without "value" it gets the layer's input
        unprojected, and without "out" its output is the layer's output.
      activation: applied to queries, keys and values after their projections; a name in
        `lra_jax.attention.gates`.
      gates: additional projections of the layer.
      layout: name of the function that computes the widths of a layer's heads from the
        width of its input; None = the layer chooses them.
      mlp: False if a layer does the MLP's work too. A block of a model then has a
        second such layer in place of the MLP.
      memory: name of the function that takes a ``memory`` and returns, besides the
        output, the input to the next layer's memory; None = it has no memory.
      function: the function itself, if it is from outside this package.
      make: a class or factory of modules (``nnx.Module``) from outside, instead of a
        function. Each layer creates its own module, passing those of ``num_heads``,
        ``head_dim``, ``max_length``, ``layer``, ``num_layers`` and ``rngs`` that the
        factory accepts, and calls it as a function.
    """

    name: str
    module: str = ""
    causal: bool | None = None
    cross: bool | None = None
    stream: bool | None = None
    packed: bool = False
    kernels: tuple[str, ...] = ()
    sharded: str | None = None
    rotary: bool = False
    cost: str = "unknown"
    summary: str = ""
    source: str = ""
    parameters: str | Callable[..., Any] | None = None
    buffers: tuple[str, ...] = ()
    projections: tuple[str, ...] = ("query", "key", "value", "out")
    activation: str = "identity"
    gates: tuple[Gate, ...] = ()
    layout: str | None = None
    mlp: bool = True
    memory: str | None = None
    function: Callable[..., Any] | None = None
    make: Callable[..., Any] | None = None

    def gates_with(self, options: Mapping[str, Any]) -> tuple[Gate, ...]:
        """The gates that a layer with these options has."""
        return tuple(
            gate
            for gate in self.gates
            if gate.option is None or options.get(gate.option)
        )

    @property
    def attention(self) -> Callable[..., Any]:
        """``<name>_attention``, or the function of the entry; imports it if necessary.

        Raises:
          ValueError: there is none: it is a module, which only a layer can call.
        """
        if self.make is not None:
            needed = "a function, where no layer makes a module"
            raise expected("attention", needed, f"the module {self.name!r}")
        if self.function is not None:
            return self.function
        return self._find(f"{self.name}_attention")

    @property
    def weights(self) -> Callable[..., Any]:
        """``<name>_weights``, the dense `[B, N, T, S]` form.

        Raises:
          ValueError: it has none, like a function from outside that defines no weights.
        """
        weights = self.find("weights")
        if weights is None:
            needed = "a registered mechanism, or NAME_weights, for its dense weights"
            raise expected("attention", needed, f"{self.name!r}")
        return weights

    def find(self, part: str) -> Callable[..., Any] | None:
        """``<name>_<part>``, such as ``<name>_prefill``; None if there is none."""
        if self.make is not None:
            return None
        if self.function is not None:
            return beside(self.function, part)
        home = importlib.import_module(self.module)
        return getattr(home, f"{self.name}_{part}", None)

    @property
    def foreign(self) -> bool:
        """Whether it is from outside this package."""
        return not self.module.startswith("lra_jax.")

    @property
    def make_parameters(self) -> Callable[..., dict[str, Any]] | None:
        """The function that creates its parameter arrays; None if it has none."""
        return None if self.parameters is None else self._find(self.parameters)

    @property
    def make_layout(self) -> Callable[..., Any] | None:
        """The function that computes its head widths; None if a layer chooses them."""
        return None if self.layout is None else self._find(self.layout)

    @property
    def with_memory(self) -> Callable[..., Any] | None:
        """The function that takes a memory; None if it has none."""
        return None if self.memory is None else self._find(self.memory)

    @property
    def slice_attention(self) -> Callable[..., Any] | None:
        """The function for one device's slice of a sequence; None if it has none."""
        return None if self.sharded is None else self._find(self.sharded)

    def _find(self, name: str | Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(name, str):
            return name
        home = importlib.import_module(self.module) if self.module else None
        if not hasattr(home, name):
            raise expected("attention", f"{name} in the module {self.module!r}", "none")
        return getattr(home, name)


def beside(function: Callable[..., Any], part: str) -> Callable[..., Any] | None:
    """``NAME_part`` from the module that defines the function ``NAME_attention``."""
    function = inspect.unwrap(function)
    stem = getattr(function, "__name__", "").removesuffix("_attention")
    return getattr(function, "__globals__", {}).get(f"{stem}_{part}")
