"""Multi-head attention around any mechanism of ``lra_jax.attention``."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import gates, outside, packed, registry
from lra_jax.attention.inputs import (
    Grid,
    check_flag,
    check_float,
    check_shape,
    check_sides,
    check_size,
    match_heads,
)
from lra_jax.attention.masking import check_mask
from lra_jax.errors import a_thing, expected
from lra_jax.models import stream
from lra_jax.models.gates import GateLayer
from lra_jax.models.intermediates import sow
from lra_jax.models.layers import Dense, HeadNorm, LayerNorm, check_even, rotate
from lra_jax.models.options import Options, keyword_names, split_options
from lra_jax.models.short_conv import ShortConv
from lra_jax.models.stream import LayerState


class Buffer(nnx.Variable):
    """An array that belongs to a model but is not trained, such as random features.

    It is saved and restored with the parameters, but the optimizer never sees it.
    """


class MultiHeadAttention(nnx.Module):
    """Projects to heads, applies a mechanism, and projects back.

    ``out = W_o concat_n(attention(W_q x, W_k y, W_v y)_n)``, with y = x for
    self-attention. As declared in the registry, some mechanisms do without some of the
    projections, add gates, or prescribe their own widths: a gated attention unit has
    one head, whatever ``num_heads`` and ``qkv_features`` are.

    Args:
      num_heads: number of heads N; must divide ``qkv_features``.
      in_features: width D of the inputs.
      mechanism: a registered name (``python -m lra_jax.attention`` lists them), a
        function ``(query, key, value, ...)`` of `[B, T, N, H]` arrays, a class or
        factory of an ``nnx.Module`` that is called in the same way, or anything else
        that `lra_jax.attention.resolve` accepts. A function gets those of the keywords
        mask (`[B, 1, 1, S]`), query_mask, max_length and is_causal that it takes.
      options: further keywords of the mechanism, as in ``{"clip": None}``, or of its
        arrays, as in ``{"features": 128}`` for Linformer.
      qkv_features: total width N * H of all heads; None = D.
      num_kv_heads: heads of keys and values, each shared by an equal number of adjacent
        query heads; None = N. 1 is multi-query attention.
      out_features: width of the output; None = D.
      max_length: longest sequence. It is cosFormer's M (a fixed M makes the output
        independent of padding) and the width of Linformer's projections (required).
      is_causal: let each position see only itself and those before it.
      short_conv: size of a depthwise convolution on queries, keys and values, followed
        by silu; centred, or looking back if ``is_causal``; 0 = none.
      conv_grid: rows and columns of images; the convolution is then over squares of
        ``short_conv`` by ``short_conv`` pixels. None = over the sequence.
      gate: normalise each head of the output (RMS, with a learned gain) and multiply it
        by ``silu(W_g x + b_g)``; mechanisms that have an output gate keep their own.
      local_values: add the values to the output: a path for local detail (Han et al.
        2023, arXiv:2308.00442).
      rotary: rotate queries and keys by their positions (RoPE, arXiv:2104.09864), for
        self-attention. Where scores are inner products of queries and keys (softmax,
        windows, patterns) they depend only on the difference of positions. A mechanism
        that first applies a feature map to queries and keys sees rotated vectors, which
        encode positions, but not only through their differences. Deviation: column pair
        c turns by 10000^(-c / (H/2 - 1)) per position, as in retention, where RoPE has
        10000^(-2c / H).
      use_bias: biases in the four projections.
      dtype: dtype of the computation; parameters are float32.
      layer: index of the layer in its model, from 0. A mechanism's initial arrays may
        depend on it, and on ``num_layers``. In a mechanism with a memory, such as Luna,
        all but the first layer take that of the previous layer, and all but the last
        give one (`attend`), unless they are causal.
      num_layers: number of layers of the model.
      own_parameters: False for a layer that uses another layer's arrays for its
        mechanism (layerwise sharing); then every call needs ``parameters``.
      rngs: for initialisation (Glorot uniform, zero biases).

    Raises:
      ValueError: a size below 1, heads that do not divide the width, an unknown
        mechanism or option, ``is_causal`` with a mechanism that has no causal form, or
        ``rotary`` with a mechanism without queries and keys.

    Examples:
      >>> layer = MultiHeadAttention(
      ...     4, 64, mechanism="linear", is_causal=True, rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 128, 64))).shape
      (2, 128, 64)

      Position by position, with a state of constant size:

      >>> out, state = layer.prefill(jnp.ones((2, 128, 64)))
      >>> out, state = layer.step(state, jnp.ones((2, 64)))
      >>> out.shape
      (2, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        mechanism: Any = "cosformer",
        options: Mapping[str, Any] | None = None,
        qkv_features: int | None = None,
        num_kv_heads: int | None = None,
        out_features: int | None = None,
        max_length: int | None = None,
        is_causal: bool = False,
        short_conv: int = 0,
        conv_grid: Grid = None,
        gate: bool = False,
        local_values: bool = False,
        rotary: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        layer: int = 0,
        num_layers: int = 1,
        own_parameters: bool = True,
        rngs: nnx.Rngs,
    ):
        self.mechanism = registry.resolve(mechanism, "mechanism")
        self.projections = self.mechanism.projections
        self.in_features = check_size("in_features", in_features)
        self.max_length, self.dtype = max_length, dtype
        self.own_parameters = own_parameters
        flags = {"is_causal": is_causal, "gate": gate, "local_values": local_values}
        for name, flag in (flags | {"rotary": rotary, "use_bias": use_bias}).items():
            check_flag(name, flag)
        self.is_causal, self.rotary = is_causal, rotary
        self.local_values = local_values
        self.short_conv = check_size("short_conv", short_conv, 0)
        if conv_grid is not None:
            check_sides("conv_grid", conv_grid)
        self.conv_grid = conv_grid
        options = dict(options or ())
        of_parameters, of_function = split_options(self.mechanism, options)
        self.function_options = Options(tuple(of_function.items()))
        self._set_widths(num_heads, num_kv_heads, qkv_features, options)
        out_features = in_features if out_features is None else out_features
        check_size("out_features", out_features)
        self._make_layers(out_features, use_bias, gate, rngs)
        self.gates = nnx.Dict(self._gates(options, rngs))
        self._make_memory(layer, num_layers, use_bias, rngs)
        offered = {
            "max_length": max_length,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "layer": layer,
            "num_layers": num_layers,
            **of_parameters,
        }
        self.parameters = nnx.Dict(self._parameters(offered, rngs))
        self.module: Any = self._make_module(offered, rngs)
        self.accepted = registry.accepted_keywords(self.function)
        self._check(out_features)

    def _set_widths(
        self,
        num_heads: int,
        num_kv_heads: int | None,
        qkv_features: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """The widths that the mechanism prescribes, or those asked for."""
        width = self.in_features if qkv_features is None else qkv_features
        check_size("num_heads", num_heads)
        if check_size("qkv_features", width) % num_heads:
            needed = f"a divisor of qkv_features={width}"
            raise expected("num_heads", needed, num_heads)
        heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % check_size("num_kv_heads", heads):
            needed = f"a divisor of num_heads={num_heads}"
            raise expected("num_kv_heads", needed, num_kv_heads)
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.value_dim = self.head_dim
        make = self.mechanism.make_layout
        if make is not None:
            layout = make(self.in_features, **_taken_by(make, options))
            self.num_heads, self.head_dim, self.value_dim = layout
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads

    def _make_layers(
        self, out_features: int, use_bias: bool, gate: bool, rngs: nnx.Rngs
    ) -> None:
        """The projections that the mechanism uses, convolutions and an output gate."""
        widths = {
            "query": self.num_heads * self.head_dim,
            "key": self.num_kv_heads * self.head_dim,
            "value": self.num_kv_heads * self.value_dim,
        }
        values = self.num_heads * self.value_dim
        project = self._projector(use_bias, rngs)
        for name, width in widths.items():
            setattr(self, name, project(name in self.projections, width))
        self.out = project("out" in self.projections, out_features, values)
        form: dict[str, Any] = {"is_causal": self.is_causal, "grid": self.conv_grid}
        convs = {
            name: ShortConv(width, self.short_conv, **form, rngs=rngs)
            for name, width in widths.items()
            if self.short_conv and name in self.projections
        }
        self.convs = nnx.Dict(convs)
        adds = gate and all(one.name != "gate" for one in self.mechanism.gates)
        # One assignment each: an attribute first set to None cannot become a layer.
        self.out_norm = HeadNorm(self.num_heads, self.value_dim) if adds else None
        self.out_gate = project(adds, values)

    def _make_memory(
        self, layer: int, num_layers: int, use_bias: bool, rngs: nnx.Rngs
    ) -> None:
        """The layers that take the previous layer's memory, and make the next one's."""
        carries = self.mechanism.memory is not None and not self.is_causal
        gives = carries and layer < num_layers - 1
        heads, width = self.num_heads, self.in_features
        project = self._projector(use_bias, rngs)
        self.memory_in = project(carries and layer > 0, heads * self.head_dim)
        self.memory_out = project(gives, width, heads * self.value_dim)
        self.memory_norm: Any = LayerNorm(width, dtype=self.dtype) if gives else None

    def _projector(self, use_bias: bool, rngs: nnx.Rngs) -> Callable[..., Any]:
        """Makes a dense layer of a width, or None, if it is not used."""
        init = nnx.initializers.xavier_uniform()
        more: dict[str, Any] = {"use_bias": use_bias, "kernel_init": init, "rngs": rngs}

        def project(used: bool, width: int, inputs: int = self.in_features) -> Any:
            return Dense(inputs, width, dtype=self.dtype, **more) if used else None

        return project

    def _check(self, out_features: int) -> None:
        """Refuses what the mechanism cannot do or would ignore."""
        name = repr(self.mechanism.name)
        causal = self.mechanism.causal is not False and self.accepts("is_causal")
        if self.is_causal and not causal:
            needed = "one with a causal form, for is_causal=True"
            raise expected("mechanism", needed, name)
        if self.is_causal and self.conv_grid is not None:
            raise expected("conv_grid", "None with is_causal=True", self.conv_grid)
        free = self.mechanism.layout is None and {"key", "value"} <= {*self.projections}
        if self.num_kv_heads != self.num_heads and not free:
            needed = f"None for {name}, which has its own heads"
            raise expected("num_kv_heads", needed, self.num_kv_heads)
        if self.rotary:
            if not {"query", "key"} <= {*self.projections}:
                needed = "a mechanism that has queries and keys to rotate"
                raise expected("rotary", needed, name)
            check_even("rotary", self.head_dim, "head width H")
        # Without a projection, that end of the layer is as wide as the heads.
        width = self.num_heads * self.value_dim
        for end, features in {"value": self.in_features, "out": out_features}.items():
            if end not in self.projections and features != width:
                reason = f"because {name} has no projection {end!r}"
                raise expected("qkv_features", f"{features}, {reason}", width)

    def _make_module(self, offered: Mapping[str, Any], rngs: nnx.Rngs) -> Any:
        """The module, if the mechanism is a user's module, else None."""
        make = self.mechanism.make
        if make is None:
            return None
        sizes = _taken_by(make, {**offered, "rngs": rngs})
        module = make(**sizes)
        if not isinstance(module, nnx.Module) or not callable(module):
            needed = f"{self.mechanism.name!r} to make an nnx.Module with a __call__"
            raise expected("attention", needed, a_thing(module))
        outside.check_call(module, self.mechanism.name)
        return module

    def _gates(
        self, options: Mapping[str, Any], rngs: nnx.Rngs
    ) -> dict[str, GateLayer]:
        widths = {"head": self.head_dim, "value": self.value_dim}
        sizes = self.in_features, self.num_heads, widths
        return {
            gate.name: GateLayer(gate, *sizes, dtype=self.dtype, rngs=rngs)
            for gate in self.mechanism.gates_with(options)
        }

    def _parameters(
        self, offered: Mapping[str, Any], rngs: nnx.Rngs
    ) -> dict[str, nnx.Variable]:
        """The mechanism's own arrays."""
        make = self.mechanism.make_parameters
        if make is None or not self.own_parameters:
            return {}
        sizes = _taken_by(make, {**offered, "dtype": jnp.float32})
        arrays = make(rngs.params(), **sizes)
        buffers = self.mechanism.buffers
        return {
            name: Buffer(array) if name in buffers else nnx.Param(array)
            for name, array in arrays.items()
        }

    @property
    def keywords(self) -> dict[str, Any]:
        """The non-array keywords of every call of the mechanism."""
        both = {"max_length": self.max_length, "is_causal": self.is_causal}
        taken = {name: x for name, x in both.items() if self.accepts(name)}
        return taken | dict(self.function_options.pairs)

    def accepts(self, keyword: str) -> bool:
        """Whether the mechanism's function takes this keyword."""
        return self.accepted is None or keyword in self.accepted

    def __call__(
        self,
        inputs: jax.Array,
        context: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        query_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Attends from ``inputs`` to ``context``, or to the inputs themselves.

        Args:
          inputs: `[B, T, in_features]`.
          context: `[B, S, in_features]`; None for self-attention.
          mask: boolean `[B, S]` or `[B, 1, 1, S]`, True = a real position of the
            context.
          query_mask: boolean `[B, T]`, the same for the inputs; in self-attention it
            defaults to ``mask``.
          segment_ids: integers `[B, T]`, for self-attention within each document of a
            packed row: `lra_jax.attention.packed`.
          parameters: arrays to use in place of this layer's own for the mechanism, such
            as another layer's ``parameters``.
          rngs: ignored, as there is no dropout here; it lets a layer take the place of
            an MLP.

        Returns:
          `[B, T, out_features]`. Rows of padded queries are not meaningful.

        Raises:
          ValueError: an array of the wrong shape, passed in or returned by a user's
            function, or packed documents or a context where they are not supported.
        """
        rows = {"mask": mask, "query_mask": query_mask, "segment_ids": segment_ids}
        return self.attend(inputs, context, **rows, parameters=parameters)[0]

    def attend(
        self,
        inputs: jax.Array,
        context: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        query_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
        memory: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Attends as a call does, with a memory passed from the previous layer to the
        next.

        Args:
          inputs, context, mask, query_mask, segment_ids, parameters: as in a call.
          memory: `[B, L, in_features]`, for a layer that takes one.

        Returns:
          The output, and the memory to pass on: ``memory`` itself if the layer produces
          none.
        """
        rows = self._check_rows(inputs, context, segment_ids)
        keywords = self.keywords
        if context is None:
            context = inputs
            query_mask = mask if query_mask is None else query_mask
        else:
            # Functions would take equal lengths for self-attention.
            if query_mask is None:
                query_mask = jnp.ones(inputs.shape[:2], bool)
            if keywords.get("max_length", 1) is None:
                keywords["max_length"] = max(inputs.shape[1], context.shape[1])
        mask = self._check_mask("mask", "B S", mask, context)
        query_mask = self._check_mask("query_mask", "B T", query_mask, inputs)
        mask, query_mask = (packed.real_positions(x, rows) for x in (mask, query_mask))
        label, places = (None, None) if rows is None else (rows.label, rows.position)
        query, key, value = self.project(inputs, context, query_mask, mask, label)
        if self.rotary:
            # From each document's start: some mechanisms see more than differences.
            query, key = rotate(query, places), rotate(key, places)
        arrays = self._masks(mask, query_mask)
        if segment_ids is not None:
            arrays["segment_ids"] = segment_ids
        arrays |= self.make_arrays(inputs, context, parameters)
        if memory is not None:
            arrays = self._add_memory(arrays, memory, inputs)
        sow(self, queries=query, keys=key, values=value, keywords=arrays)
        keywords = arrays | keywords
        out = self._call(query, key, value, keywords)
        with_memory = self.mechanism.with_memory
        if self.memory_out is not None and with_memory is not None:
            # Under jit, the steps that both calls share are computed once.
            _, summary = with_memory(query, key, value, **keywords)
            memory = self._carry(memory, summary)
        return self.finish(out, value, inputs), memory

    def _masks(
        self, mask: jax.Array | None, query_mask: jax.Array | None
    ) -> dict[str, Any]:
        """The masks that the mechanism takes, in its form."""
        if mask is not None and not self.accepts("mask"):
            name = self.mechanism.name
            words = f"attention {name!r} takes no mask, and attends to padding"
            warnings.warn(words, stacklevel=4)
        masks = {
            "mask": None if mask is None else mask[:, None, None, :],
            "query_mask": query_mask,
        }
        return {name: x for name, x in masks.items() if self.accepts(name)}

    def _add_memory(
        self, arrays: dict[str, Any], memory: jax.Array, inputs: jax.Array
    ) -> dict[str, Any]:
        """The mechanism's arrays, its memory with the previous layer's added."""
        sizes = inputs.shape[0], None, self.in_features
        check_shape("memory", memory, "B L D", *sizes)
        if self.memory_in is None:
            return arrays
        added = self.memory_in(memory).astype(arrays["memory"].dtype)
        added = added.reshape(*added.shape[:-1], self.num_heads, self.head_dim)
        return arrays | {"memory": arrays["memory"] + added}

    @property
    def function(self) -> Callable[..., Any]:
        """The mechanism's function, or this layer's instance of a user's module."""
        return self.mechanism.attention if self.module is None else self.module

    def _call(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        keywords: Mapping[str, Any],
    ) -> Any:
        """The mechanism's output; errors in a user's code get a note of all shapes."""
        try:
            return self.function(query, key, value, **keywords)
        except (Exception, SystemExit) as error:
            if self.mechanism.foreign:
                arrays = {"query": query, "key": key, "value": value, **keywords}
                shapes = ", ".join(
                    f"{name} {list(array.shape)}"
                    for name, array in arrays.items()
                    if hasattr(array, "shape")
                )
                error.add_note(f"called with {shapes}")
            raise

    def init_state(self, batch_size: int, dtype: Any = jnp.float32) -> LayerState:
        """The state of a stream before its first position.

        It equals the state after a prompt of one padded position, exactly.

        Args:
          batch_size: B.
          dtype: dtype of the inputs to come.

        Raises:
          ValueError: the layer cannot be streamed: it is not causal, or its mechanism
            has no stream. The two methods below raise it too.
        """
        shape = check_size("batch_size", batch_size), 1, self.in_features
        hidden = jnp.zeros(shape[:2], bool)
        return self.prefill(jnp.zeros(shape, dtype), mask=hidden)[1]

    def prefill(
        self,
        inputs: jax.Array,
        *,
        mask: jax.Array | None = None,
        state: LayerState | None = None,
    ) -> tuple[jax.Array, LayerState]:
        """Reads a prompt, or its next part: `lra_jax.models.stream.prefill`."""
        return stream.prefill(self, inputs, mask=mask, state=state)

    def step(
        self, state: LayerState, inputs: jax.Array
    ) -> tuple[jax.Array, LayerState]:
        """Reads one position of each sample, `[B, in_features]`."""
        check_shape("inputs", inputs, "B D", None, self.in_features)
        out, state = self.prefill(inputs[:, None], state=state)
        return out[:, 0], state

    def project(
        self,
        inputs: jax.Array,
        context: jax.Array,
        query_mask: jax.Array | None,
        mask: jax.Array | None,
        label: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of the inputs, keys and values of the context, not rotated yet.

        Args:
          inputs, context: `[B, T, D]` and `[B, S, D]`.
          query_mask, mask: `[B, T]` and `[B, S]`, True at real positions.
          label: `[B, T]`, which numbers packed documents.
        """
        return (
            self._heads("query", inputs, self.head_dim, query_mask, label),
            self._heads("key", context, self.head_dim, mask, label),
            self._heads("value", context, self.value_dim, mask, label),
        )

    def finish(self, out: jax.Array, value: jax.Array, inputs: jax.Array) -> jax.Array:
        """`[B, T, out_features]` from the mechanism's output, the values and inputs."""
        # A user's `[B, 1, N, Hv]` would broadcast, and complex numbers would be cast.
        name, shape = f"output of attention {self.mechanism.name!r}", inputs.shape[:2]
        check_shape(name, out, "B T N Hv", *shape, self.num_heads, self.value_dim)
        check_float(name, out)
        if self.local_values:
            out = out + match_heads(value, self.num_heads)
        if self.out_norm is not None:
            out = self.out_norm(out)
        out = out.reshape(*out.shape[:-2], -1)
        if self.out_gate is not None:
            out = out * jax.nn.silu(self.out_gate(inputs))
        return out if self.out is None else self.out(out)

    def make_arrays(
        self,
        inputs: jax.Array,
        context: jax.Array,
        parameters: Mapping[str, nnx.Variable] | None = None,
    ) -> dict[str, jax.Array]:
        """The gates and the mechanism's own arrays."""
        arrays = {
            gate.name: self.gates[gate.name](inputs if gate.of == "query" else context)
            for gate in self.mechanism.gates
            if gate.name in self.gates
        }
        parameters = self.parameters if parameters is None else parameters
        return arrays | {
            name: p[...]
            for name, p in parameters.items()
            if isinstance(p, nnx.Variable)  # `nnx.capture` adds a tuple to them.
        }

    def _check_rows(
        self,
        inputs: jax.Array,
        context: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> packed.Packed | None:
        """The documents of packed rows; shapes, and parts that do not go together."""
        width = self.in_features
        check_shape("inputs", inputs, "B T D", None, None, width)
        if context is not None:
            check_shape("context", context, "B S D", inputs.shape[0], None, width)
            if self.mechanism.cross is False:
                needed = f"None, because {self.mechanism.name!r} has no cross form"
                raise expected("context", needed, "an array")
            if self.local_values or self.rotary:
                needed = "None with local_values or rotary"
                raise expected("context", needed, "an array")
        if segment_ids is None:
            return None
        name = self.mechanism.name
        carries = self.memory_in is not None or self.memory_out is not None
        problems = {
            "with a context": context is not None,
            "where a memory of the whole row is passed from layer to layer": carries,
            f"because {name!r} does not take it": not self.accepts("segment_ids"),
            "where convolutions are over images": self.conv_grid is not None,
        }
        for problem in (words for words, holds in problems.items() if holds):
            raise expected("segment_ids", f"None {problem}", "an array")
        return packed.documents(segment_ids, inputs, inputs)

    def _check_mask(
        self, name: str, axes: str, mask: Any, rows: jax.Array
    ) -> jax.Array | None:
        """A mask as boolean `[1 or B, S]`."""
        batch, length, _ = rows.shape
        if getattr(mask, "ndim", 0) == 4 and mask.shape[1:3] == (1, 1):
            mask = mask.reshape(mask.shape[0], mask.shape[3])
        return check_mask(name, mask, axes, {1, batch}, length)

    def _carry(self, memory: jax.Array | None, summary: jax.Array) -> jax.Array:
        """``norm(memory + W_o summary)``; without a memory, ``norm(W_o summary)``."""
        added = self.memory_out(summary.reshape(*summary.shape[:-2], -1))
        return self.memory_norm(added if memory is None else memory + added)

    def _heads(
        self,
        name: str,
        inputs: jax.Array,
        width: int,
        mask: jax.Array | None,
        label: jax.Array | None,
    ) -> jax.Array:
        """Queries, keys or values, `[B, T, N, width]`."""
        out = inputs
        if name not in self.projections and name != "value":
            # Not read: any array of its shape will do.
            shape = *inputs.shape[:2], self.num_heads, width
            return jnp.broadcast_to(jnp.zeros_like(inputs[:, :, :1, None]), shape)
        if name in self.projections:
            out = getattr(self, name)(inputs)
            activation = self.mechanism.activation
            if name in self.convs:
                out = self.convs[name](out, mask, label)
                activation = "silu" if activation == "identity" else activation
            out = gates.activate(activation, out)
        heads = self.num_heads if name == "query" else self.num_kv_heads
        return out.reshape(*out.shape[:-1], heads, width)


def _taken_by(
    function: Callable[..., Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords that a function takes."""
    names = keyword_names(function)
    return {name: x for name, x in keywords.items() if name in names}
