"""What the library says of a mechanism. Importing this does not import jax."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
