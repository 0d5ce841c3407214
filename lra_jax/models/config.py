"""The settings of a model: one frozen object, checked where it is made.

A module takes it as ``config=...``, or takes its fields as keywords and builds one.
`EncoderConfig.layers` are the settings of each attention layer of an encoder.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flax import nnx

from lra_jax.attention import own, registry
from lra_jax.attention.inputs import Grid, check_sides
from lra_jax.errors import Size, a_thing, check_types, did_you_mean, expected, within
from lra_jax.models.layers import check_even
from lra_jax.models.options import named, split_options
from lra_jax.models.product_keys import memory_sizes
from lra_jax.models.settings import EncoderSettings, LayerSettings

Options = Mapping[str, Any] | tuple[tuple[str, Any], ...] | None
Config = TypeVar("Config", "AttentionConfig", "EncoderConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedConfig(LayerSettings):
    """The settings that encoders and their attention layers have in the same form."""

    qkv_features: Size | None = None
    """Total width N * H of all heads; None = the model's width."""
    num_kv_heads: Size | None = None
    """Heads of keys and values, each shared by an equal number of adjacent query heads;
    None = N. 1 is multi-query attention."""
    mechanism: Any = "cosformer"
    """A registered name (``python -m lra_jax.attention`` lists them), a function
    ``(query, key, value, ...)`` of `[B, T, N, H]` arrays, a class or factory of
    ``nnx.Module`` called in the same way, or anything else that
    `lra_jax.attention.resolve` accepts. A function is given those of the keywords mask
    (`[B, 1, 1, S]`), query_mask, max_length and is_causal that it takes."""
    options: Options = ()
    """Further keywords of the mechanism, as in ``{"clip": None}``, or of its arrays, as
    in ``{"features": 128}`` for Linformer; kept as a tuple of pairs."""
    dtype: Any = None
    """Dtype of the computation; parameters are float32."""

    def __post_init__(self):
        _keep(self, options=_pairs(self.options))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.integer):
                _keep(self, **{field.name: int(value)})
        check_types(self)


