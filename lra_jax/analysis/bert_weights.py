"""Loads a user's BERT weights from disk as a `Network`.

Reads ``model.safetensors`` as saved by transformers: 8 bytes for the header's length, a
JSON header with the location of each array, then the arrays. Nothing is downloaded.

The arrays do not say how many heads share their columns; the ``config.json`` that is
saved with them does. Without it the heads are 64 wide, as in Google's models.
"""

import json
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.analysis.networks import Network, Shape
from lra_jax.errors import expected
from lra_jax.models.pretrained import read_config

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
_LARGEST_HEADER = 100_000_000
_HEAD_DIM = 64
_GELUS: dict[str, Literal["exact", "tanh"]] = {
    "gelu": "exact",
    "gelu_new": "tanh",
}

_LAYERS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def read_safetensors(file: str | Path) -> dict[str, np.ndarray]:
    """All floating and integer arrays of a safetensors file.

    bfloat16 becomes float32; arrays of other kinds are left out.

    Raises:
      ValueError: it is not a safetensors file, or a part of it is missing.
    """
    path = Path(file).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        wanted = f"a file that can be read, {path}"
        raise expected("--weights", wanted, error.strerror) from error
    size = int.from_bytes(content[:8], "little")
    start = 8 + size
    try:
        if len(content) < 8 or size > min(_LARGEST_HEADER, len(content)):
            raise ValueError("one without a header")
        header = json.loads(content[8:start])
        entries = {n: e for n, e in header.items() if n != "__metadata__"}
        found = {n: _array(content[start:], e) for n, e in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = f"a whole safetensors file, {path}"
        raise expected("--weights", wanted, f"{error}") from error
    return {name: array for name, array in found.items() if array is not None}


def load_bert(file: str | Path) -> tuple[Network, Shape]:
    """A BERT with the weights of a safetensors file, and its sizes.

    Raises:
      ValueError: the file, or the ``config.json`` next to it, is of another kind of
        model.
    """
    arrays = {
        name.removeprefix("bert."): array
        for name, array in read_safetensors(file).items()
    }
    embed = arrays.get("embeddings.word_embeddings.weight")
    query = arrays.get("encoder.layer.0.attention.self.query.weight")
    if embed is None or query is None:
        some = ", ".join(sorted(arrays)[:3])
        raise expected(
            "--weights",
            f"the weights of a BERT in {file}, with embeddings.word_embeddings.weight "
            "and encoder.layer.0.attention.self.query.weight",
            f"{len(arrays)} arrays such as {some}",
        )
    layers = {n.split(".")[2] for n in arrays if n.startswith("encoder.layer.")}
    width = embed.shape[1]
    num_heads, gelu = _heads_and_gelu(Path(file).expanduser(), width)
    shape = Shape(
        vocab_size=len(embed),
        num_layers=len(layers),
        width=width,
        num_heads=num_heads,
        mlp_dim=len(_get(arrays, "encoder.layer.0.intermediate.dense.bias")),
        max_length=len(_get(arrays, "embeddings.position_embeddings.weight")),
        embed_dim=width,
        gelu=gelu,
    )
    network = Network(shape, length=1, rngs=nnx.Rngs(0))
    _set(network.embed, embed)
    _set(network.positions, _get(arrays, "embeddings.position_embeddings.weight"))
    _set(network.types, _get(arrays, "embeddings.token_type_embeddings.weight")[0])
    _set_layer(network.norm, arrays, "embeddings.LayerNorm")
    for index, block in enumerate(network.blocks):
        for ours, theirs in _LAYERS.items():
            module: Any = block
            for part in ours.split("."):
                module = getattr(module, part)
            _set_layer(module, arrays, f"encoder.layer.{index}.{theirs}")
    return network, shape


def _heads_and_gelu(file: Path, width: int) -> tuple[int, Literal["exact", "tanh"]]:
    """The number of heads and the activation, which are not in the arrays."""
    beside = file.with_name("config.json")
    if beside.exists():
        config = read_config(beside)
        if config.activation not in _GELUS:
            wanted = f"hidden_act of {', '.join(_GELUS)} in {beside}"
            raise expected("--weights", wanted, repr(config.activation))
        if config.num_heads < 1 or width % config.num_heads:
            wanted = f"num_attention_heads that divide {width} in {beside}"
            raise expected("--weights", wanted, config.num_heads)
        return config.num_heads, _GELUS[config.activation]
    if width % _HEAD_DIM:
        wanted = f"a config.json with num_attention_heads next to {file}"
        raise expected("--weights", wanted, f"none, for a width of {width}")
    return width // _HEAD_DIM, "exact"


def _array(content: bytes, entry: dict[str, Any]) -> np.ndarray | None:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(content):
        raise ValueError("one that ends too early")
    kind, shape = entry["dtype"], entry["shape"]
    data = content[begin:end]
    if kind == "BF16":
        words = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return words.view(np.float32).reshape(shape)
    if kind not in _DTYPES:
        return None
    return np.frombuffer(data, _DTYPES[kind]).reshape(shape)


def _set_layer(module: Any, arrays: dict[str, np.ndarray], name: str) -> None:
    """Sets a layer norm, or a dense layer, whose kernel torch stores transposed."""
    if name.endswith("LayerNorm"):
        # The first BERTs call them gamma and beta.
        old = f"{name}.gamma" in arrays
        _set(module.scale, _get(arrays, f"{name}.{'gamma' if old else 'weight'}"))
        _set(module.bias, _get(arrays, f"{name}.{'beta' if old else 'bias'}"))
        return
    _set(module.kernel, _get(arrays, f"{name}.weight").T)
    _set(module.bias, _get(arrays, f"{name}.bias"))


def _get(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise expected("--weights", f"an array {name!r} in the file", "none")
    return arrays[name]


def _set(variable: Any, array: np.ndarray) -> None:
    if variable[...].shape != array.shape:
        wanted = f"an array of shape {variable[...].shape}"
        raise expected("--weights", wanted, array.shape)
    variable[...] = jnp.asarray(array, jnp.float32)
