"""Multi-head attention around any mechanism of ``lra_jax.attention``."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention import gates, packed
from lra_jax.attention.inputs import check_shape, layout, match_heads
from lra_jax.attention.masking import check_mask
from lra_jax.errors import a_thing, expected
from lra_jax.models import stream
from lra_jax.models.config import AttentionConfig, make_config
from lra_jax.models.gates import GateLayer
from lra_jax.models.intermediates import sow
from lra_jax.models.layers import Dense, HeadNorm, LayerNorm, rotate
from lra_jax.models.options import named
from lra_jax.models.short_conv import ShortConv
from lra_jax.models.stream import LayerState


class Buffer(nnx.Variable):
    """An array that belongs to a model but is not trained, such as random features.

    It is saved and restored with the parameters, but the optimiser never sees it.
    """


class MultiHeadAttention(nnx.Module):
    """Projects to heads, applies a mechanism, and projects back.

    ``out = W_o concat_n(attention(W_q x, W_k y, W_v y)_n)``, with y = x for
    self-attention. As declared in the registry, some mechanisms do without some of the
    projections, add gates, or prescribe their own widths: a gated attention unit has
    one head, whatever ``num_heads`` and ``qkv_features`` are.

    Args:
      num_heads, in_features, **settings: the fields of `AttentionConfig`; with
        ``config``, they override its values.
      config: the settings.
      rngs: for initialisation (Glorot uniform, zero biases).

    Raises:
      ValueError: see `AttentionConfig`.

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
        num_heads: int | None = None,
        in_features: int | None = None,
        *,
        config: AttentionConfig | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        sizes = {"num_heads": num_heads, "in_features": in_features}
        settings |= {name: size for name, size in sizes.items() if size is not None}
        config = make_config(AttentionConfig, config, settings)
        self.config = config
        self.mechanism = config.mechanism
        self.num_heads, self.head_dim, self.value_dim = config.widths
        self.num_kv_heads = config.num_kv_heads or self.num_heads
        width, columns = config.in_features, self._columns()
        value_width = self.num_heads * self.value_dim
        dense: dict[str, Any] = {"use_bias": config.use_bias, "dtype": config.dtype}
        dense |= {"kernel_init": nnx.initializers.xavier_uniform(), "rngs": rngs}

        def project(used: bool, *sizes: int) -> Any:
            return Dense(*sizes, **dense) if used else None

        self.query = project("query" in self.projections, width, columns["query"])
        self.key = project("key" in self.projections, width, columns["key"])
        self.value = project("value" in self.projections, width, columns["value"])
        out_features = config.out_features or width
        self.out = project("out" in self.projections, value_width, out_features)
        self.convs = nnx.Dict(self._convolutions(rngs))
        adds = config.adds_gate
        # One assignment each: an attribute first set to None cannot become a layer.
        self.out_norm = HeadNorm(self.num_heads, self.value_dim) if adds else None
        self.out_gate = project(adds, width, value_width)
        self.gates = nnx.Dict(self._gates(rngs))
        takes = config.carries_memory and config.layer > 0
        gives = config.carries_memory and config.layer < config.num_layers - 1
        self.memory_in = project(takes, width, columns["query"])
        self.memory_out = project(gives, value_width, width)
        self.memory_norm: Any = LayerNorm(width, dtype=config.dtype) if gives else None
        self.parameters = nnx.Dict(self._parameters(rngs))
        self.module: Any = config.make_module(rngs)

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
        return self.attend(
            inputs,
            context,
            mask=mask,
            query_mask=query_mask,
            segment_ids=segment_ids,
            parameters=parameters,
        )[0]

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
        keywords = dict(self.config.keywords)
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
        mask, query_mask = (
            packed.hide_padding(mask, rows),
            packed.hide_padding(query_mask, rows),
        )
        query, key, value = self._project(inputs, context, query_mask, mask, rows)
        arrays = self._masks(mask, query_mask)
        if segment_ids is not None:
            arrays["segment_ids"] = segment_ids
        arrays |= self._own_arrays(inputs, context, parameters)
        if memory is not None:
            arrays = self._add_memory(arrays, memory, inputs)
        sow(self, queries=query, keys=key, values=value, keywords=arrays)
        keywords = arrays | keywords
        out = self._called(query, key, value, keywords)
        self._check_output(out, *query.shape[:3], self.value_dim)
        with_memory = self.mechanism.with_memory
        if self.memory_out is not None and with_memory is not None:
            # Under jit, the steps that both calls share are computed once.
            _, summary = with_memory(query, key, value, **keywords)
            memory = self._carried(memory, summary)
        return self.finish(out, value, inputs), memory

    def _project(
        self,
        inputs: jax.Array,
        context: jax.Array,
        query_mask: jax.Array | None,
        mask: jax.Array | None,
        rows: packed.Packed | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of the inputs, keys and values of the context, rotated."""
        label = None if rows is None else rows.label
        value = self._heads("value", context, self.value_dim, mask, label)
        query = self._queries("query", inputs, query_mask, label)
        key = self._queries("key", context, mask, label)
        if self.config.rotary:
            # From each document's start: not every mechanism sees only differences.
            places = None if rows is None else rows.position
            query, key = rotate(query, places), rotate(key, places)
        return query, key, value

    def _masks(
        self, mask: jax.Array | None, query_mask: jax.Array | None
    ) -> dict[str, Any]:
        """Those that the mechanism takes, in its form."""
        if mask is not None and not self.config.accepts("mask"):
            name = self.mechanism.name
            words = f"attention {name!r} takes no mask, and attends to padding"
            warnings.warn(words, stacklevel=4)
        masks = {
            "mask": None if mask is None else mask[:, None, None, :],
            "query_mask": query_mask,
        }
        return {name: x for name, x in masks.items() if self.config.accepts(name)}

    def _add_memory(
        self, arrays: dict[str, Any], memory: jax.Array, inputs: jax.Array
    ) -> dict[str, Any]:
        """The mechanism's arrays, its memory with the previous layer's added."""
        sizes = inputs.shape[0], None, self.config.in_features
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

    def _called(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        keywords: Mapping[str, Any],
    ) -> Any:
        """The mechanism's output; errors in a user's code get a note of all shapes."""
        try:
            return self.function(query, key, value, **keywords)
        except Exception as error:
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

        Args:
          batch_size: B.
          dtype: dtype of the inputs to come.

        Raises:
          ValueError: the layer cannot be streamed: it is not causal, or its mechanism
            has no stream. The two methods below raise it too.
        """
        return stream.init_state(self, batch_size, dtype)

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
        return stream.step(self, state, inputs)

    def project(
        self, inputs: jax.Array, mask: jax.Array, skip: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
        """Queries, keys and values of inputs `[B, S + T, D]`, and all other keywords.

        The first S positions (``skip``) serve only as context for the convolutions and
        are left out of the result. Rotation is not applied yet.
        """
        value = self._heads("value", inputs, self.value_dim, mask, None)[:, skip:]
        query, key = (
            self._queries(name, inputs, mask, None)[:, skip:]
            for name in ("query", "key")
        )
        inputs = inputs[:, skip:]
        arrays = self._own_arrays(inputs, inputs, None)
        return query, key, value, arrays | self.config.keywords

    def finish(self, out: jax.Array, value: jax.Array, inputs: jax.Array) -> jax.Array:
        """`[B, T, out_features]` from the mechanism's output, the values and inputs."""
        if self.config.local_values:
            out = out + match_heads(value, self.num_heads)
        if self.out_norm is not None:
            out = self.out_norm(out)
        out = out.reshape(*out.shape[:-2], -1)
        if self.out_gate is not None:
            out = out * jax.nn.silu(self.out_gate(inputs))
        return out if self.out is None else self.out(out)

    def _queries(
        self,
        name: str,
        inputs: jax.Array,
        mask: jax.Array | None,
        label: jax.Array | None,
    ) -> jax.Array:
        """Queries or keys, `[B, T, N, H]`."""
        if name in self.projections:
            return self._heads(name, inputs, self.head_dim, mask, label)
        # An argument without a projection is not read: any array of its shape will do.
        unread = jnp.zeros((), inputs.dtype)
        return jnp.broadcast_to(
            unread, (*inputs.shape[:2], self.num_heads, self.head_dim)
        )

    def _own_arrays(
        self,
        inputs: jax.Array,
        context: jax.Array,
        parameters: Mapping[str, nnx.Variable] | None,
    ) -> dict[str, jax.Array]:
        """The gates and the mechanism's own arrays."""
        arrays = {
            gate.name: self.gates[gate.name](inputs if gate.of == "query" else context)
            for gate in self.config.gates
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
        width = self.config.in_features
        check_shape("inputs", inputs, "B T D", None, None, width)
        if context is not None:
            check_shape("context", context, "B S D", inputs.shape[0], None, width)
            reason = ""
            if self.mechanism.cross is False:
                reason = f", because {self.mechanism.name!r} has no cross form"
            elif self.config.local_values or self.config.rotary:
                reason = " with local_values or rotary"
            if reason:
                raise expected("context", f"None{reason}", "an array")
        if segment_ids is None:
            return None
        problem = None
        if context is not None:
            problem = "with a context"
        elif self.memory_in is not None or self.memory_out is not None:
            problem = "where a memory of the whole row is passed from layer to layer"
        elif not self.config.accepts("segment_ids"):
            problem = f"because {self.mechanism.name!r} does not take it"
        elif self.config.conv_grid is not None:
            problem = "where convolutions are over images"
        if problem is not None:
            raise expected("segment_ids", f"None {problem}", "an array")
        return packed.documents(segment_ids, inputs, inputs)

    def _check_mask(
        self, name: str, axes: str, mask: Any, rows: jax.Array
    ) -> jax.Array | None:
        """A mask as boolean `[1 or B, S]`."""
        batch, length, _ = rows.shape
        if np.ndim(mask) == 4 and mask.shape[1:3] == (1, 1):
            mask = mask.reshape(mask.shape[0], mask.shape[3])
        return check_mask(name, mask, axes, {1, batch}, length)

    def _check_output(self, out: Any, *shape: int) -> None:
        """Mainly for a user's function: `[B, 1, N, Hv]` would broadcast."""
        name = f"output of attention {self.mechanism.name!r}"
        if not hasattr(out, "shape"):
            needed = layout("B T N Hv", *shape)
            raise expected(name, needed, a_thing(out))
        check_shape(name, out, "B T N Hv", *shape)

    def _carried(self, memory: jax.Array | None, summary: jax.Array) -> jax.Array:
        """``norm(memory + W_o summary)``; without a memory, ``norm(W_o summary)``."""
        added = self.memory_out(summary.reshape(*summary.shape[:-2], -1))
        return self.memory_norm(added if memory is None else memory + added)

    @property
    def projections(self) -> tuple[str, ...]:
        """The dense projections that the mechanism uses."""
        return self.mechanism.projections

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
        if name in self.projections:
            out = getattr(self, name)(inputs)
            activation = self.mechanism.activation
            if name in self.convs:
                out = self.convs[name](out, mask, label)
                activation = "silu" if activation == "identity" else activation
            out = gates.activate(activation, out)
        heads = self.num_heads if name == "query" else self.num_kv_heads
        return out.reshape(*out.shape[:-1], heads, width)

    def _columns(self) -> dict[str, int]:
        """Columns of the queries, keys and values of all heads."""
        return {
            "query": self.num_heads * self.head_dim,
            "key": self.num_kv_heads * self.head_dim,
            "value": self.num_kv_heads * self.value_dim,
        }

    def _convolutions(self, rngs: nnx.Rngs) -> dict[str, ShortConv]:
        """One for each projection, if convolutions are enabled."""
        size, is_causal = self.config.short_conv, self.config.is_causal
        grid = self.config.conv_grid
        if not size:
            return {}
        return {
            name: ShortConv(width, size, is_causal=is_causal, grid=grid, rngs=rngs)
            for name, width in self._columns().items()
            if name in self.projections
        }

    def _gates(self, rngs: nnx.Rngs) -> dict[str, GateLayer]:
        widths = {"head": self.head_dim, "value": self.value_dim}
        sizes = self.config.in_features, self.num_heads, widths
        dtype = self.config.dtype
        return {
            gate.name: GateLayer(gate, *sizes, dtype=dtype, rngs=rngs)
            for gate in self.config.gates
        }

    def _parameters(self, rngs: nnx.Rngs) -> dict[str, nnx.Variable]:
        """The mechanism's own arrays."""
        make = self.mechanism.make_parameters
        if make is None or not self.config.own_parameters:
            return {}
        known = self.config.offered | {"dtype": jnp.float32}
        taken = {name: x for name, x in known.items() if name in named(make)}
        arrays = make(rngs.params(), **taken, **self.config.parameter_options)
        buffers = self.mechanism.buffers
        return {
            name: Buffer(array) if name in buffers else nnx.Param(array)
            for name, array in arrays.items()
        }
