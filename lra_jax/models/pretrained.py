"""Turns trained softmax models into models with another mechanism, for fine-tuning.

    encoder = from_softmax("bert-base-uncased", "cosformer")   # a folder on disk
    model = from_softmax(load("runs/text-softmax-compact-seed0"), "flow")

Everything is reused: embeddings, norms, MLPs, and the projections of the attention.
The mechanism's own arrays are new. With softmax the model computes the same as before.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention.inputs import check_shape
from lra_jax.attention.masking import check_mask
from lra_jax.attention.registry import resolve
from lra_jax.errors import (
    Count,
    Positive,
    Size,
    check_types,
    expected,
    known,
    reason,
    rename,
    within,
)
from lra_jax.files import expand_home, parse_json, read_bytes, read_json
from lra_jax.models.arrays import read_arrays
from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.encoder import EncoderBlock
from lra_jax.models.inputs import check_range, embed_inputs
from lra_jax.models.layers import Dropout, LayerNorm
from lra_jax.models.mlp import Mlp
from lra_jax.models.norms import RunningMean
from lra_jax.models.padding import order_real_first, reorder
from lra_jax.models.saved import FILE, Saved, own_sizes


@dataclasses.dataclass(frozen=True)
class PretrainedConfig:
    """The sizes of a Hugging Face model.

    Attributes:
      kind: "bert", "roberta" or "gpt2".
      vocab_size, max_length, num_layers, embed_dim, num_heads, mlp_dim: of the model.
      activation: of the MLPs, by Hugging Face's name.
      epsilon: of the layer norms.
      token_types: number of token types; 0 = none.
    """

    kind: str
    vocab_size: Size
    max_length: Size
    num_layers: Size
    embed_dim: Size
    num_heads: Size
    mlp_dim: Size
    activation: str
    epsilon: Positive
    token_types: Count = 0

    @property
    def is_decoder(self) -> bool:
        """Causal, with norms before attention and MLP and a last one; else the norms
        are after each sum."""
        return self.kind == "gpt2"


# Those of an `Mlp`, by Hugging Face's names.
_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "relu": "relu"}


Weights = dict[str, np.ndarray]


class Family(NamedTuple):
    """How Hugging Face writes one kind of model.

    Attributes:
      sizes: the setting in ``config.json`` for each field of a `PretrainedConfig`.
      defaults: of those that may be missing.
      plain: further settings that change what a model computes, with the value that is
        supported here, the default there.
      tables: the name of each array outside the layers, by ours; `norm` a norm's.
      layer: the name of a layer.
      norms, dense: its layer norms and projections, by ours; several of ours are merged
        in one of theirs.
      is_transposed: matrices are `[out, in]`.
      unused: rows of the table of positions before the first.
    """

    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    plain: Mapping[str, Any]
    tables: Mapping[str, str]
    norm: str
    layer: str
    norms: Mapping[str, str]
    dense: Mapping[str, str]
    is_transposed: bool
    unused: int = 0


_BERT = Family(
    sizes={
        "vocab_size": "vocab_size",
        "max_length": "max_position_embeddings",
        "num_layers": "num_hidden_layers",
        "embed_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "activation": "hidden_act",
        "epsilon": "layer_norm_eps",
        "token_types": "type_vocab_size",
    },
    defaults={"activation": "gelu", "epsilon": 1e-12, "token_types": 2},
    plain={"position_embedding_type": "absolute", "is_decoder": False},
    tables={
        "embed.embedding": "embeddings.word_embeddings.weight",
        "positions": "embeddings.position_embeddings.weight",
        "token_types": "embeddings.token_type_embeddings.weight",
    },
    norm="embeddings.LayerNorm",
    layer="encoder.layer",
    norms={
        "attention_norm": "attention.output.LayerNorm",
        "mlp_norm": "output.LayerNorm",
    },
    dense={
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.out": "attention.output.dense",
        "mlp.inner": "intermediate.dense",
        "mlp.outer": "output.dense",
    },
    is_transposed=True,
)
_GPT2 = Family(
    sizes={
        "vocab_size": "vocab_size",
        "max_length": "n_positions",
        "num_layers": "n_layer",
        "embed_dim": "n_embd",
        "num_heads": "n_head",
        "mlp_dim": "n_inner",
        "activation": "activation_function",
        "epsilon": "layer_norm_epsilon",
    },
    defaults={"mlp_dim": None, "activation": "gelu_new", "epsilon": 1e-5},
    plain={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    tables={"embed.embedding": "wte.weight", "positions": "wpe.weight"},
    norm="ln_f",
    layer="h",
    norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    dense={
        "attention.query attention.key attention.value": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.inner": "mlp.c_fc",
        "mlp.outer": "mlp.c_proj",
    },
    is_transposed=False,
)
_FAMILIES = {
    "bert": _BERT,
    # Its tables have a row for padding, and one before it.
    "roberta": _BERT._replace(plain={**_BERT.plain, "pad_token_id": 1}, unused=2),
    "gpt2": _GPT2,
}
# Arrays in the layers of GPT-2 that are not weights, but its causal mask.
_BUFFERS = {"attn.bias", "attn.masked_bias"}
# Parts of a `MultiHeadAttention` that belong to its mechanism.
_PARTS = {"parameters", "gates", "module", "memory_in", "memory_out", "memory_norm"}


class PretrainedEncoder(nnx.Module):
    """BERT, RoBERTa or GPT-2 without a head, around any mechanism.

    BERT and RoBERTa: ``x = LN(x + attention(x))``, ``x = LN(x + mlp(x))`` over
    ``LN(token + position + type)``. GPT-2: ``x = x + attention(LN(x))``,
    ``x = x + mlp(LN(x))`` over ``token + position``, and a last norm.

    Args:
      config: the sizes.
      mechanism, options: the attention, see `MultiHeadAttention`.
      dropout: rate on embeddings, attention and MLP, in calls with ``rngs``.
      rngs: for initialisation.

    Raises:
      ValueError: see `MultiHeadAttention`; or arrays shared by all blocks.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        mechanism: Any,
        *,
        options: Mapping[str, Any] | None = None,
        dropout: float = 0.1,
        rngs: nnx.Rngs,
    ):
        self.config = config
        if dict(options or ()).get("sharing") == "layerwise":
            needed = "another value for a pretrained model, whose blocks share nothing"
            raise expected("sharing", needed, "'layerwise'")
        width = config.embed_dim
        rows = config.max_length + _FAMILIES[config.kind].unused
        self.embed = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((rows, width), jnp.float32))
        types = jnp.zeros((config.token_types, width), jnp.float32)
        self.token_types = nnx.Param(types) if config.token_types else None
        self.norm = LayerNorm(width, epsilon=config.epsilon)
        self.dropout = Dropout(dropout)

        def block(index: int) -> EncoderBlock:
            attention = MultiHeadAttention(
                config.num_heads,
                width,
                mechanism=mechanism,
                options=options,
                max_length=config.max_length,
                is_causal=config.is_decoder,
                layer=index,
                num_layers=config.num_layers,
                rngs=rngs,
            )
            activation = _ACTIVATIONS[config.activation]
            mlp = Mlp(width, config.mlp_dim, activation=activation, rngs=rngs)
            return EncoderBlock(
                attention,
                mlp,
                width,
                post_norm=not config.is_decoder,
                dropout=dropout,
                epsilon=config.epsilon,
            )

        self.blocks = nnx.List([block(index) for index in range(config.num_layers)])

    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """The last hidden state, `[B, T, D]`; arguments as in `hidden_states`."""
        return self.hidden_states(tokens, mask, rngs, token_types=token_types)[-1]

    def hidden_states(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        token_types: jax.Array | None = None,
    ) -> list[jax.Array]:
        """The embeddings and the output of each layer, `[B, T, D]` each.

        Args:
          tokens: integer `[B, T]`.
          mask: boolean `[B, T]`, True at real tokens; None = all. Padding may be
            anywhere in a row: positions count the real tokens.
          rngs: with a stream "dropout", for training; None for evaluation.
          token_types: integer `[B, T]`, BERT's sentence A (0) or B (1); None = 0.

        Raises:
          ValueError: arrays of other shapes, more tokens than positions, or token types
            that the model does not have.
        """
        check_shape("tokens", tokens, "B T", None, None)
        config, (batch, length) = self.config, tokens.shape
        if length > config.max_length:
            needed = f"[B, T] with T <= {config.max_length}"
            raise expected("tokens", needed, tokens.shape)
        mask = check_mask("mask", mask, "B T", {1, batch}, length)
        if token_types is not None and self.token_types is None:
            needed = f"None, since a {config.kind} model has no token types"
            raise expected("token_types", needed, "an array")
        if token_types is not None:
            check_shape("token_types", token_types, "B T", batch, length)
            check_range("token_types", token_types, config.token_types - 1, "types")
        back = None
        if mask is not None:
            mask = jnp.broadcast_to(mask, tokens.shape)
            order, back = order_real_first(mask)
            tokens, mask = reorder(tokens, order), reorder(mask, order)
            if token_types is not None:
                token_types = reorder(token_types, order)
        first = _FAMILIES[config.kind].unused
        x = embed_inputs(self.embed, tokens)
        x = x + self.positions[...][None, first : first + length]
        if self.token_types is not None:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            x = x + self.token_types[...][types]
        x = self.dropout(x if config.is_decoder else self.norm(x), rngs)
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], mask, rngs))
        if config.is_decoder:
            states[-1] = self.norm(states[-1])
        return states if back is None else [reorder(state, back) for state in states]


