"""The settings of a model, each declared once.

``--model.short_conv=4`` on the command line and ``TransformerEncoder(short_conv=4)``
set the same field. The docstring of a field is its help text, and its type has the
range. Nothing here imports jax or numpy, because ``--help`` must be quick.
"""

import ast
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Annotated, Any, Literal, Self

from lra_jax.attention import registry
from lra_jax.attention.outside import locate
from lra_jax.errors import (
    Count,
    Names,
    NotNegative,
    Positive,
    Range,
    Rate,
    Size,
    check_types,
    expected,
)

Inputs = Literal["embedding", "linear", "vectors"]
Positions = Annotated[
    str, Names(("learned", "sinusoidal", "learned_2d", "rotary", "none"))
]
Norm = Literal["layer", "instance", "batch"]
Activation = Literal["gelu", "relu"]
Pooling = Literal[
    "mean", "cls", "first", "last", "attention", "ends", "attention+ends", "flatten"
]
Padding = Literal["lengths", "zeros"]
Interaction = Literal["concat", "nli"]
MlpKind = Annotated[str, Names(("auto", "dense", "glu", "product_key", "none"))]
BlockKind = Annotated[str, Names(("residual",))]
PARTS = ("block", "mlp", "positions")
"""The settings that may name a user's own code, see `lra_jax.models.parts`."""
Head = Literal["mlp", "linear"]
# The most that anybody has trained: DeepNet, arXiv:2203.00555.
Depth = Annotated[int, Range("1 to 1000", 1, 1000)]
Text = str | Mapping[str, Any] | tuple[Any, ...]
"""Several values: text on the command line, in Python also a dict or a tuple."""