class Widths(NamedTuple):
    """Number of heads, columns of their queries and keys, and of their values."""

    num_heads: int
    head_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(SharedConfig):
    """The settings of a `MultiHeadAttention`: those of `SharedConfig`, and these.

    ``mechanism`` is kept as a `Mechanism`.

    Attributes:
      num_heads: number of heads N; must divide ``qkv_features``.
      in_features: width D of the inputs.
      out_features: width of the output; None = ``in_features``.
      max_length: longest sequence. It is cosFormer's M (a fixed M makes the output
        independent of padding) and the width of Linformer's projections (required).
      own_parameters: False for a layer that uses another layer's arrays for its
        mechanism (layerwise sharing); then every call needs ``parameters``.
      rotary: rotate queries and keys by their positions (RoPE, arXiv:2104.09864), for
        self-attention. Where scores are inner products of queries and keys (softmax,
        windows, patterns) they depend only on the difference of positions. A mechanism
        that first applies a feature map to queries and keys sees rotated vectors, which
        encode positions, but not only through their differences. Deviation: column pair
        c turns by 10000^(-c / (H/2 - 1)) per position, as in retention, where RoPE has
        10000^(-2c / H).
      use_bias: biases in the four projections.
      conv_grid: rows and columns of images; the convolution is then over squares of
        ``short_conv`` by ``short_conv`` pixels. None = over the sequence.
      layer: index of the layer in its model, from 0. A mechanism's initial arrays may
        depend on it, and on ``num_layers``. In a mechanism with a memory, as Luna, all
        but the first layer take that of the previous layer, and all but the last give
        one (`MultiHeadAttention.attend`), unless they are causal.
      num_layers: number of layers of the model.

    Raises:
      ValueError: a size below 1, heads that do not divide the width, an unknown
        mechanism or option, ``is_causal`` with a mechanism that has no causal form, or
        ``rotary`` with a mechanism without queries and keys.
    """

    num_heads: Size
    in_features: Size
    out_features: Size | None = None
    max_length: Size | None = None
    own_parameters: bool = True
    rotary: bool = False
    use_bias: bool = True
    conv_grid: Grid = None
    layer: int = 0
    num_layers: int = 1

    def __post_init__(self):
        _keep(self, mechanism=registry.resolve(self.mechanism, "mechanism"))
        super().__post_init__()
        width = self.qkv_features or self.in_features
        if width % self.num_heads:
            needed = f"a divisor of qkv_features={width}"
            raise expected("num_heads", needed, self.num_heads)
        if self.num_heads % (self.num_kv_heads or 1):
            needed = f"a divisor of num_heads={self.num_heads}"
            raise expected("num_kv_heads", needed, self.num_kv_heads)
        self._check_mechanism()
        if self.conv_grid is not None:
            check_sides("conv_grid", self.conv_grid)
            if self.is_causal:
                raise expected("conv_grid", "None with is_causal=True", self.conv_grid)

    def _check_mechanism(self) -> None:
        """Refuses what a mechanism cannot do, or would ignore."""
        mechanism = self.mechanism
        name, projections = repr(mechanism.name), set(mechanism.projections)
        split_options(mechanism, dict(self.options or ()))
        causal = mechanism.causal is not False and self.accepts("is_causal")
        if self.is_causal and not causal:
            needed = "one with a causal form, for is_causal=True"
            raise expected("mechanism", needed, name)
        free = mechanism.layout is None and {"key", "value"} <= projections
        if self.num_kv_heads is not None and not free:
            needed = f"None for {name}, which has its own heads"
            raise expected("num_kv_heads", needed, self.num_kv_heads)
        if self.rotary:
            if not {"query", "key"} <= projections:
                needed = "a mechanism that has queries and keys to rotate"
                raise expected("rotary", needed, name)
            check_even("rotary", self.widths.head_dim, "head width H")
        # Without a projection, that end of the layer is as wide as the heads.
        width = self.widths.num_heads * self.widths.value_dim
        out = self.out_features or self.in_features
        for end, features in {"value": self.in_features, "out": out}.items():
            if end not in projections and features != width:
                reason = f"because {name} has no projection {end!r}"
                raise expected("qkv_features", f"{features}, {reason}", width)

    @functools.cached_property
    def widths(self) -> Widths:
        """The widths that the mechanism prescribes, or those asked for."""
        make = self.mechanism.make_layout
        if make is None:
            head_dim = (self.qkv_features or self.in_features) // self.num_heads
            return Widths(self.num_heads, head_dim, head_dim)
        taken = named(make)
        options = dict(self.options or ())
        sizes = {name: x for name, x in options.items() if name in taken}
        return Widths(*make(self.in_features, **sizes))

    @functools.cached_property
    def parameter_options(self) -> dict[str, Any]:
        """The options of the mechanism's own arrays."""
        return split_options(self.mechanism, dict(self.options or ()))[0]

    @functools.cached_property
    def keywords(self) -> dict[str, Any]:
        """The non-array keywords of every call of the mechanism."""
        both = {"max_length": self.max_length, "is_causal": self.is_causal}
        options = split_options(self.mechanism, dict(self.options or ()))[1]
        return {n: v for n, v in both.items() if self.accepts(n)} | options

    def accepts(self, keyword: str) -> bool:
        """Whether the mechanism's function takes this keyword."""
        return self._accepted is None or keyword in self._accepted

    @functools.cached_property
    def _accepted(self) -> frozenset[str] | None:
        if self.mechanism.make is None:
            return registry.accepted_keywords(self.mechanism.attention)
        # Made without its arrays, only to see how it is called.
        try:
            made = nnx.eval_shape(lambda: self.make_module(nnx.Rngs(params=0)))
        except Exception as error:
            if isinstance(error, ValueError) and ": expected " in str(error):
                raise
            needed = f"{self.mechanism.name!r} to make an nnx.Module"
            raise expected("attention", needed, repr(error)) from error
        return registry.accepted_keywords(made)

    @functools.cached_property
    def gates(self) -> tuple[registry.Gate, ...]:
        """The mechanism's additional projections that its options ask for."""
        return self.mechanism.gates_with(dict(self.options or ()))

    @property
    def offered(self) -> dict[str, int | None]:
        """The arguments that a maker of arrays or modules may take by name."""
        return {
            "max_length": self.max_length,
            "num_heads": self.widths.num_heads,
            "head_dim": self.widths.head_dim,
            "layer": self.layer,
            "num_layers": self.num_layers,
        }

    def make_module(self, rngs: nnx.Rngs) -> Any:
        """The module, if the mechanism is a user's module, else None.

        Raises:
          ValueError: it cannot be called with query, key and value.
        """
        make = self.mechanism.make
        if make is None:
            return None
        known = self.offered | {"rngs": rngs}
        taken = {name: x for name, x in known.items() if name in named(make)}
        made = make(**taken, **self.parameter_options)
        if not isinstance(made, nnx.Module) or not callable(made):
            needed = f"{self.mechanism.name!r} to make an nnx.Module with a __call__"
            raise expected("attention", needed, a_thing(made))
        own.check_call(made, self.mechanism.name)
        return made

    @property
    def adds_gate(self) -> bool:
        """Whether the layer gates its output, because the mechanism does not."""
        return self.gate and all(g.name != "gate" for g in self.mechanism.gates)

    @property
    def carries_memory(self) -> bool:
        """Whether a memory is passed from layer to layer."""
        return self.mechanism.memory is not None and not self.is_causal


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(EncoderSettings, SharedConfig):
    """The settings of a `TransformerEncoder`: `EncoderSettings`, `SharedConfig`, and
    these.

    A mechanism that also does the MLP's work, such as a gated attention unit, replaces
    it. ``options`` are for every block; a tuple holds one value per block, as in
    ``{"features": (256, 128)}``. With ``{"sharing": "layerwise"}`` all blocks use the
    first one's arrays of the mechanism (Linformer); ``{"grid": True}`` means this
    config's grid, in patches.

    Attributes:
      mlp_options: sizes of the memory for ``mlp="product_key"``, as in ``{"keys": 32}``
        (`lra_jax.models.product_keys`).
      hybrid: mechanisms that the blocks take in turn, ``mechanism`` among them, as in
        ``("hgrn", "cosformer")``; () = ``mechanism`` in every block. ``options`` are
        only for ``mechanism``.
      reconstructs: a learned vector, initially zero, can replace tokens, which a linear
        head of the classifiers then reconstructs.
      cls_token: put a learned vector, initially zero, before the tokens.
      cutoffs: token ids, increasing, at which clusters of rarer tokens begin, with
        narrower embeddings (`lra_jax.models.adaptive`); none = the same width for all.
        Their tables have scales of their own, whatever ``embed_std`` is.
      grid: rows and columns of an image, for positions "learned_2d", for ``conv_grid``
        and for ``patch``.
      remat: keep only each block's input for the backward pass, and recompute the rest:
        less memory for about a third more arithmetic, with the same results. Not with
        norm "batch".

    Raises:
      ValueError: an impossible size, rate or name, options that neither MLP nor
        mechanism takes or that do not fit the number of blocks, or blocks that cannot
        be mixed because they pass something on. Those of `AttentionConfig` come from
        ``layers``.
    """

    mlp_options: Options = ()
    hybrid: tuple[Any, ...] = ()
    reconstructs: bool = False
    cls_token: bool = False
    cutoffs: tuple[int, ...] = ()
    grid: Grid = None
    remat: bool = False

    def __post_init__(self):
        _keep(self, mlp_options=_pairs(self.mlp_options))
        for name in ("hybrid", "cutoffs"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise expected(name, "a tuple", f"{value!r}")
            _keep(self, **{name: tuple(value)})
        if isinstance(self.grid, list):
            _keep(self, grid=tuple(self.grid))
        super().__post_init__()
        if self.mlp == "product_key":
            try:
                memory_sizes(dict(self.mlp_options or ()))
            except ValueError as error:
                raise within("mlp_options", error) from error
        if self.positions == "sinusoidal":
            check_even("embed_dim", self.embed_dim, "width for sinusoidal positions")
        ids = [c for c in self.cutoffs if isinstance(c, int | np.integer) and c > 0]
        if list(self.cutoffs) != sorted(set(ids)):
            raise expected("cutoffs", "increasing positive ids", self.cutoffs)
        if self.hybrid:
            self._check_hybrid()
        self._check_order()
        self._check_images()
        if self.reconstructs and self.inputs == "vectors":
            needed = "False with inputs='vectors', which have no ids to reconstruct"
            raise expected("reconstructs", needed, True)

    def _check_order(self) -> None:
        """Refuses what would show later positions, or lose running means."""
        if self.is_causal and self.cls_token:
            needed = "False with is_causal, where the first position sees no other"
            raise expected("cls_token", needed, True)
        if self.is_causal and self.norm != "layer":
            needed = "'layer' with is_causal, where no position sees later ones"
            raise expected("norm", needed, f"{self.norm!r}")
        if self.remat and self.norm == "batch":
            needed = "False with norm='batch', whose running means must be kept"
            raise expected("remat", needed, True)

    def _check_images(self) -> None:
        """Refuses what needs pixels or patches, seen alike, where there are none."""
        if self.positions == "learned_2d" and self.grid is None:
            needed = "the rows and columns of the images for positions='learned_2d'"
            raise expected("grid", needed, None)
        option = any(block.get("grid") is True for block in self.block_options)
        for name, kind, used in (
            ("conv_grid", "", self.conv_grid),
            ("grid", "the option ", option),
        ):
            if used and self.grid is None:
                needed = f"an image task for {name}=True"
                raise expected(name, needed, "one without images")
            for other in ("cls_token", "is_causal"):
                if used and getattr(self, other):
                    raise expected(other, f"False with {kind}{name}=True", True)
        if self.patch == 1:
            return
        if self.grid is None:
            raise expected("patch", "1 without images", self.patch)
        rows, columns = self.grid
        if rows % self.patch or columns % self.patch:
            needed = f"a divisor of both sides of {rows} x {columns} images"
            raise expected("patch", needed, self.patch)
        if self.inputs != "linear":
            needed = "1 with inputs='embedding', which has a row for each pixel value"
            raise expected("patch", needed, self.patch)

    def _check_hybrid(self) -> None:
        names = ", ".join(one.name for one in self._turn)
        if self._main not in self._turn:
            needed = f"mechanisms with {self._main.name!r} among them"
            raise expected("hybrid", needed, names)
        if len(self._turn) > self.num_layers:
            needed = f"at most one for each of the {self.num_layers} blocks"
            raise expected("hybrid", needed, f"{len(self._turn)}: {names}")
        for name, value in dict(self.options or ()).items():
            if isinstance(value, tuple):
                needed = "one value with hybrid"
                raise expected(name, needed, "/".join(map(str, value)))
        if self.shares_parameters:
            needed = "another value with hybrid, whose blocks have arrays of their own"
            raise expected("sharing", needed, "'layerwise'")
        for one in self._turn:
            if one.memory is not None and not self.is_causal:
                needed = "mechanisms that pass no memory to the next block"
                raise expected("hybrid", needed, f"{one.name!r}")

    @functools.cached_property
    def _main(self) -> registry.Mechanism:
        return registry.resolve(self.mechanism, "mechanism")

    @functools.cached_property
    def _turn(self) -> tuple[registry.Mechanism, ...]:
        """The mechanisms that the blocks take in turn."""
        if not self.hybrid:
            return (self._main,)
        return tuple(registry.resolve(one, "hybrid") for one in self.hybrid)

    def block_mechanism(self, index: int) -> registry.Mechanism:
        """The mechanism of a block, counted from 0."""
        return self._turn[index % len(self._turn)]

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
    def patch_grid(self) -> Grid:
        """Rows and columns of the positions of an image; None without images."""
        if self.grid is None:
            return None
        rows, columns = self.grid
        return rows // self.patch, columns // self.patch

    @functools.cached_property
    def block_options(self) -> list[dict[str, Any]]:
        """The mechanism's options for each block; {} for those of another mechanism."""
        options = _options_by_block(dict(self.options or ()), self.num_layers)
        main = [self.block_mechanism(i) == self._main for i in range(self.num_layers)]
        return [
            one if is_main else {} for one, is_main in zip(options, main, strict=True)
        ]

    @property
    def shares_parameters(self) -> bool:
        """Whether all blocks compute with the first one's arrays of the mechanism."""
        return any(one.get("sharing") == "layerwise" for one in self.block_options)

    @functools.cached_property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The attention settings of each block.

        Raises:
          ValueError: see `AttentionConfig`; that of a hybrid's other mechanism says so.
        """
        return tuple(map(self._layer, range(self.num_layers)))

    def _layer(self, index: int) -> AttentionConfig:
        mechanism, options = self.block_mechanism(index), self.block_options[index]
        if options.get("grid") is True:
            options = options | {"grid": self.patch_grid}
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(SharedConfig)
        }
        settings = shared | {"mechanism": mechanism, "options": options}
        try:
            return AttentionConfig(
                **settings,
                num_heads=self.num_heads,
                in_features=self.embed_dim,
                max_length=self.length,
                own_parameters=index == 0 or not self.shares_parameters,
                rotary=self.positions == "rotary",
                use_bias=self.qkv_bias,
                conv_grid=self.patch_grid if self.conv_grid else None,
                layer=index,
                num_layers=self.num_layers,
            )
        except ValueError as error:
            if mechanism == self._main:
                raise
            raise within("hybrid", error) from error


# The command line's name of a setting.
_ALIASES = {"attention": "mechanism"}


def make_config(
    kind: type[Config], config: Config | None, settings: Mapping[str, Any]
) -> Config:
    """``kind(**settings)``, or the given config with these settings changed.

    Raises:
      ValueError: an unknown setting.
    """
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in settings:
        if name not in fields:
            hint = did_you_mean(_ALIASES.get(name, name), fields)
            needed = f"a setting of {kind.__name__}"
            raise expected(name, needed, f"an unknown one{hint}")
    if config is None:
        return kind(**settings)
    return dataclasses.replace(config, **settings)


def _options_by_block(
    options: Mapping[str, Any], num_layers: int
) -> list[dict[str, Any]]:
    """A mechanism's options for each block; a tuple holds one value per block.

    Raises:
      ValueError: a tuple of another length, sharing set for some blocks only, or sizes
        that differ between blocks that share their arrays.
    """
    for name, value in options.items():
        if isinstance(value, tuple) and len(value) != num_layers:
            needed = f"one value, or one for each of the {num_layers} blocks"
            got = f"{len(value)}: {'/'.join(map(str, value))}"
            raise expected(name, needed, got)
    blocks = [
        {k: v[index] if isinstance(v, tuple) else v for k, v in options.items()}
        for index in range(num_layers)
    ]
    if any(block.get("sharing") == "layerwise" for block in blocks):
        for name, value in options.items():
            if len({repr(block[name]) for block in blocks}) > 1:
                needed = "one value for all blocks, which share their arrays"
                raise expected(name, f"{needed} with sharing=layerwise", value)
    return blocks


def _keep(config: Any, **values: Any) -> None:
    """Sets fields of a frozen config while it is being made."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


def _pairs(options: Options) -> tuple[tuple[str, Any], ...]:
    """A tuple, so that modules with these options are hashable."""
    return tuple(dict(options or ()).items())