def from_softmax(
    source: Any,
    mechanism: Any = "softmax",
    *,
    options: Mapping[str, Any] | None = None,
    dropout: float = 0.1,
    rngs: nnx.Rngs | None = None,
) -> Any:
    """A trained softmax model with another attention.

    Args:
      source: a folder with ``config.json`` and ``model.safetensors``, in one file or in
        several with an index, of a BERT, RoBERTa or GPT-2, as Hugging Face writes them;
        or any model that `lra_jax.models.save` takes, or the result of
        `lra_jax.models.load`.
      mechanism: a registered name, a function or ``"package.module:function"``, with
        queries, keys and values of the same widths.
      options: of the mechanism, replacing those of softmax.
      dropout: of a `PretrainedEncoder`; models of this package keep theirs.
      rngs: for the mechanism's own arrays; None = seed 0.

    Returns:
      A `PretrainedEncoder`, or a model of the same kind as the source.

    Raises:
      ValueError: the files are damaged or of another model, or the mechanism does not
        use the projections.
    """
    rngs = nnx.Rngs(params=0) if rngs is None else rngs
    parts = {"query", "key", "value", "out"}
    entry = resolve(mechanism, "mechanism")
    if not parts <= set(entry.projections):
        needed = "one with queries, keys, values and an output to project"
        raise expected("mechanism", needed, f"{entry.name!r}")
    if not isinstance(source, str | os.PathLike):
        return _of_ours(source, mechanism, options, rngs)
    folder = expand_home(source, "source")
    if not (folder / "config.json").exists():
        needed = "a folder with the config.json of a BERT, RoBERTa or GPT-2"
        raise expected("source", needed, f"{folder}, which has none")
    if (folder / FILE).with_suffix(".json").exists():
        needed = "a folder of a BERT, RoBERTa or GPT-2, or a loaded model"
        raise expected(
            "source", needed, f"the run {folder}: pass `load(...)` of it instead"
        )
    config = read_config(folder / "config.json")
    weights = read_weights(*_weight_files(folder))
    arrays = _convert(weights, config)
    _check_left(weights, config)
    model = PretrainedEncoder(
        config, mechanism, options=options, dropout=dropout, rngs=rngs
    )
    fill(model, arrays, str(folder))
    return model