# Marks a field without a flag: other settings of a run decide it.
_NO_FLAG = {"flag": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of an encoder, its layers and its classification head.

    They are checked where a model is made. A mechanism that also does the MLP's work,
    such as a gated attention unit, replaces it.

    Attributes:
      num_kv_heads, mechanism: see `MultiHeadAttention`.
      grid: rows and columns of the images; None = sequences.
      channels: values of a pixel, 3 in colour; for inputs "linear".
      reconstructs: a learned vector, initially zero, can replace tokens, which a linear
        head of the classifiers then reconstructs.
      remat: keep only each block's input for the backward pass, and recompute the rest:
        less memory for about a third more arithmetic, with the same results.
      dtype: dtype of the computation; parameters are float32.
    """

    num_layers: Depth = 2
    """Encoder blocks."""
    embed_dim: Size = 64
    """Model width D."""
    num_heads: Size = 2
    """Attention heads N."""
    qkv_dim: Size | None = None
    """Total width of all heads, N * H; None = embed_dim."""
    mlp_dim: Size = 128
    """Hidden width of the MLP and of the classification head."""
    mlp: MlpKind = "auto"
    """dense: an MLP in each block. glu: a gated MLP. product_key: a sparse memory.
    none: attention only. auto: dense, or a second unit of the mechanism if that also
    does the MLP's work (gau, flash). Or your own package.module:Mlp."""
    mlp_options: Text = ""
    """Sizes of the product-key memory, as in `keys=64,heads=4,top=8,query_dim=32`, or
    options of your own MLP."""
    block: BlockKind = "residual"
    """residual: attention, then the MLP, each added to its input. Or your own
    package.module:Block, see docs/own_parts.md."""
    max_length: Size = 2000
    """Longest sequence, in tokens: size of learned tables and cosFormer's M."""
    inputs: Inputs = "embedding"
    """embedding: a learned row for each token id or pixel value. linear: a projection
    of the pixel's value in [0, 1]; for images. vectors: a projection of real vectors,
    such as time series."""
    patch: Size = 1
    """Image tasks, with inputs=linear: side of the square patches of pixels that make
    one position each; 1 = every pixel is a position."""
    stages: Text = ""
    """Image tasks: blocks of each stage, as in `3,3,10,3`, `num_layers` together. Each
    stage after the first has a quarter of the positions, by a convolution over 2 x 2 of
    them, and twice the width, of MLP and heads as well. By default, one stage."""
    positions: Positions = "learned"
    """learned, sinusoidal: added to the inputs. learned_2d: one vector for the row plus
    one for the column; for images. rotary: queries and keys are rotated instead. Or
    your own package.module:function, whose vectors are added."""
    activation: Activation = "gelu"
    """Activation of a dense MLP."""
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
    cutoffs: Text = ""
    """Adaptive inputs and softmax: token ids at which clusters of rarer words begin, as
    in `20000,60000`; for language models with a vocabulary sorted by frequency."""
    dropout: Rate = 0.1
    """Dropout on embeddings, on attention outputs and in the MLP."""
    input_dropout: Rate | None = None
    """Dropout on embeddings; None = the rate of dropout."""
    mlp_dropout: Rate | None = None
    """Dropout after the activation of the MLP; None = the rate of dropout."""
    drop_path: Rate = 0.0
    """Rate at which the last block's branches are left out, each for whole examples;
    the rate of the others rises linearly from 0 in the first."""
    layer_scale: NotNegative = 0.0
    """Initial value of a learned factor on each column of the MLP's output; 0 = none.
    1e-5 in deep image models."""
    is_causal: bool = False
    """Let each position see only itself and those before it: a decoder."""
    short_conv: Count = 0
    """Size of a depthwise convolution on queries, keys and values; 0 = none."""
    conv_grid: bool = False
    """Image tasks: the convolution is over squares of `short_conv` pixels a side."""
    gate: bool = False
    """Normalise each head of the attention output and gate it; mechanisms that have an
    output gate keep their own."""
    local_values: bool = False
    """Add the values to the attention output: a path for local detail."""
    qkv_bias: bool = True
    """Biases in the query, key, value and output projections."""
    hybrid: Text = ""
    """Mechanisms that the blocks take in turn, `--attention` among them, as in
    `hgrn,cosformer`; the others have their default options. By default, `--attention`
    in every block."""
    attention_options: Text = ""
    """Options of the mechanism, as in `clip=5` or `features=128,sharing=none`;
    `features=256/128` sets a different value for each block."""
    pooling: Pooling = "mean"
    """mean: average over the real tokens. cls: a learned vector in front of them.
    first, last: the first token's row, or the last real one's. ends: both. attention:
    four averages with learned weights. attention+ends: all six. flatten: all rows."""
    head: Head = "mlp"
    """Head of a classifier. mlp: a hidden layer with a ReLU. linear: LayerNorm after
    the pooling, in place of the encoder's last norm, and one layer."""
    padding: Padding = "lengths"
    """lengths: exact. zeros: LRA's rule that every token with id 0 is padding, so that
    black pixels vanish; for comparison with LRA's code."""
    interaction: Interaction = "nli"
    """How the head combines a pair a, b: [a, b], or [a, b, a * b, a - b]."""
    num_kv_heads: Size | None = dataclasses.field(default=None, metadata=_NO_FLAG)
    mechanism: Any = dataclasses.field(default="cosformer", metadata=_NO_FLAG)
    grid: tuple[int, int] | None = dataclasses.field(default=None, metadata=_NO_FLAG)
    channels: Size = dataclasses.field(default=1, metadata=_NO_FLAG)
    reconstructs: bool = dataclasses.field(default=False, metadata=_NO_FLAG)
    remat: bool = dataclasses.field(default=False, metadata=_NO_FLAG)
    dtype: Any = dataclasses.field(default=None, metadata=_NO_FLAG)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping | list | tuple):
                # A tuple, so that models are hashable; no values are an empty text.
                pairs = value.items() if isinstance(value, Mapping) else value
                value = tuple(pairs) or ""
            elif isinstance(value, Integral) and not isinstance(value, bool):
                value = int(value)  # numpy's integers as well.
            elif field.name == "hybrid" and isinstance(value, str):
                value = ",".join(name.strip() for name in value.split(","))
            elif field.name in PARTS and callable(value):
                value = locate(value, field.name)  # Its path, as text.
            object.__setattr__(self, field.name, value)

    def check(self) -> None:
        """Refuses settings that would silently compute something other than they say.

        Raises:
          ValueError: a setting of another type or range, or a combination.
        """
        check_types(self)
        if self.positions == "sinusoidal" and self.embed_dim % 2:
            needed = "an even width for sinusoidal positions"
            raise expected("embed_dim", needed, self.embed_dim)
        if [0, *self.clusters] != sorted({0, *self.clusters}):
            raise expected("cutoffs", "increasing positive ids", self.cutoffs)
        if self.is_causal and self.cls_token:
            needed = "another value with is_causal, as position 0 sees no other"
            raise expected("pooling", needed, "'cls'")
        if self.is_causal and self.norm != "layer":
            needed = "'layer' with is_causal, where no position sees later ones"
            raise expected("norm", needed, f"{self.norm!r}")
        if self.remat and self.norm == "batch":
            needed = "False with norm='batch', whose running means must be kept"
            raise expected("remat", needed, True)
        has_ids = self.channels == self.patch == 1 and self.inputs != "vectors"
        if self.reconstructs and (self.depths or not has_ids):
            needed = "False (--pretrain.steps=0) with colours, patches, stages, vectors"
            raise expected("reconstructs", needed, True)
        if self.inputs == "vectors" and self.padding == "zeros":
            needed = "'lengths' with inputs='vectors', where 0 is a value"
            raise expected("padding", needed, "'zeros'")
        if self.hybrid:
            self._check_hybrid()
        if self.depths and sum(self.depths) != self.num_layers:
            needed = f"{sum(self.depths)}, the blocks of stages={self.stages}"
            raise expected("num_layers", needed, self.num_layers)
        self._check_images()

    def _check_images(self) -> None:
        smallest = self.at(self.num_layers - 1).patch  # Side in pixels of a position.
        needs = {
            "positions": self.positions == "learned_2d",
            "patch": self.patch > 1,
            "stages": bool(self.depths),
            "conv_grid": self.conv_grid,
            "grid": self.options.get("grid") is True,
        }
        for name in (name for name, is_set in needs.items() if is_set):
            if self.grid is None:
                raise expected(name, "images, as in an image task", "sequences")
            if any(side % smallest for side in self.grid):
                needed = f"a divisor of both sides of {self.grid} images"
                last = f" ({smallest} in the last stage)" if self.depths else ""
                raise expected("patch", needed, f"{self.patch}{last}")
            if name in ("stages", "conv_grid", "grid") and self.cls_token:
                raise expected("pooling", f"another value with {name}", "'cls'")
            if name in ("conv_grid", "grid") and self.is_causal:
                raise expected("is_causal", f"False with {name}=True", True)
        if self.patch > 1 and self.inputs != "linear":
            needed = "1 with inputs='embedding', which has a row for each pixel value"
            raise expected("patch", needed, self.patch)

    def _check_hybrid(self) -> None:
        names = ", ".join(one.name for one in self.turn)
        if self.main not in self.turn:
            needed = f"mechanisms with {self.main.name!r} among them"
            raise expected("hybrid", needed, names)
        if len(self.turn) > self.num_layers:
            needed = f"at most one for each of the {self.num_layers} blocks"
            raise expected("hybrid", needed, f"{len(self.turn)}: {names}")
        if self.options.get("sharing") == "layerwise":
            needed = "another value with hybrid, whose blocks have arrays of their own"
            raise expected("sharing", needed, "'layerwise'")
        for one in self.turn:
            if one.memory is not None and not self.is_causal:
                needed = "mechanisms that pass no memory to the next block"
                raise expected("hybrid", needed, f"{one.name!r}")

    @property
    def own_parts(self) -> dict[str, str]:
        """The settings that name a user's own code, besides the mechanism."""
        named = {name: getattr(self, name) for name in PARTS}
        return {name: value for name, value in named.items() if ":" in value}

    @property
    def cls_token(self) -> bool:
        """Whether a learned vector, initially zero, comes before the tokens."""
        return self.pooling == "cls"

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The mechanism's options by name; a tuple holds one value for each block, and
        ``grid=True`` means that of the images, in patches."""
        return parse_options(self.attention_options)

    @functools.cached_property
    def clusters(self) -> tuple[int, ...]:
        """The token ids in `cutoffs`."""
        return _integers("cutoffs", self.cutoffs, "token ids, as in 20000,60000")

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """The numbers of blocks in `stages`; none without stages."""
        needed = "numbers of blocks, as in 3,3,10,3"
        depths = _integers("stages", self.stages, needed)
        if min(depths, default=1) < 1:
            raise expected("stages", needed, f"{self.stages!r}")
        return depths

    def stage(self, index: int) -> int:
        """The stage of a block; both are counted from 0."""
        ends = itertools.accumulate(self.depths[:-1])
        return sum(index >= end for end in ends)

    def at(self, index: int) -> Self:
        """The sizes of a block's stage, counted from 0, as those of a model of its own:
        in each stage a position is a patch of twice the side."""
        if not self.depths:
            return self
        factor = 2 ** self.stage(index)
        return dataclasses.replace(
            self,
            stages="",
            embed_dim=self.embed_dim * factor,
            qkv_dim=None if self.qkv_dim is None else self.qkv_dim * factor,
            mlp_dim=self.mlp_dim * factor,
            patch=self.patch * factor,
        )

    @property
    def hybrid_names(self) -> tuple[Any, ...]:
        """The mechanisms in `hybrid`, as the user wrote them."""
        parts = self.hybrid.split(",") if isinstance(self.hybrid, str) else self.hybrid
        return tuple(parts) if self.hybrid else ()

    @functools.cached_property
    def main(self) -> registry.Mechanism:
        """The entry of `mechanism`."""
        return registry.resolve(self.mechanism, "mechanism")

    @functools.cached_property
    def turn(self) -> tuple[registry.Mechanism, ...]:
        """The mechanisms that the blocks take in turn."""
        names: Iterable[Any] = self.hybrid_names or (self.main,)
        return tuple(registry.resolve(one, "hybrid") for one in names)

    def block_mechanism(self, index: int) -> registry.Mechanism:
        """The mechanism of a block, counted from 0."""
        return self.turn[index % len(self.turn)]

    def mlp_kind(self, index: int) -> str:
        """The second part of a block, counted from 0: `mlp`, where "auto" is "dense" or
        "attention"."""
        if self.mlp != "auto":
            return self.mlp
        return "dense" if self.block_mechanism(index).mlp else "attention"

    @property
    def length(self) -> int:
        """Most positions, including one for the class vector."""
        return self.num_positions(self.max_length)

    def num_positions(self, length: int) -> int:
        """The positions of this many tokens, including one for the class vector."""
        return length // self.patch**2 + self.cls_token

    @property
    def patch_grid(self) -> tuple[int, int] | None:
        """Rows and columns of the positions of an image; None without images."""
        if self.grid is None:
            return None
        rows, columns = self.grid
        return rows // self.patch, columns // self.patch

    @functools.cached_property
    def block_options(self) -> list[dict[str, Any]]:
        """The mechanism's options for each block; {} for those of another mechanism.

        Raises:
          ValueError: a tuple of another length than the blocks, or values that differ
            between blocks that share their arrays.
        """
        for name, value in self.options.items():
            if isinstance(value, tuple) and len(value) != self.num_layers:
                needed = f"one value, or one for each of the {self.num_layers} blocks"
                got = f"{len(value)}: {'/'.join(map(str, value))}"
                raise expected(name, needed, got)
        blocks: list[dict[str, Any]] = [
            {
                name: value[index] if isinstance(value, tuple) else value
                for name, value in self.options.items()
                if self.block_mechanism(index) == self.main
            }
            for index in range(self.num_layers)
        ]
        if any(block.get("sharing") == "layerwise" for block in blocks):
            for name, value in self.options.items():
                if len({repr(block.get(name)) for block in blocks}) > 1:
                    needed = "one value for all blocks, which share their arrays"
                    raise expected(name, f"{needed} with sharing=layerwise", value)
        return [
            one | {"grid": self.at(index).patch_grid}
            if one.get("grid") is True
            else one
            for index, one in enumerate(blocks)
        ]

    @property
    def shares_parameters(self) -> bool:
        """Whether all blocks compute with the first one's arrays of the mechanism."""
        return any(one.get("sharing") == "layerwise" for one in self.block_options)


