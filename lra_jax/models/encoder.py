"""A pre-LN Transformer encoder around any attention mechanism."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.errors import known
from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.inputs import (
    Inputs,
    Positions,
    PositionTable,
    embed_inputs,
    make_inputs,
)
from lra_jax.models.layers import Dropout, LayerNorm, add_positions
from lra_jax.models.mlp import Mlp
from lra_jax.models.product_keys import ProductKeyMemory, memory_sizes
from lra_jax.models.remat import recomputed

MlpKind = Literal["auto", "dense", "product_key"]


class EncoderBlock(nnx.Module):
    """``x + attention(LN(x))``, then ``x + mlp(LN(x))``, with dropout on each branch.

    Args:
      attention: the attention of the block.
      mlp: what stands behind it, called as ``mlp(x, mask=..., rngs=...)``.
      embed_dim: width D.
      dropout: rate on both branches.
      dtype: of the computation; LayerNorm's statistics are float32.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        mlp: nnx.Module,
        embed_dim: int,
        *,
        dropout: float = 0.0,
        dtype: Any = None,
    ):
        self.attention_norm = LayerNorm(embed_dim, dtype=dtype)
        self.attention = attention
        self.mlp_norm = LayerNorm(embed_dim, dtype=dtype)
        self.mlp: Any = mlp
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        rngs: nnx.Rngs | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
    ) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`; ``mask`` `[B, T]` is True at real tokens.

        ``parameters`` are another block's arrays of the mechanism, if it shares them.
        """
        return self.carry(x, mask, rngs, parameters)[0]

    def carry(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        rngs: nnx.Rngs | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
        memory: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """As a call, between the memory of the block before and that for the next.

        Both are None for a mechanism without one (``MultiHeadAttention.attend``).
        """
        branch, memory = self.attention.attend(
            self.attention_norm(x), mask=mask, parameters=parameters, memory=memory
        )
        x = x + self.dropout(branch, rngs)
        branch = self.mlp(self.mlp_norm(x), mask=mask, rngs=rngs)
        return x + self.dropout(branch, rngs), memory


class TransformerEncoder(nnx.Module):
    """Vectors of tokens and positions, N blocks, a last LayerNorm.

    Args:
      vocab_size: token ids are below it.
      num_layers, embed_dim, num_heads, mlp_dim: sizes of the blocks. A mechanism that
        does the MLP's work too, as gated attention units do, stands in its place.
      qkv_features: width of all heads together; ``embed_dim`` by default.
      max_length: longest sequence of tokens.
      mechanism: see ``MultiHeadAttention``.
      options: likewise, for every block; a tuple holds one value a block, as in
        ``{"features": (256, 128)}``. ``{"sharing": "layerwise"}`` lets all blocks
        compute with the first one's arrays of the mechanism (Linformer).
      cls_token: put a learned vector, zero at first, before the tokens.
      inputs: "embedding", a row for each token id, or "linear", a projection of the
        pixel's value; see ``lra_jax.models.inputs``.
      positions: "learned", "sinusoidal", "learned_2d", "rotary" or "none"; likewise.
      grid: rows and columns of an image, for "learned_2d".
      embed_std: standard deviation of the token embeddings at first. Beside learned
        positions 0.02 lets both count alike; 1 is the LRA code's.
      dropout: rate on the embeddings and in the blocks.
      remat: keep only each block's input for the backward pass, and compute the rest
        of it again: less memory for about a third more arithmetic, the same numbers.
      qkv_bias: biases in the attention's projections.
      dtype: of the computation; parameters are float32.
      mlp: what stands behind the attention of a block: "dense", an MLP of
        ``mlp_dim``; "product_key", a memory (`lra_jax.models.product_keys`); "auto",
        an MLP, or where the mechanism does its work too, a second such layer.
      mlp_options: sizes of the memory, as in ``{"keys": 32}``.
      rngs: for initialisation.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        num_layers: int = 2,
        embed_dim: int = 64,
        num_heads: int = 2,
        qkv_features: int | None = None,
        mlp_dim: int = 128,
        mlp: MlpKind = "auto",
        mlp_options: Mapping[str, Any] | None = None,
        max_length: int = 2000,
        mechanism: str | Callable[..., jax.Array] = "cosformer",
        options: Mapping[str, Any] | None = None,
        cls_token: bool = False,
        inputs: Inputs = "embedding",
        positions: Positions = "learned",
        grid: tuple[int, int] | None = None,
        embed_std: float = 0.02,
        dropout: float = 0.1,
        remat: bool = False,
        qkv_bias: bool = True,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        check_mlp(mlp, mlp_options or {})
        self.max_length = max_length
        self.remat = remat
        self.dtype = jnp.float32 if dtype is None else jnp.dtype(dtype)
        by_block = options_by_block(options or {}, num_layers)
        self.shares_parameters = any(
            block.get("sharing") == "layerwise" for block in by_block
        )
        # The class vector takes a position of its own.
        longest = max_length + cls_token
        self.embed = make_inputs(
            inputs, vocab_size, embed_dim, embed_std, dtype=dtype, rngs=rngs
        )
        self.cls = nnx.Param(jnp.zeros((embed_dim,))) if cls_token else None
        self.position_table = PositionTable(
            positions, longest, embed_dim, grid, cls_token
        )
        self.positions = self.position_table.make(rngs)
        self.dropout = Dropout(dropout)

        def attention(index: int) -> MultiHeadAttention:
            return MultiHeadAttention(
                num_heads,
                embed_dim,
                qkv_features=qkv_features,
                mechanism=mechanism,
                max_length=longest,
                options=by_block[index],
                own_parameters=index == 0 or not self.shares_parameters,
                takes_memory=index > 0,
                gives_memory=index < num_layers - 1,
                rotary=positions == "rotary",
                use_bias=qkv_bias,
                dtype=dtype,
                rngs=rngs,
            )

        def block(index: int) -> EncoderBlock:
            first, rest = attention(index), {"dropout": dropout, "dtype": dtype}
            if mlp == "product_key":
                second: nnx.Module = ProductKeyMemory(
                    embed_dim, mlp_options, rngs=rngs, **rest
                )
            elif mlp == "dense" or first.mechanism.mlp:
                second = Mlp(embed_dim, mlp_dim, rngs=rngs, **rest)
            else:  # Two gated units are one attention and one MLP.
                second = attention(index)
            return EncoderBlock(first, second, embed_dim, **rest)

        self.blocks = nnx.List([block(index) for index in range(num_layers)])
        self.norm = LayerNorm(embed_dim, dtype=dtype)

    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Encodes a batch.

        Args:
          tokens: integer `[B, T]`.
          mask: boolean `[B, T]`, True at real tokens; None = all real.
          rngs: with a stream "dropout", to train; None to evaluate.

        Returns:
          `[B, T, D]`, with the class vector's row in front if there is one.

        Raises:
          ValueError: T is beyond ``max_length``, or not that of the grid.
        """
        if tokens.ndim != 2 or tokens.shape[1] > self.max_length:
            raise ValueError(
                f"tokens: expected [B, T] with T <= max_length={self.max_length}, "
                f"got {tokens.shape}"
            )
        x = embed_inputs(self.embed, tokens)
        if self.cls is not None:
            front = jnp.broadcast_to(
                self.cls[...].astype(x.dtype), (x.shape[0], 1, x.shape[2])
            )
            x = jnp.concatenate([front, x], 1)
            mask = None if mask is None else jnp.pad(mask, ((0, 0), (1, 0)), "edge")
        rows = self.position_table.rows(self.positions, x.shape[1])
        if rows is not None:
            x = add_positions(x, rows.astype(x.dtype))
        x = self.dropout(x, rngs)
        shared = self.blocks[0].attention.parameters if self.shares_parameters else None
        memory = None
        for block in self.blocks:
            call = functools.partial(_call, block, mask, shared)
            arrays = (x, memory)
            x, memory = (
                recomputed(call, rngs, *arrays) if self.remat else call(rngs, *arrays)
            )
        return self.norm(x)


def check_mlp(kind: str, options: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless there is such an MLP, and it has these options."""
    known("mlp", kind, get_args(MlpKind))
    if kind == "product_key":
        memory_sizes(options)
    elif options:
        raise ValueError(
            f"mlp_options: expected none for mlp={kind!r}, got {', '.join(options)}"
        )


def _call(
    block: EncoderBlock,
    mask: jax.Array | None,
    parameters: Mapping[str, nnx.Variable] | None,
    rngs: nnx.Rngs | None,
    x: jax.Array,
    memory: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """One block; the memory goes from one to the next that have any."""
    if block.attention.mechanism.memory is None:
        return block(x, mask, rngs, parameters), memory
    return block.carry(x, mask, rngs, parameters, memory)


def options_by_block(
    options: Mapping[str, Any], num_layers: int
) -> list[dict[str, Any]]:
    """A mechanism's options for each block; a tuple holds one value a block.

    Raises:
      ValueError: a tuple of another length, sharing that not all blocks agree on, or
        sizes that differ between blocks which share their arrays.
    """
    for name, value in options.items():
        if isinstance(value, tuple) and len(value) != num_layers:
            raise ValueError(
                f"{name}: expected one value, or one for each of the {num_layers} "
                f"blocks, got {len(value)}: {'/'.join(map(str, value))}"
            )
    blocks = [
        {k: v[index] if isinstance(v, tuple) else v for k, v in options.items()}
        for index in range(num_layers)
    ]
    if any(block.get("sharing") == "layerwise" for block in blocks):
        differing = [k for k in options if len({repr(b[k]) for b in blocks}) > 1]
        if differing:
            raise ValueError(
                f"{differing[0]}: expected one value for all blocks, which share "
                f"their arrays with sharing=layerwise, got {options[differing[0]]}"
            )
    return blocks
