"""Networks with the shape of BERT, ALBERT and XLNet at initialisation (Dong, Cordonnier
and Loukas 2021, Figure 2), with any mechanism and with parts left out.

A block is post-norm: ``x = LN(x + attention(x))``, then ``x = LN(x + MLP(x))``. Its
parts can be switched off as in the published notebook, with layer normalisation
unchanged:

- no skip: ``LN(attention(x))``; the MLP keeps its own skip connection.
- no MLP: the second step is left out, except in ALBERT: the notebook only removes its
  two dense layers, and ``LN(x + gelu(x))`` stays.
- no norm (not in the paper): no LN in the blocks; that of the embeddings stays.

Weights are N(0, 0.02) with zero biases, as in the published models before training. The
parameter arrays of mechanisms (Linformer's projections) are initialised as elsewhere.

Deviation: random tokens by Zipf's law replace texts, which are not needed: the curves
depend on how often tokens repeat, but hardly on which tokens they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.analysis.path_tasks import draw_words
from lra_jax.analysis.relative import RelativeAttention
from lra_jax.errors import expected, known
from lra_jax.models import EncoderBlock, MultiHeadAttention
from lra_jax.models.layers import Dense, LayerNorm
from lra_jax.models.mlp import Mlp

INIT = nnx.initializers.normal(0.02)
EPSILON = 1e-12  # of every layer normalisation in the papers' models


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a published model.

    Attributes:
      vocab_size, num_layers, width, num_heads, mlp_dim, max_length: its sizes.
      embed_dim: width of the embeddings; if it is not ``width``, a dense layer follows
        them.
      shared: all layers share their weights (ALBERT).
      relative: positions enter only the attention, as distances, and the embeddings are
        not normalised (XLNet).
      activation: of the MLP.
    """

    vocab_size: int
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    mlp_dim: int = 3072
    max_length: int = 512
    embed_dim: int = 768
    shared: bool = False
    relative: bool = False
    activation: str = "gelu_exact"


SHAPES = {
    "bert": Shape(vocab_size=28_996),  # bert-base-cased
    "albert": Shape(  # albert-base-v2
        vocab_size=30_000, embed_dim=128, shared=True, activation="gelu"
    ),
    "xlnet": Shape(vocab_size=32_000, relative=True),  # xlnet-base-cased
}


class Variant(NamedTuple):
    """The parts that a network has.

    Attributes:
      skip: the skip connection around attention.
      mlp: the MLP, with its own skip connection.
      norm: layer normalisation in the blocks.
    """

    skip: bool
    mlp: bool
    norm: bool = True


VARIANTS = {
    "attention": Variant(skip=False, mlp=False),
    "attention + MLP": Variant(skip=False, mlp=True),
    "attention + skip": Variant(skip=True, mlp=False),
    "transformer": Variant(skip=True, mlp=True),
}
"""The four of Dong, Cordonnier and Loukas 2021, Figure 2; all keep the norms."""


def _make_block(
    shape: Shape,
    mechanism: str | Callable[..., jax.Array],
    length: int,
    rngs: nnx.Rngs,
) -> EncoderBlock:
    """One layer; the softmax of a relative shape is XLNet's, by distance too."""
    attention: Any
    if shape.relative and mechanism == "softmax":
        attention = RelativeAttention(
            shape.width, shape.num_heads, kernel_init=INIT, rngs=rngs
        )
    else:
        attention = MultiHeadAttention(
            shape.num_heads,
            shape.width,
            mechanism=mechanism,
            max_length=length,
            use_bias=not shape.relative,
            rngs=rngs,
        )
        for name in attention.projections:
            kernel = getattr(attention, name).kernel
            kernel[...] = INIT(rngs.params(), kernel[...].shape)
    mlp = Mlp(
        shape.width,
        shape.mlp_dim,
        activation=shape.activation,
        kernel_init=INIT,
        rngs=rngs,
    )
    return EncoderBlock(attention, mlp, shape.width, post_norm=True, epsilon=EPSILON)