def _integers(name: str, value: Any, needed: str) -> tuple[int, ...]:
    """The integers of ``"1,2"``, or of a tuple."""
    try:
        if not isinstance(value, str):
            return tuple(map(operator.index, value))
        return tuple(int(part) for part in value.split(",") if value)
    except (TypeError, ValueError):
        raise expected(name, needed, f"{value!r}") from None


def parse_options(text: Text, flag: str = "--model.attention_options") -> dict:
    """Parses ``"clip=5,sharing=none"`` to ``{"clip": 5, "sharing": "none"}``.

    Values are parsed as Python literals if possible (5, 0.1, None, True), also true and
    false, and are strings otherwise. ``features=256/128`` is a tuple, one value for
    each block of the model. Options that are not text stay as they are.

    Raises:
      ValueError: a part without ``=``, or a repeated name; ``flag`` names the text.
    """
    if not isinstance(text, str):
        return dict(text or ())
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise expected(flag, "name=value,...", repr(part))
        if name.strip() in options:
            raise expected(flag, "each option once", f"{name.strip()!r} twice")
        values = [_literal(v.strip()) for v in value.split("/")]
        options[name.strip()] = tuple(values) if len(values) > 1 else values[0]
    return options


# Accepted besides Python's own words, because other settings use them.
_FLAG = {"true": True, "false": False}


def _literal(text: str) -> Any:
    """A text as a number, boolean or None, or else the text itself."""
    if text in _FLAG:
        return _FLAG[text]
    try:
        value = ast.literal_eval(text)
    # The last two: raised by thousands of brackets.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | None) else text
