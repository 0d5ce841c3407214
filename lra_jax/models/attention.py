"""Multi-head attention around any mechanism of ``lra_jax.attention``."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import gates, registry
from lra_jax.attention import rotary as rotations
from lra_jax.models.gates import GateLayer
from lra_jax.models.layers import Dense
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
            query, key = _rotated(query), _rotated(key)
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
        out = self.mechanism.attention(
            query, key, value, **keywords, **arrays, **dict(self.options)
        )
        out = out.reshape(*out.shape[:-2], -1)
        return out if self.out is None else self.out(out)

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


def _rotated(x: jax.Array) -> jax.Array:
    """`[B, T, N, H]`, each position turned by its angles; in float32 within."""
    length, width = x.shape[1], x.shape[-1]
    cos, sin = (
        table[:length].reshape(1, length, 1, width // 2)
        for table in rotations.tables(length, width, jnp.dtype("float32"))
    )
    return rotations.turned(x.astype(jnp.float32), (cos, sin)).astype(x.dtype)