def run_parts(
    block: Any,
    x: jax.Array,
    variant: Variant,
    attend: Callable[[jax.Array], jax.Array],
    transform: Callable[[jax.Array], jax.Array],
    **rows: Any,
) -> jax.Array:
    """A block with these functions as its attention and its MLP, and parts left out.

    Without the skip connection ``x = LN(attention(x))``, or ``x = attention(LN(x))``.
    """

    def apply(norm: Any, x: jax.Array, *, after: bool) -> jax.Array:
        return block.apply_norm(norm, x, after=after, **rows) if variant.norm else x

    branch = attend(apply(block.attention_norm, x, after=False))
    x = x + branch if variant.skip else branch
    x = apply(block.attention_norm, x, after=True)
    if not variant.mlp or block.mlp is None:
        return x
    x = x + transform(apply(block.mlp_norm, x, after=False))
    return apply(block.mlp_norm, x, after=True)


class Network(nnx.Module):
    """Embeddings and blocks, without a head.

    Args:
      shape: its sizes, or a name in `SHAPES`.
      mechanism: as in ``lra_jax.models.MultiHeadAttention``. XLNet's relative positions
        are part of the softmax scores; with another mechanism it has no positions.
      length: tokens per sequence, for mechanisms with parameters for each position.
      num_layers: number of layers; None = the shape's.
      rngs: for initialisation.

    Raises:
      ValueError: an unknown shape, mechanism or option, or a length that is too long.
    """

    def __init__(
        self,
        shape: Shape | str,
        mechanism: str | Callable[..., jax.Array] = "softmax",
        *,
        length: int = 128,
        num_layers: int | None = None,
        rngs: nnx.Rngs,
    ):
        shape = find_shape(shape)
        if not 0 < length <= shape.max_length:
            raise expected("length", f"1 to {shape.max_length} tokens", length)
        self.num_layers = shape.num_layers if num_layers is None else num_layers
        size = (shape.vocab_size, shape.embed_dim)
        self.embed = nnx.Param(INIT(rngs.params(), size))
        self.relative, self.shared = shape.relative, shape.shared
        if not shape.relative:
            size = (shape.max_length, shape.embed_dim)
            self.positions = nnx.Param(INIT(rngs.params(), size))
            # BERT's token types: here all tokens are of the first type.
            self.types = nnx.Param(INIT(rngs.params(), (shape.embed_dim,)))
            self.norm = LayerNorm(shape.embed_dim, epsilon=EPSILON)
        self.is_wider = shape.embed_dim != shape.width
        if self.is_wider:
            self.widen = Dense(
                shape.embed_dim, shape.width, kernel_init=INIT, rngs=rngs
            )
        count = 1 if shape.shared else self.num_layers
        self.blocks = nnx.List(
            [_make_block(shape, mechanism, length, rngs) for _ in range(count)]
        )

    def __call__(self, tokens: jax.Array, variant: Variant) -> jax.Array:
        """The hidden states `[L + 1, B, T, D]`, embeddings first, for `[B, T]` ids."""
        states = [self.embed_tokens(tokens)]
        for layer in range(self.num_layers):
            block = self.blocks[layer % len(self.blocks)]
            states.append(self.run_block(block, states[-1], variant))
        return jnp.stack(states)

    def run_block(self, block: Any, x: jax.Array, variant: Variant) -> jax.Array:
        """A block with parts left out, `[B, T, D]` to `[B, T, D]`."""
        x = run_parts(block, x, variant, block.attention, block.mlp)
        if variant.mlp or not self.shared:
            return x
        x = x + jax.nn.gelu(x)
        return block.mlp_norm(x) if variant.norm else x

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """The input of the first block, `[B, T, D]`."""
        x = self.embed[...][tokens]
        if not self.relative:
            x = x + self.positions[...][None, : tokens.shape[1]]
            x = x + self.types[...][None, None]
            x = self.norm(x)
        return self.widen(x) if self.is_wider else x


def find_shape(shape: Shape | str) -> Shape:
    """The shape with a name in `SHAPES`, or the shape itself."""
    if isinstance(shape, str):
        return SHAPES[known("--network", shape, SHAPES)]
    return shape


def zipf_tokens(
    vocab_size: int, batch_size: int, length: int, seed: int = 0
) -> np.ndarray:
    """Random token ids, `int32 [B, T]`, as frequent as words are (Zipf's law)."""
    rng = np.random.default_rng(seed)
    return draw_words(vocab_size, (batch_size, length), rng)
