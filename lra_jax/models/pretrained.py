"""Turns trained softmax models into models with another mechanism, for fine-tuning.

    encoder = from_softmax("bert-base-uncased", "cosformer")   # a folder on disk
    model = from_softmax(load("runs/text-softmax-compact-seed0"), "flow")

Everything is reused: embeddings, norms, MLPs, and the projections of the attention.
The mechanism's own arrays are new. With softmax the model computes the same as before.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention.inputs import check_eps, check_shape, check_size
from lra_jax.attention.masking import check_mask
from lra_jax.attention.registry import resolve
from lra_jax.errors import expected, known, reason, renamed, within
from lra_jax.files import expand_home, parse_json, read_bytes, read_json
from lra_jax.models.arrays import read_arrays
from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.batch_norm import RunningMean
from lra_jax.models.inputs import check_ids, embed_inputs
from lra_jax.models.layers import Dense, Dropout, LayerNorm
from lra_jax.models.padding import order_real_first, reorder
from lra_jax.models.saved import FILE, Saved, own_sizes


class PretrainedConfig(NamedTuple):
    """The sizes of a Hugging Face model.

    Attributes:
      kind: "bert", "roberta" or "gpt2".
      vocab_size, max_length, num_layers, embed_dim, num_heads, mlp_dim: of the model.
      activation: of the MLPs, by Hugging Face's name.
      epsilon: of the layer norms.
      token_types: number of token types; 0 = none.
    """

    kind: str
    vocab_size: int
    max_length: int
    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    activation: str
    epsilon: float
    token_types: int

    @property
    def is_causal(self) -> bool:
        """Whether each position sees only itself and those before it."""
        return self.kind == "gpt2"

    @property
    def norm_first(self) -> bool:
        """Norms before attention and MLP, and a last one; else after each sum."""
        return self.kind == "gpt2"


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "relu": jax.nn.relu,
}
# Settings of Hugging Face models that change what they compute, with the value that is
# supported here, the default there.
_PLAIN: dict[str, dict[str, Any]] = {
    "bert": {"position_embedding_type": "absolute", "is_decoder": False},
    "roberta": {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "pad_token_id": 1,
    },
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
}
# RoBERTa's tables have a row for padding, and one before it.
_UNUSED = {"roberta": 2}
# Arrays in the layers of GPT-2 that are not weights, but its causal mask.
_BUFFERS = {"attn.bias", "attn.masked_bias"}
# Parts of a `MultiHeadAttention` that belong to its mechanism.
_OWN = {"parameters", "gates", "module", "memory_in", "memory_out", "memory_norm"}


class PretrainedBlock(nnx.Module):
    """One layer of `PretrainedEncoder`."""

    def __init__(
        self,
        config: PretrainedConfig,
        attention: MultiHeadAttention,
        dropout: float,
        rngs: nnx.Rngs,
    ):
        width, epsilon = config.embed_dim, config.epsilon
        self.attention_norm = LayerNorm(width, epsilon=epsilon)
        self.attention = attention
        self.mlp_norm = LayerNorm(width, epsilon=epsilon)
        self.inner = Dense(width, config.mlp_dim, rngs=rngs)
        self.outer = Dense(config.mlp_dim, width, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.activation = config.activation
        self.norm_first = config.norm_first

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, rngs: nnx.Rngs | None
    ) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`; ``mask`` `[B, T]` is True at real tokens."""

        def attend(x: jax.Array) -> jax.Array:
            return self.attention(x, mask=mask)

        parts = (self.attention_norm, attend), (self.mlp_norm, self.mlp)
        for norm, branch in parts:
            inner = self.apply_norm(norm, x, after=False)
            x = x + self.dropout(branch(inner), rngs)
            x = self.apply_norm(norm, x, after=True)
        return x

    def apply_norm(self, norm: LayerNorm, x: jax.Array, *, after: bool) -> jax.Array:
        """As of an `EncoderBlock`."""
        return x if after == self.norm_first else norm(x)

    def mlp(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`, without norm and skip connection."""
        return self.outer(_ACTIVATIONS[self.activation](self.inner(x)))


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
            requirement = (
                "another, since each block of a pretrained model has its own arrays"
            )
            raise expected("sharing", requirement, "'layerwise'")
        width = config.embed_dim
        rows = config.max_length + _UNUSED.get(config.kind, 0)
        self.embed = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((rows, width), jnp.float32))
        types = jnp.zeros((config.token_types, width), jnp.float32)
        self.token_types = nnx.Param(types) if config.token_types else None
        self.norm = LayerNorm(width, epsilon=config.epsilon)
        self.dropout = Dropout(dropout)

        def block(index: int) -> PretrainedBlock:
            attention = MultiHeadAttention(
                config.num_heads,
                width,
                mechanism=mechanism,
                options=options,
                max_length=config.max_length,
                is_causal=config.is_causal,
                layer=index,
                num_layers=config.num_layers,
                rngs=rngs,
            )
            return PretrainedBlock(config, attention, dropout, rngs)

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
            requirement = f"[B, T] with T <= {config.max_length}"
            raise expected("tokens", requirement, tokens.shape)
        mask = check_mask("mask", mask, "B T", {1, batch}, length)
        if token_types is not None:
            self._check_types(token_types, batch, length)
        if mask is None:
            return self._states(tokens, None, rngs, token_types)
        mask = jnp.broadcast_to(mask, tokens.shape)
        order, back = order_real_first(mask)
        tokens, mask = reorder(tokens, order), reorder(mask, order)
        if token_types is not None:
            token_types = reorder(token_types, order)
        states = self._states(tokens, mask, rngs, token_types)
        return [reorder(state, back) for state in states]

    def _states(
        self,
        tokens: jax.Array,
        mask: jax.Array | None,
        rngs: nnx.Rngs | None,
        token_types: jax.Array | None,
    ) -> list[jax.Array]:
        """`hidden_states` of checked arguments, with padding at the end of rows."""
        config = self.config
        first = _UNUSED.get(config.kind, 0)
        x = embed_inputs(self.embed, tokens)
        x = x + self.positions[...][None, first : first + tokens.shape[1]]
        if self.token_types is not None:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            x = x + self.token_types[...][types]
        x = self.dropout(x if config.norm_first else self.norm(x), rngs)
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], mask, rngs))
        if config.norm_first:
            states[-1] = self.norm(states[-1])
        return states

    def _check_types(self, token_types: jax.Array, batch: int, length: int) -> None:
        config = self.config
        if self.token_types is None:
            requirement = f"None, since a {config.kind} model has no token types"
            raise expected("token_types", requirement, "an array")
        check_shape("token_types", token_types, "B T", batch, length)
        check_ids("token_types", token_types, config.token_types, "types")


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
    needed = {"query", "key", "value", "out"}
    entry = resolve(mechanism, "mechanism")
    if not needed <= set(entry.projections):
        requirement = "one with queries, keys, values and an output to project"
        raise expected("mechanism", requirement, f"{entry.name!r}")
    if not isinstance(source, str | os.PathLike):
        return _of_ours(source, mechanism, options, rngs)
    folder = expand_home(source, "source")
    if not (folder / "config.json").exists():
        requirement = "a folder with the config.json of a BERT, RoBERTa or GPT-2"
        raise expected("source", requirement, f"{folder}, which has none")
    if (folder / FILE).with_suffix(".json").exists():
        requirement = "a folder of a BERT, RoBERTa or GPT-2, or a loaded model"
        raise expected(
            "source", requirement, f"the run {folder}: pass `load(...)` of it instead"
        )
    config = read_config(folder / "config.json")
    weights = _Noting(read_weights(*_weight_files(folder)))
    arrays = _READERS[config.kind](weights, config)
    _check_layers(weights, config)
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
    requirement = "the config of a BERT, RoBERTa or GPT-2"
    try:
        values = read_json(file, requirement)
        kind = known("model_type", values["model_type"], _READERS)
        if kind == "gpt2":
            config = PretrainedConfig(
                kind=kind,
                vocab_size=values["vocab_size"],
                max_length=values["n_positions"],
                num_layers=values["n_layer"],
                embed_dim=values["n_embd"],
                num_heads=values["n_head"],
                mlp_dim=values.get("n_inner") or 4 * values["n_embd"],
                activation=values.get("activation_function", "gelu_new"),
                epsilon=values.get("layer_norm_epsilon", 1e-5),
                token_types=0,
            )
        else:
            config = PretrainedConfig(
                kind=kind,
                vocab_size=values["vocab_size"],
                max_length=values["max_position_embeddings"] - _UNUSED.get(kind, 0),
                num_layers=values["num_hidden_layers"],
                embed_dim=values["hidden_size"],
                num_heads=values["num_attention_heads"],
                mlp_dim=values["intermediate_size"],
                activation=values.get("hidden_act", "gelu"),
                epsilon=values.get("layer_norm_eps", 1e-12),
                token_types=values.get("type_vocab_size", 2),
            )
    except (OSError, KeyError, TypeError) as error:
        raise expected(str(file), requirement, reason(error)) from error
    try:
        for name in ("vocab_size", "max_length", "num_layers", "embed_dim", "mlp_dim"):
            check_size(name, getattr(config, name))
        check_size("num_heads", config.num_heads)
        check_size("token_types", config.token_types, 0)
        check_eps(config.epsilon, "epsilon")
    except ValueError as error:
        raise within(str(file), error) from error
    known("activation", config.activation, _ACTIVATIONS)
    for name, plain in _PLAIN[kind].items():
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
    """``model.safetensors``, or the files that its index lists.

    Raises:
      ValueError: the index is damaged, or the weights are in another format.
    """
    file, index = (folder / f"model.safetensors{end}" for end in ("", ".index.json"))
    if file.exists() or not index.exists():
        if not file.exists() and any(folder.glob("*.bin")):
            requirement = (
                "safetensors files (`save_pretrained` of transformers writes them)"
            )
            raise expected("source", requirement, f"{folder} with .bin files")
        return [file]
    try:
        places = parse_json(read_bytes(index))["weight_map"]
        return sorted({folder / Path(place).name for place in places.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise expected(str(index), "an index of weights", reason(error)) from error


Weights = Mapping[str, np.ndarray]


class _Noting(dict[str, np.ndarray]):
    """Arrays by name, and the names of those that were read."""

    def __init__(self, arrays: Weights):
        super().__init__(arrays)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        return super().__getitem__(name)


def _check_layers(weights: _Noting, config: PretrainedConfig) -> None:
    """Refuses a file whose layers have parts, or are more, than the config says."""
    for name in sorted(weights.keys() - weights.read):
        layer = re.match(r"(?:encoder\.layer|h)\.(\d+)\.", name)
        if layer is None or name[layer.end() :] in _BUFFERS:
            continue
        requirement = f"{config.num_layers} layers, as config.json says"
        if int(layer[1]) < config.num_layers:
            requirement = f"the arrays of a plain {config.kind} layer"
        raise expected("model.safetensors", requirement, f"{name} as well")


def bert_arrays(weights: Weights, num_layers: int) -> dict[str, np.ndarray]:
    """Arrays under this package's names; matrices in the file are `[out, in]`.

    Raises:
      ValueError: one is missing, or is not of floats.
    """
    arrays = {
        "embed.embedding": _get(weights, "embeddings.word_embeddings.weight"),
        "positions": _get(weights, "embeddings.position_embeddings.weight"),
        "token_types": _get(weights, "embeddings.token_type_embeddings.weight"),
        **_norm(weights, "embeddings.LayerNorm", "norm"),
    }
    for index in range(num_layers):
        theirs, ours = f"encoder.layer.{index}", f"blocks.{index}"
        for name, place in {
            "attention.self.query": "attention.query",
            "attention.self.key": "attention.key",
            "attention.self.value": "attention.value",
            "attention.output.dense": "attention.out",
            "intermediate.dense": "inner",
            "output.dense": "outer",
        }.items():
            matrix = _get(weights, f"{theirs}.{name}.weight")
            arrays[f"{ours}.{place}.kernel"] = matrix.T
            arrays[f"{ours}.{place}.bias"] = _get(weights, f"{theirs}.{name}.bias")
        first, second = "attention.output.LayerNorm", "output.LayerNorm"
        arrays |= _norm(weights, f"{theirs}.{first}", f"{ours}.attention_norm")
        arrays |= _norm(weights, f"{theirs}.{second}", f"{ours}.mlp_norm")
    return arrays


def _gpt2(weights: Weights, config: PretrainedConfig) -> dict[str, np.ndarray]:
    """The same; matrices are `[in, out]`, with query, key and value merged."""
    arrays = {
        "embed.embedding": _get(weights, "wte.weight"),
        "positions": _get(weights, "wpe.weight"),
        **_norm(weights, "ln_f", "norm"),
    }
    for index in range(config.num_layers):
        theirs, ours = f"h.{index}", f"blocks.{index}"
        width = config.embed_dim
        shapes = {"weight": (width, 3 * width), "bias": (3 * width,)}
        for end, array in {"weight": "kernel", "bias": "bias"}.items():
            joined = _get(weights, f"{theirs}.attn.c_attn.{end}", *shapes[end])
            parts = np.split(joined, 3, axis=-1)
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                arrays[f"{ours}.attention.{name}.{array}"] = part
            for name, place in {
                "attn.c_proj": "attention.out",
                "mlp.c_fc": "inner",
                "mlp.c_proj": "outer",
            }.items():
                one = _get(weights, f"{theirs}.{name}.{end}")
                arrays[f"{ours}.{place}.{array}"] = one
        arrays |= _norm(weights, f"{theirs}.ln_1", f"{ours}.attention_norm")
        arrays |= _norm(weights, f"{theirs}.ln_2", f"{ours}.mlp_norm")
    return arrays


def _bert(weights: Weights, config: PretrainedConfig) -> dict[str, np.ndarray]:
    return bert_arrays(weights, config.num_layers)


_READERS = {"bert": _bert, "roberta": _bert, "gpt2": _gpt2}


def _get(weights: Weights, name: str, *shape: int) -> np.ndarray:
    """An array in float32; of this shape, if one is given."""
    if name not in weights:
        raise expected("model.safetensors", f"an array {name}", "none")
    array = weights[name]
    if not jnp.issubdtype(array.dtype, jnp.floating):
        requirement = f"{name} of a floating dtype, not quantised"
        raise expected("model.safetensors", requirement, array.dtype)
    if shape and array.shape != shape:
        requirement = f"{name} of shape {shape}"
        raise expected("model.safetensors", requirement, array.shape)
    return array.astype(np.float32)


def _norm(weights: Weights, theirs: str, ours: str) -> dict[str, np.ndarray]:
    return {
        f"{ours}.scale": _get(weights, f"{theirs}.weight"),
        f"{ours}.bias": _get(weights, f"{theirs}.bias"),
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
            if _OWN.intersection(path):
                continue
            raise expected(source, f"an array for {name}", "none")
        # A copy: training one of two models must not overwrite the other's arrays.
        array = jnp.array(left.pop(name), variable.dtype)
        if array.shape != variable.shape:
            requirement = f"{name} of shape {variable.shape}"
            raise expected(source, requirement, array.shape)
        variable[...] = array
    if left:
        raise expected(source, "no further arrays", ", ".join(left))


def _of_ours(source: Any, mechanism: Any, options: Any, rngs: nnx.Rngs) -> nnx.Module:
    model = source.model if isinstance(source, Saved) else source
    try:
        sizes, config = own_sizes(model), model.encoder.config
    except ValueError as error:
        raise renamed(error, "source") from error
    names = {one.name for one in config.turn}
    if names != {"softmax"}:
        got = f"one of {', '.join(map(repr, sorted(names)))}"
        raise expected("source", "a model of softmax attention", got)
    entry = resolve(mechanism)
    if config.gate and any(g.name == "gate" for g in entry.gates):
        requirement = "one without a gate, since the source has its own"
        raise expected("mechanism", requirement, f"{entry.name!r}")
    config = dataclasses.replace(
        config, mechanism=mechanism, attention_options=options or "", hybrid=""
    )
    new = type(model)(**sizes, config=config, rngs=rngs)
    state = nnx.to_flat_state(nnx.state(model, _COPIED))
    old = {".".join(map(str, path)): array[...] for path, array in state}
    fill(new, old, "source")
    return new
