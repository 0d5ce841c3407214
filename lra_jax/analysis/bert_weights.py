"""Loads a user's BERT weights from disk as a `Network`.

Reads ``model.safetensors`` as saved by transformers. Nothing is downloaded.

The arrays do not say how many heads share their columns; the ``config.json`` that is
saved with them does. Without it the heads are 64 wide, as in Google's models.
"""

from pathlib import Path
from typing import Literal

from flax import nnx

from lra_jax.analysis.networks import Network, Shape
from lra_jax.errors import expected, on_one_line, renamed
from lra_jax.models.pretrained import bert_arrays, fill, read_config, read_weights

_HEAD_DIM = 64
_GELUS: dict[str, Literal["exact", "tanh"]] = {
    "gelu": "exact",
    "gelu_new": "tanh",
}


def load_bert(file: str | Path) -> tuple[Network, Shape]:
    """A BERT with the weights of a safetensors file, and its sizes.

    Raises:
      ValueError: the file, or the ``config.json`` next to it, is of another kind of
        model.
    """
    path = Path(file).expanduser()
    try:
        arrays = read_weights(path)
    except ValueError as error:
        got = f"{path}: {on_one_line(error.__cause__ or error)}"
        raise expected("--weights", "a safetensors file", got) from error
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
    num_heads, gelu = _heads_and_gelu(path, width)
    try:
        given = bert_arrays(arrays, len(layers))
    except ValueError as error:
        raise renamed(error, "--weights") from error
    given["embed"] = given.pop("embed.embedding")
    given["types"] = given.pop("token_types")[0]
    shape = Shape(
        vocab_size=len(embed),
        num_layers=len(layers),
        width=width,
        num_heads=num_heads,
        mlp_dim=len(given["blocks.0.inner.bias"]),
        max_length=len(given["positions"]),
        embed_dim=width,
        gelu=gelu,
    )
    network = Network(shape, length=1, rngs=nnx.Rngs(0))
    fill(network, given, "--weights")
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
