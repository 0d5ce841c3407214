"""Multi-head attention around any mechanism of ``lra_jax.attention``."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import gates, registry
from lra_jax.models.gates import GateLayer
from lra_jax.models.layers import Dense, LayerNorm, rotated
from lra_jax.models.options import named, split_options


class Buffer(nnx.Variable):
    """An array that belongs to a model but is not trained, as random features are.

    It is saved and restored with the parameters; the optimiser never sees it.
    """


class MultiHeadAttention(nnx.Module):
    """Projects to heads, attends by a mechanism, projects back.

    ``out = W_o concat_n(attention(W_q x, W_k y, W_v y)_n)``, with y = x for
    self-attention. Mechanisms that say so in the registry do without some of the
    projections, have gates beside them, or widths of their own: a gated attention unit
    has one head, whatever ``num_heads`` and ``qkv_features`` are.

    Args:
      num_heads: heads N; must divide ``qkv_features``.
      in_features: width D of the inputs.
      qkv_features: width N * H of all heads; ``in_features`` by default.
      out_features: width of the output; ``in_features`` by default.
      mechanism: a registered name (``python -m lra_jax.attention`` lists them), a
        function ``(query, key, value, ...)`` of `[B, T, N, H]` arrays, or the string
        ``"package.module:function"``. A function gets those of the keywords mask
        (`[B, 1, 1, S]`), query_mask, max_length and is_causal that it takes.
      max_length: longest sequence: cosFormer's M, the width of Linformer's projections,
        which need it; fixing it makes cosFormer independent of padding.
      options: further keywords of the mechanism, as in ``{"clip": None}``, or of its
        parameters, as in ``{"features": 128}`` for Linformer.
      is_causal: attend to the past only.
      own_parameters: False for a layer that computes with another's arrays of the
        mechanism (layerwise sharing); then every call needs ``parameters``.
      takes_memory: the mechanism has a memory, as Luna has, and that of the layer
        before comes with every call.
      gives_memory: a layer behind takes what `attend` returns beside the output. Both
        change nothing in a mechanism without one, or in a causal layer.
      rotary: rotate queries and keys by their positions (RoPE, arXiv:2104.09864), for
        self-attention. Where scores are inner products of queries and keys (softmax,
        windows, patterns) they depend on the difference of positions alone. A mechanism
        that first maps queries and keys through a function of its own sees rotated
        vectors, which tell positions, but not as differences only.
      use_bias: biases in the four projections.
      dtype: of the computation; parameters are float32.
      rngs: for initialisation (Glorot uniform, zero biases).

    Raises:
      ValueError: heads that do not divide the width, an unknown mechanism or option, or
        ``rotary`` with an odd head width or a mechanism without queries and keys.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        qkv_features: int | None = None,
        out_features: int | None = None,
        mechanism: str | Callable[..., jax.Array] = "cosformer",
        max_length: int | None = None,
        options: Mapping[str, Any] | None = None,
        is_causal: bool = False,
        own_parameters: bool = True,
        takes_memory: bool = False,
        gives_memory: bool = False,
        rotary: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        width = in_features if qkv_features is None else qkv_features
        if num_heads < 1 or width % num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of the width {width}, got {num_heads}"
            )
        self.num_heads = num_heads
        self.max_length = max_length
        self.is_causal = is_causal
        self.mechanism = registry.resolve(mechanism)
        own, function_options = split_options(self.mechanism, dict(options or {}))
        # A tuple, so that the graph definition can be hashed.
        self.options = tuple(function_options.items())
        out_features = out_features or in_features
        self._set_widths(in_features, width, dict(options or {}))
        width, value_width = (
            self.num_heads * size for size in (self.head_dim, self.value_dim)
        )
        self._check_widths(in_features, value_width, out_features)
        self.rotary = rotary
        if rotary:
            self._check_rotary()
        dense = {"use_bias": use_bias, "dtype": dtype, "rngs": rngs}
        dense["kernel_init"] = nnx.initializers.xavier_uniform()

        def project(name: str, *sizes: int) -> Dense | None:
            return Dense(*sizes, **dense) if name in self.projections else None

        self.query = project("query", in_features, width)
        self.key = project("key", in_features, width)
        self.value = project("value", in_features, value_width)
        self.out = project("out", value_width, out_features)
        widths = {"head": self.head_dim, "value": self.value_dim}
        sizes = (in_features, self.num_heads, widths)
        self.gates = nnx.Dict(
            {
                gate.name: GateLayer(gate, *sizes, dtype=dtype, rngs=rngs)
                for gate in self.mechanism.gates
            }
        )
        carries = self.mechanism.memory is not None and not is_causal
        takes, gives = takes_memory and carries, gives_memory and carries
        self.memory_in: Any = Dense(in_features, width, **dense) if takes else None
        self.memory_out: Any = (
            Dense(value_width, in_features, **dense) if gives else None
        )
        self.memory_norm: Any = LayerNorm(in_features, dtype=dtype) if gives else None
        made = self._parameters(own, rngs) if own_parameters else {}
        self.parameters = nnx.Dict(made)

    def __call__(
        self,
        inputs: jax.Array,
        context: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        query_mask: jax.Array | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Attends from ``inputs`` to ``context``, or to themselves.

        Args:
          inputs: `[B, T, in_features]`.
          context: `[B, S, in_features]`; None for self-attention.
          mask: boolean `[B, S]`, True = a real position of the context.
          query_mask: boolean `[B, T]`, likewise of the inputs; in self-attention it is
            ``mask`` unless given.
          parameters: the mechanism's arrays in place of this layer's own, as another
            layer's ``parameters``.
          rngs: not read: there is no dropout within. A layer can so stand in the place
            of an MLP.

        Returns:
          `[B, T, out_features]`. Rows of padded queries are not meaningful.
        """
        return self.attend(
            inputs, context, mask=mask, query_mask=query_mask, parameters=parameters
        )[0]

    def attend(
        self,
        inputs: jax.Array,
        context: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        query_mask: jax.Array | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
        memory: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Attends as a call does, between a memory of the layer before and one for the
        layer behind.

        Args:
          inputs, context, mask, query_mask, parameters: as in a call.
          memory: `[B, L, in_features]`, for a layer that takes one.

        Returns:
          The output, and the memory to carry on: ``memory`` itself from a layer that
          gives none.
        """
        if context is None:
            context = inputs
            query_mask = mask if query_mask is None else query_mask
        value = self._heads(self.value, context, self.value_dim)
        # An argument without projection is not read: any array of its shape will do.
        unread = jnp.zeros((), value.dtype)
        heads = (self.num_heads, self.head_dim)
        query, key = (
            jnp.broadcast_to(unread, (*x.shape[:2], *heads))
            if layer is None
            else self._heads(layer, x, self.head_dim)
            for layer, x in ((self.query, inputs), (self.key, context))
        )
        if self.rotary:
            query, key = rotated(query), rotated(key)
        keywords: dict[str, Any] = {
            "mask": None if mask is None else mask[:, None, None, :],
            "query_mask": query_mask,
            "max_length": self.max_length,
            "is_causal": self.is_causal,
        }
        accepted = registry.accepted_keywords(self.mechanism.attention)
        if accepted is not None:
            keywords = {k: v for k, v in keywords.items() if k in accepted}
        for gate in self.mechanism.gates:
            source = inputs if gate.of == "query" else context
            keywords[gate.name] = self.gates[gate.name](source)
        parameters = self.parameters if parameters is None else parameters
        arrays = {name: p[...] for name, p in parameters.items()}
        if self.memory_in is not None and memory is not None:
            added = self.memory_in(memory).astype(arrays["memory"].dtype)
            added = added.reshape(*added.shape[:-1], self.num_heads, self.head_dim)
            arrays["memory"] = arrays["memory"] + added
        keywords |= {**arrays, **dict(self.options)}
        out = self.mechanism.attention(query, key, value, **keywords)
        with_memory = self.mechanism.with_memory
        if self.memory_out is not None and with_memory is not None:
            # Compiled, the steps that both calls have in common are one.
            _, packed = with_memory(query, key, value, **keywords)
            memory = self._carried(memory, packed)
        out = out.reshape(*out.shape[:-2], -1)
        return out if self.out is None else self.out(out), memory

    def _carried(self, memory: jax.Array | None, packed: jax.Array) -> jax.Array:
        """``norm(memory + W_o packed)``; None is no memory before."""
        added = self.memory_out(packed.reshape(*packed.shape[:-2], -1))
        return self.memory_norm(added if memory is None else memory + added)

    @property
    def projections(self) -> tuple[str, ...]:
        """The dense projections that the mechanism has a use for."""
        return self.mechanism.projections

    def _set_widths(
        self, in_features: int, width: int, options: dict[str, Any]
    ) -> None:
        """Heads, their width and that of their values."""
        make = self.mechanism.make_layout
        self.head_dim = self.value_dim = width // self.num_heads
        if make is None:
            return
        options = {name: v for name, v in options.items() if name in named(make)}
        self.num_heads, self.head_dim, self.value_dim = make(in_features, **options)

    def _check_widths(self, in_features: int, width: int, out_features: int) -> None:
        ends = {"value": in_features, "out": out_features}
        for name, features in ends.items():
            if name not in self.projections and features != width:
                raise ValueError(
                    f"qkv_features: expected {features} as outside of the heads, "
                    f"because {self.mechanism.name!r} has no projection "
                    f"{name!r}, got {width}"
                )

    def _check_rotary(self) -> None:
        if not {"query", "key"} <= set(self.projections):
            raise ValueError(
                "positions: 'rotary' turns queries and keys, of which attention "
                f"{self.mechanism.name!r} has none"
            )
        if self.head_dim % 2:
            raise ValueError(
                "positions: 'rotary' turns columns in pairs, so that the head width "
                f"must be even, got H={self.head_dim}"
            )

    def _heads(self, layer: Dense | None, inputs: jax.Array, width: int) -> jax.Array:
        out = inputs
        if layer is not None:
            out = gates.activated(self.mechanism.activation, layer(inputs))
        return out.reshape(*out.shape[:-1], self.num_heads, width)

    def _parameters(self, options: dict[str, Any], rngs: nnx.Rngs) -> dict[str, Any]:
        make = self.mechanism.make_parameters
        if make is None:
            return {}
        if self.max_length is None and "max_length" in named(make):
            raise ValueError(
                f"max_length: expected an int, since {self.mechanism.name!r} has "
                "parameters for each position, got None"
            )
        arrays = make(
            rngs.params(),
            max_length=self.max_length,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            dtype=jnp.float32,
            **options,
        )
        buffers = self.mechanism.buffers
        return {
            name: Buffer(array) if name in buffers else nnx.Param(array)
            for name, array in arrays.items()
        }
