"""The entry of a mechanism of attention in the registry."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lra_jax.errors import expected


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
      parameters: the function that makes its own arrays, if it has any, or its name.
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
      make: a class or factory of modules (``nnx.Module``) from outside, in place of a
        function. Each layer makes one of its own, with those of ``num_heads``,
        ``head_dim``, ``max_length``, ``layer``, ``num_layers`` and ``rngs`` that it
        takes, and calls it as a function.
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
    parameters: str | Callable[..., Any] | None = None
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
    make: Callable[..., Any] | None = None

    @property
    def attention(self) -> Callable[..., Any]:
        """``<name>_attention``, or the function given; imports it if need be.

        Raises:
          ValueError: there is none, as for modules, which only a layer calls.
        """
        if self.make is not None:
            wanted = "a function, where no layer makes a module"
            raise expected("attention", wanted, f"the module {self.name!r}")
        if self.function is not None:
            return self.function
        return self._find(f"{self.name}_attention")

    @property
    def weights(self) -> Callable[..., Any]:
        """``<name>_weights``, the dense `[B, N, T, S]` form.

        Raises:
          ValueError: it has none, as a function from outside without it.
        """
        found = self.find_weights()
        if found is None:
            wanted = "a registered mechanism, or NAME_weights, for its dense weights"
            raise expected("attention", wanted, f"{self.name!r}")
        return found

    def find_weights(self) -> Callable[..., Any] | None:
        """As ``weights``; None if there is no such function."""
        if self.make is not None:
            return None
        if self.function is None:
            home = importlib.import_module(self.module)
            return getattr(home, f"{self.name}_weights", None)
        return beside(self.function, "weights")

    @property
    def foreign(self) -> bool:
        """Whether it is from outside this package."""
        return not self.module.startswith("lra_jax.")

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

    def _find(self, name: str | Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(name, str):
            return name
        home = importlib.import_module(self.module) if self.module else None
        if not hasattr(home, name):
            raise expected("attention", f"{name} in the module {self.module!r}", "none")
        return getattr(home, name)


def beside(function: Callable[..., Any], part: str) -> Callable[..., Any] | None:
    """``NAME_part``, where it is beside a function ``NAME_attention``."""
    stem = getattr(function, "__name__", "").removesuffix("_attention")
    return getattr(function, "__globals__", {}).get(f"{stem}_{part}")
