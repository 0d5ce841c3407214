"""The settings that a model, its encoder and its layers share, each declared once.

``--model.short_conv=4`` on the command line, ``TransformerEncoder(short_conv=4)`` and
``MultiHeadAttention(short_conv=4)`` set the same field. The docstring of a field is its
help text, and its type has the range. Nothing here imports jax, because ``--help`` must
be quick.
"""

import dataclasses
from typing import Annotated, Literal

from lra_jax.errors import Count, Positive, Range, Rate, Size

Inputs = Literal["embedding", "linear", "vectors"]
Positions = Literal["learned", "sinusoidal", "learned_2d", "rotary", "none"]
Norm = Literal["layer", "instance", "batch"]
Activation = Literal["gelu", "relu"]
Pooling = Literal[
    "mean", "cls", "first", "last", "attention", "ends", "attention+ends", "flatten"
]
Padding = Literal["lengths", "zeros"]
Interaction = Literal["concat", "nli"]
MlpKind = Literal["auto", "dense", "glu", "product_key", "none"]
# The most that anybody has trained: DeepNet, arXiv:2203.00555.
Depth = Annotated[int, Range("1 to 1000", 1, 1000)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """The settings of every attention layer of an encoder."""

    is_causal: bool = False
    """Let each position see only itself and those before it: a decoder."""
    short_conv: Count = 0
    """Size of a depthwise convolution on queries, keys and values; 0 = none."""
    gate: bool = False
    """Normalise each head of the attention output and gate it; mechanisms that have an
    output gate keep their own."""
    local_values: bool = False
    """Add the values to the attention output: a path for local detail."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSettings(LayerSettings):
    """The settings of an encoder that the command line has in the same form."""

    num_layers: Depth = 2
    """Encoder blocks."""
    embed_dim: Size = 64
    """Model width D."""
    num_heads: Size = 2
    """Attention heads N."""
    mlp_dim: Size = 128
    """Hidden width of the MLP and of the classification head."""
    mlp: MlpKind = "auto"
    """dense: an MLP in each block. glu: a gated MLP. product_key: a sparse memory.
    none: attention only. auto: dense, or a second unit of the mechanism if that also
    does the MLP's work (gau, flash)."""
    max_length: Size = 2000
    """Longest sequence, in tokens: size of learned tables and cosFormer's M."""
    inputs: Inputs = "embedding"
    """embedding: a learned row for each token id or pixel value. linear: a projection
    of the pixel's value in [0, 1]; for images. vectors: a projection of real vectors,
    as of time series."""
    patch: Size = 1
    """Image tasks, with inputs=linear: side of the square patches of pixels that make
    one position each; 1 = every pixel is a position."""
    positions: Positions = "learned"
    """learned, sinusoidal: added to the inputs. learned_2d: one vector for the row plus
    one for the column; for images. rotary: queries and keys are rotated instead."""
    activation: Activation = "gelu"
    """Of a dense MLP."""
    norm: Norm = "layer"
    """Normalisation in the encoder. layer: each position alone. instance: each column
    over the sequence, for images that are mostly background; not with mean pooling.
    batch: each column over the batch; running means in evaluation."""
    post_norm: bool = False
    """Normalise after each sum, norm(x + f(x)), instead of before attention and MLP."""
    final_norm: bool = False
    """With post_norm, normalise once more after the last block."""
    embed_std: Positive = 0.02
    """Initial standard deviation of the token embeddings."""
    scale_embeddings: bool = False
    """Multiply the token embeddings, or the projections of vectors, by the root of
    embed_dim before positions are added."""
    dropout: Rate = 0.1
    """Dropout on embeddings, on attention outputs and in the MLP."""
    input_dropout: Rate | None = None
    """The rate on embeddings; None = that of dropout."""
    mlp_dropout: Rate | None = None
    """The rate after the activation of the MLP; None = that of dropout."""
    qkv_bias: bool = True
    """Biases in the query, key, value and output projections."""
    conv_grid: bool = False
    """Image tasks: the convolution is over squares of `short_conv` pixels a side."""
