"""A Transformer encoder around any attention mechanism."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import packed
from lra_jax.attention.inputs import check_shape, check_size
from lra_jax.attention.masking import check_mask
from lra_jax.errors import expected, within
from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.config import ModelConfig, Norm, parse_options
from lra_jax.models.inputs import embed_inputs, make_inputs, make_positions
from lra_jax.models.intermediates import is_captured, sow
from lra_jax.models.layers import (
    Dropout,
    LayerNorm,
    add_positions,
    at_positions,
    take_rows,
)
from lra_jax.models.mlp import MLPS
from lra_jax.models.norms import BatchNorm, InstanceNorm
from lra_jax.models.padding import order_real_first, reorder
from lra_jax.models.parts import make_part
from lra_jax.models.patches import Merge, any_real
from lra_jax.models.remat import recompute

_NORMS = {"layer": LayerNorm, "instance": InstanceNorm, "batch": BatchNorm}


class Block(nnx.Module):
    """A block of an encoder: an attention, an MLP, and how they are put together.

    A subclass writes the latter, `add_branches`. It is the same for training, for
    generating text token by token, and where an analysis leaves parts out.

    Args:
      attention: the attention of the block.
      mlp: the second part, called as ``mlp(x, mask=..., rngs=...)``; None = nothing.
    """

    def __init__(self, attention: MultiHeadAttention, mlp: nnx.Module | None):
        self.attention = attention
        self.mlp: Any = mlp

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        rngs: nnx.Rngs | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
    ) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`; ``mask`` `[B, T]` is True at real tokens.

        ``parameters`` are another block's arrays of the mechanism, if they are shared.
        """
        return self.carry(x, mask, rngs, parameters)[0]

    def carry(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        rngs: nnx.Rngs | None = None,
        parameters: Mapping[str, nnx.Variable] | None = None,
        memory: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """As a call, but takes the previous block's memory and returns the next one's.

        Both are None for a mechanism without one (``MultiHeadAttention.attend``).
        """
        check_shape("x", x, "B T D", None, None, self.attention.in_features)
        sow(self, inputs=x, mask=mask, segment_ids=segment_ids)
        rows = {"mask": mask, "segment_ids": segment_ids}

        def attend(x: jax.Array) -> jax.Array:
            nonlocal memory
            out, memory = self.attention.attend(
                x, **rows, parameters=parameters, memory=memory
            )
            return out

        transform = functools.partial(self.transform, **rows, rngs=rngs)
        out = self.add_branches(x, attend, transform, rngs, **rows)
        check_shape("the output of block", out, "B T D", *x.shape)
        out = out.astype(x.dtype)
        sow(self, outputs=out)
        return out, memory

    @abc.abstractmethod
    def add_branches(
        self,
        x: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        transform: Callable[[jax.Array], jax.Array],
        rngs: nnx.Rngs | None = None,
        **rows: jax.Array | None,
    ) -> jax.Array:
        """The block's output, `[B, T, D]`.

        Args:
          x: its input, `[B, T, D]`.
          attend, transform: its attention and its MLP, `[B, T, D]` to `[B, T, D]`; of
            these, ``transform`` is called only where the block has an MLP.
          rngs: with a stream "dropout" in training, else None.
          **rows: ``mask`` and ``segment_ids``, `[B, T]` or None; none in a stream.
        """

    def transform(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Applies the MLP, or the attention in its place, to normalised inputs."""
        # An attention in the MLP's place also sees the documents; others see positions.
        attends = isinstance(self.mlp, MultiHeadAttention)
        more = {"segment_ids": segment_ids} if attends else {}
        out = self.mlp(x, mask=mask, rngs=rngs, **more)
        check_shape("the output of mlp", out, "B T D", *x.shape)
        return out.astype(x.dtype)


class EncoderBlock(Block):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, each branch with dropout.

    With ``post_norm``, ``norm(x + attention(x))``, then ``norm(x + mlp(x))``.

    Args:
      attention, mlp: see `Block`.
      embed_dim: width D.
      norm: "layer" (LayerNorm), "instance" (`InstanceNorm`) or "batch" (`BatchNorm`).
      post_norm: see above.
      dropout: rate on both branches.
      drop_path: rate at which a branch is left out, for each example.
      layer_scale: initial value of a factor for each column of the MLP's output
        (LayerScale, Touvron et al. 2021, arXiv:2103.17239); 0 = none.
      epsilon: added to the variances of the norms; None = their default.
      dtype: dtype of the computation; statistics of the norms are float32 or wider.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        mlp: nnx.Module | None,
        embed_dim: int,
        *,
        norm: Norm = "layer",
        post_norm: bool = False,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float = 0.0,
        epsilon: float | None = None,
        dtype: Any = None,
    ):
        more = {} if epsilon is None else {"epsilon": epsilon}
        kind = functools.partial(_NORMS[norm], **more)
        super().__init__(attention, mlp)
        self.attention_norm = kind(embed_dim, dtype=dtype)
        self.mlp_norm: Any = None if mlp is None else kind(embed_dim, dtype=dtype)
        self.post_norm = post_norm
        self.dropout = Dropout(dropout)
        self.drop_path = Dropout(drop_path, by_example=True)
        scale = jnp.full((embed_dim,), layer_scale, jnp.float32)
        has_scale = layer_scale > 0 and mlp is not None
        self.scale: Any = nnx.Param(scale) if has_scale else None

    def add_branches(
        self,
        x: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        transform: Callable[[jax.Array], jax.Array],
        rngs: nnx.Rngs | None = None,
        **rows: jax.Array | None,
    ) -> jax.Array:
        """See the base class."""
        parts = [(self.attention_norm, attend)]
        if self.mlp is not None:
            parts += [(self.mlp_norm, lambda x: self.scale_mlp(transform(x)))]
        more: dict[str, Any] = {**rows, "training": rngs is not None}
        for norm, branch in parts:
            inner = self.apply_norm(norm, x, after=False, **more)
            x = x + self.drop_path(self.dropout(branch(inner), rngs), rngs)
            x = self.apply_norm(norm, x, after=True, **more)
        return x

    def apply_norm(
        self,
        norm: LayerNorm | InstanceNorm | BatchNorm,
        x: jax.Array,
        *,
        after: bool,
        **more: Any,
    ) -> jax.Array:
        """Applies one of the norms if this is its place: ``after`` the sum, or before
        attention or MLP. ``more`` are its mask, segment_ids and training."""
        return norm(x, **more) if after == self.post_norm else x

    def scale_mlp(self, x: jax.Array) -> jax.Array:
        """Applies LayerScale to outputs of the MLP, if the block has it."""
        return x if self.scale is None else x * at_positions(self.scale[...], x)


class VectorEncoder(nnx.Module):
    """N blocks and a final norm, on vectors.

    With ``post_norm`` the blocks end in norms, and there is no final one unless
    ``final_norm`` asks for it.

    Args:
      config: the settings; those of inputs and positions have no effect.
      rngs: for initialisation.

    Raises:
      ValueError: see `ModelConfig`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        config.check()
        self.config = config
        rate = config.input_dropout
        self.dropout = Dropout(config.dropout if rate is None else rate)
        blocks = range(config.num_layers)
        self.blocks: nnx.List[Any] = nnx.List(
            [make_block(config, index, rngs) for index in blocks]
        )
        ends = [x for x in blocks[1:] if config.stage(x) > config.stage(x - 1)]
        # Keyed by the block that they come before.
        self.merges = nnx.Dict({str(x): Merge(config.at(x - 1), rngs) for x in ends})
        norm, width = _NORMS[config.norm], config.at(config.num_layers - 1).embed_dim
        ends_in_norm = config.post_norm and not config.final_norm
        self.norm: Any = None if ends_in_norm else norm(width, dtype=config.dtype)

    def encode(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Vectors `[B, T, D]` to `[B, T, D]`; each stage after the first has a quarter
        of the rows, of twice the width.

        Args:
          x: the vectors.
          mask: boolean `[B, T]`, True at real positions; None = all real.
          rngs: with a stream "dropout", for training; None for evaluation.
          segment_ids: of packed documents, see `TransformerEncoder`.
        """
        x = self.dropout(x, rngs)
        shares = self.config.shares_parameters
        shared = self.blocks[0].attention.parameters if shares else None
        memory = None
        for index, block in enumerate(self.blocks):
            if str(index) in self.merges:
                (x, mask), memory = self.merges[str(index)](x, mask), None

            def call(
                rngs: Any, x: Any, memory: Any, block: Any = block, mask: Any = mask
            ) -> Any:
                return block.carry(x, mask, rngs, shared, memory, segment_ids)

            # A capture keeps the blocks' intermediates, so nothing is recomputed.
            if self.config.remat and not is_captured(block):
                x, memory = recompute(call, rngs, x, memory)
            else:
                x, memory = call(rngs, x, memory)
        if self.norm is None:
            return x
        return self.norm(x, mask, segment_ids, training=rngs is not None)


class TransformerEncoder(VectorEncoder):
    """Token and position vectors, N blocks, and a final norm (`VectorEncoder`).

    Args:
      vocab_size: token ids are below this; with inputs "vectors", their width C.
      config: the settings.
      rngs: for initialisation.
      **settings: the fields of `ModelConfig`; with ``config``, they override its
        values.

    Raises:
      ValueError: a size of the vocabulary below 1, or see `ModelConfig`.

    Examples:
      >>> encoder = TransformerEncoder(
      ...     256, mechanism="cosformer", num_layers=2, embed_dim=64, num_heads=4,
      ...     mlp_dim=128, max_length=512, rngs=nnx.Rngs(0),
      ... )
      >>> tokens = jnp.array([[72, 101, 108, 108, 111, 0, 0, 0]])
      >>> encoder(tokens, mask=tokens > 0).shape
      (1, 8, 64)
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        config: ModelConfig | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        config = dataclasses.replace(config or ModelConfig(), **settings)
        config.check()
        self.vocab_size = check_size("vocab_size", vocab_size)
        self.embed = make_inputs(config, vocab_size, rngs)

        def zeros() -> nnx.Param:
            return nnx.Param(jnp.zeros((config.embed_dim,), jnp.float32))

        self.cls = zeros() if config.cls_token else None
        self.hidden = zeros() if config.reconstructs else None
        self.positions = make_positions(config, rngs)
        super().__init__(config, rngs=rngs)  # Last: seeds fix the order of draws.

    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        segment_ids: jax.Array | None = None,
        hidden: jax.Array | None = None,
        *,
        in_place: bool = False,
    ) -> jax.Array:
        """Encodes a batch.

        Args:
          tokens: integer `[B, T]`, pixels in colour or real vectors `[B, T, C]`.
          mask: boolean `[B, T]`, True at real tokens; None = all real. Padding may be
            anywhere in a row: positions count the real tokens.
          rngs: with a stream "dropout", for training; None for evaluation, with the
            running statistics of batch norms.
          segment_ids: integers `[B, T]`, a run of one positive number for each document
            packed into a row, 0 = padding. Each is encoded as if it were alone, with
            positions counted from its start.
          hidden: boolean `[B, T]`, True at masked tokens, whose vectors are replaced by
            a learned one, for a model that ``reconstructs``; None = none is masked.
          in_place: positions count all tokens. For a mask with padding only at the end
            of rows this is the same, and saves moving it there. Always so for images
            and packed documents.

        Returns:
          `[B, T, D]`, with the class vector's row in front if there is one; for images
          in patches of P x P pixels `[B, T / P^2, D]`, and with S stages a quarter as
          many rows, of twice the width, S - 1 times.

        Raises:
          ValueError: arrays of other shapes, T above ``max_length`` or not that of the
            grid, packed documents with a class vector or a grid, or hidden tokens in
            a model that has no vector for them.
        """
        config = self.config
        if config.inputs == "vectors" or config.channels > 1:
            colours = config.channels if config.channels > 1 else self.vocab_size
            check_shape("tokens", tokens, "B T C", None, None, colours)
        else:
            check_shape("tokens", tokens, "B T", None, None)
        batch, length = tokens.shape[:2]
        if length > config.max_length:
            needed = f"[B, T] with T <= max_length={config.max_length}"
            raise expected("tokens", needed, tokens.shape)
        mask = check_mask("mask", mask, "B T", {1, batch}, length)
        if hidden is not None and self.hidden is None:
            raise expected("hidden", "None without reconstructs=True", "an array")
        if hidden is not None:
            check_shape("hidden", hidden, "B T", batch, length)
        documents = self._documents(tokens, segment_ids)
        back = None
        stays = in_place or documents is not None or config.grid is not None
        if mask is not None and not stays:
            mask = jnp.broadcast_to(mask, (batch, length))
            order, back = order_real_first(mask)
            hidden = None if hidden is None else reorder(hidden, order)
            tokens, mask = reorder(tokens, order), reorder(mask, order)
        mask = packed.real_positions(mask, documents)
        x, mask = self._embed(tokens, mask, documents, hidden)
        x = self.encode(x, mask, rngs, segment_ids)
        if back is None:
            return x
        front = x.shape[1] - length  # The class vector's row stays.
        return jnp.concatenate([x[:, :front], reorder(x[:, front:], back)], 1)

    def _embed(
        self,
        tokens: jax.Array,
        mask: jax.Array | None,
        documents: packed.Packed | None,
        hidden: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Vectors of tokens and positions, and which of them are real."""
        config = self.config
        grid = config.grid if config.patch > 1 or config.channels > 1 else None
        scaled = config.scale_embeddings
        x = embed_inputs(self.embed, tokens, grid, config.patch, scaled=scaled)
        if grid is not None and mask is not None:
            mask = any_real(mask, grid, config.patch)
        if hidden is not None and self.hidden is not None:
            vector = at_positions(self.hidden[...], x)
            x = jnp.where(hidden[:, :, None], vector, x)
        if self.cls is not None:
            front = at_positions(self.cls[...], x[:, :1])
            x = jnp.concatenate([front, x], 1)
            if mask is not None:
                mask = jnp.concatenate([mask[:, :1], mask], 1)
        rows = self.position_rows(x.shape[1])
        if rows is not None and documents is not None:
            x = x + take_rows(rows, documents.position).astype(x.dtype)
        elif rows is not None:
            x = add_positions(x, rows.astype(x.dtype))
        return x, mask

    def position_rows(self, length: int) -> jax.Array | None:
        """The vectors of the first positions, `[length, D]`; None if not added."""
        rows = None if self.positions is None else self.positions(length)
        if rows is not None:
            check_shape("positions", rows, "T D", length, self.config.embed_dim)
        return rows

    def _documents(
        self, tokens: jax.Array, segment_ids: jax.Array | None
    ) -> packed.Packed | None:
        if segment_ids is None:
            return None
        config = self.config
        merged = config.patch > 1 or bool(config.depths)
        in_grid = config.positions == "learned_2d" or merged
        if self.cls is not None or in_grid:
            one = "a class vector" if self.cls is not None else "positions in a grid"
            raise expected("segment_ids", f"None with {one}", "an array")
        return packed.documents(segment_ids, tokens, tokens)


def make_block(config: ModelConfig, index: int, rngs: nnx.Rngs) -> Block:
    """A block of an encoder, counted from 0."""
    rate = config.drop_path * index / max(config.num_layers - 1, 1)
    args = {
        "attention": make_attention(config, index, rngs),
        "mlp": _make_mlp(config, index, rngs),
        "config": dataclasses.replace(config.at(index), drop_path=rate),
        "rngs": rngs,
    }
    parts = {"residual": _make_residual}
    return make_part("block", config.block, parts, args, {}, kind=Block)


def _make_residual(
    attention: MultiHeadAttention,
    mlp: nnx.Module | None,
    config: ModelConfig,
    rngs: nnx.Rngs,
) -> EncoderBlock:
    """The block of an encoder that is not a user's own."""
    same = ("norm", "post_norm", "dropout", "drop_path", "layer_scale", "dtype")
    more = {name: getattr(config, name) for name in same}
    return EncoderBlock(attention, mlp, config.embed_dim, **more)


def make_attention(
    config: ModelConfig, index: int, rngs: nnx.Rngs
) -> MultiHeadAttention:
    """The attention of a block, counted from 0; an error from a hybrid's other
    mechanism says so."""
    mechanism, stage = config.block_mechanism(index), config.at(index)
    try:
        return MultiHeadAttention(
            config.num_heads,
            stage.embed_dim,
            mechanism=mechanism,
            options=config.block_options[index],
            qkv_features=stage.qkv_dim,
            num_kv_heads=config.num_kv_heads,
            max_length=stage.length,
            is_causal=config.is_causal,
            short_conv=config.short_conv,
            conv_grid=stage.patch_grid if config.conv_grid else None,
            gate=config.gate,
            local_values=config.local_values,
            rotary=config.positions == "rotary",
            use_bias=config.qkv_bias,
            dtype=config.dtype,
            layer=index,
            num_layers=config.num_layers,
            own_parameters=index == 0 or not config.shares_parameters,
            rngs=rngs,
        )
    except ValueError as error:
        if mechanism == config.main:
            raise
        raise within("hybrid", error) from error


def _make_mlp(config: ModelConfig, index: int, rngs: nnx.Rngs) -> nnx.Module | None:
    """The second part of a block."""
    kind = config.mlp_kind(index)
    if kind == "attention":  # Two gated units replace one attention and one MLP.
        return make_attention(config, index, rngs)
    options = parse_options(config.mlp_options, "--model.mlp_options")
    args = {"config": config.at(index), "rngs": rngs}
    return make_part("mlp", kind, MLPS, args, options)