def read_config(file: Path) -> PretrainedConfig:
    """The sizes in a Hugging Face ``config.json``.

    Raises:
      ValueError: it is missing, of another kind of model, or of one that computes
        something else.
    """
    needed = "the config of a BERT, RoBERTa or GPT-2"
    try:
        values = read_json(file, needed)
        kind = known("model_type", values["model_type"], _FAMILIES)
        family = _FAMILIES[kind]
        stored = {
            name: values.get(theirs, family.defaults[name])
            if name in family.defaults
            else values[theirs]
            for name, theirs in family.sizes.items()
        }
        stored["mlp_dim"] = stored["mlp_dim"] or 4 * stored["embed_dim"]
        stored["max_length"] -= family.unused
        config = PretrainedConfig(kind=kind, **stored)
    except (OSError, KeyError, TypeError) as error:
        raise expected(str(file), needed, reason(error)) from error
    try:
        check_types(config)
    except ValueError as error:
        raise within(str(file), error) from error
    known("activation", config.activation, _ACTIVATIONS)
    for name, plain in family.plain.items():
        value = values.get(name, plain)
        if value != plain:
            raise expected(str(file), f"{name}={plain!r}", f"{value!r}")
    return config


def read_weights(*files: Path) -> dict[str, np.ndarray]:
    """The arrays of a model's files, without the name prefixes that heads add.

    Raises:
      ValueError: not safetensors files.
    """
    weights = {}
    for file in files:
        for name, array in read_arrays(file).items():
            name = re.sub(r"^(bert|roberta|transformer)\.", "", name)
            # Names in the first releases of BERT.
            name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
            weights[name] = np.asarray(array)
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """``model.safetensors``, or the files that its index lists."""
    file, index = (folder / f"model.safetensors{end}" for end in ("", ".index.json"))
    if file.exists() or not index.exists():
        if not file.exists() and any(folder.glob("*.bin")):
            needed = "safetensors files (`save_pretrained` of transformers writes them)"
            raise expected("source", needed, f"{folder} with .bin files")
        return [file]
    try:
        places = parse_json(read_bytes(index))["weight_map"]
        return sorted({folder / Path(place).name for place in places.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise expected(str(index), "an index of weights", reason(error)) from error


def _check_left(weights: Weights, config: PretrainedConfig) -> None:
    """Refuses a file whose layers have parts, or are more, than the config says."""
    for name in sorted(weights):
        layer = re.match(r"(?:encoder\.layer|h)\.(\d+)\.", name)
        if layer is None or name[layer.end() :] in _BUFFERS:
            continue
        needed = f"{config.num_layers} layers, as config.json says"
        if int(layer[1]) < config.num_layers:
            needed = f"the arrays of a plain {config.kind} layer"
        raise expected("model.safetensors", needed, f"{name} as well")


def _convert(weights: Weights, config: PretrainedConfig) -> dict[str, np.ndarray]:
    """Takes the arrays of a model out of the weights; under this package's names."""
    family = _FAMILIES[config.kind]
    arrays = {ours: _take(weights, name) for ours, name in family.tables.items()}
    arrays |= _norm(weights, family.norm, "norm")
    for index in range(config.num_layers):
        theirs, block = f"{family.layer}.{index}", f"blocks.{index}"
        for ours, name in family.norms.items():
            arrays |= _norm(weights, f"{theirs}.{name}", f"{block}.{ours}")
        for ours, name in family.dense.items():
            kernel = _take(weights, f"{theirs}.{name}.weight")
            kernel = kernel.T if family.is_transposed else kernel
            bias = _take(weights, f"{theirs}.{name}.bias")
            places = ours.split()
            for part, x in {"kernel": kernel, "bias": bias}.items():
                split = np.array_split(x, len(places), -1)  # Uneven ones do not fit.
                for place, one in zip(places, split, strict=True):
                    arrays[f"{block}.{place}.{part}"] = one
    return arrays


def _take(weights: Weights, name: str) -> np.ndarray:
    """Takes an array, in float32."""
    if name not in weights:
        raise expected("model.safetensors", f"an array {name}", "none")
    array = weights.pop(name)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        needed = f"{name} of a floating dtype, not quantised"
        raise expected("model.safetensors", needed, array.dtype)
    return array.astype(np.float32)


def _norm(weights: Weights, theirs: str, ours: str) -> dict[str, np.ndarray]:
    return {
        f"{ours}.scale": _take(weights, f"{theirs}.weight"),
        f"{ours}.bias": _take(weights, f"{theirs}.bias"),
    }


# Other buffers are a mechanism's own.
_COPIED = (nnx.Param, RunningMean)


def fill(model: nnx.Module, arrays: Mapping[str, Any], source: str) -> None:
    """Sets the parameters and running means of these names; the mechanism's own arrays
    are left unchanged.

    Raises:
      ValueError: an array is missing, left over, or has another shape; the message
        begins with ``source``.
    """
    left = dict(arrays)
    for path, variable in nnx.to_flat_state(nnx.state(model, _COPIED)):
        name = ".".join(map(str, path))
        if name not in left:
            if _PARTS.intersection(path):
                continue
            raise expected(source, f"an array for {name}", "none")
        # A copy: training one of two models must not overwrite the other's arrays.
        array = jnp.array(left.pop(name), variable.dtype)
        if array.shape != variable.shape:
            needed = f"{name} of shape {variable.shape}"
            raise expected(source, needed, array.shape)
        variable[...] = array
    if left:
        raise expected(source, "no further arrays", ", ".join(left))


def _of_ours(source: Any, mechanism: Any, options: Any, rngs: nnx.Rngs) -> nnx.Module:
    model = source.model if isinstance(source, Saved) else source
    try:
        sizes, config = own_sizes(model), model.encoder.config
    except ValueError as error:
        raise rename(error, "source") from error
    names = {one.name for one in config.turn}
    if names != {"softmax"}:
        got = f"one of {', '.join(map(repr, sorted(names)))}"
        raise expected("source", "a model of softmax attention", got)
    entry = resolve(mechanism)
    if config.gate and any(g.name == "gate" for g in entry.gates):
        needed = "one without a gate, since the source has its own"
        raise expected("mechanism", needed, f"{entry.name!r}")
    config = dataclasses.replace(
        config, mechanism=mechanism, attention_options=options or "", hybrid=""
    )
    new = type(model)(**sizes, config=config, rngs=rngs)
    state = nnx.to_flat_state(nnx.state(model, _COPIED))
    old = {".".join(map(str, path)): array[...] for path, array in state}
    fill(new, old, "source")
    return new
