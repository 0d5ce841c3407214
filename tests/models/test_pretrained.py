"""Softmax models of others, read from files in their format, layer by layer."""

import json
import math
import re
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from originals import hugging_face
from safetensors.numpy import load_file, save_file

from lra_jax import models
from lra_jax.models.pretrained import read_config

WIDTH, HEADS, INNER, LAYERS, WORDS, LENGTH = 8, 2, 12, 2, 11, 6
EPSILON = 1e-5
BERT = {
    "model_type": "bert",
    "vocab_size": WORDS,
    "max_position_embeddings": LENGTH,
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "type_vocab_size": 2,
    "layer_norm_eps": EPSILON,
    "hidden_act": "gelu",
}
ROBERTA = BERT | {
    "model_type": "roberta",
    "max_position_embeddings": LENGTH + 2,
    "type_vocab_size": 1,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": WORDS,
    "n_positions": LENGTH,
    "n_layer": LAYERS,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_inner": INNER,
    "layer_norm_epsilon": EPSILON,
}


def _norm(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    word = ("gamma", "beta") if f"{name}.gamma" in w else ("weight", "bias")
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return scaled * w[f"{name}.{word[0]}"] + w[f"{name}.{word[1]}"]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, see: np.ndarray) -> Any:
    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)

    scores = heads(q) @ heads(k).swapaxes(2, 3) / math.sqrt(WIDTH // HEADS)
    scores = np.where(see, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ heads(v)).swapaxes(1, 2).reshape(q.shape)


def _bert_states(
    w: dict[str, np.ndarray], config: dict[str, Any], ids: Any, mask: Any, types: Any
) -> list[np.ndarray]:
    first = 2 if config["model_type"] == "roberta" else 0
    tables = [w[f"embeddings.{x}_embeddings.weight"] for x in ("word", "token_type")]
    places = w["embeddings.position_embeddings.weight"][first : first + ids.shape[1]]
    x = _norm(w, "embeddings.LayerNorm", tables[0][ids] + places + tables[1][types])
    states = [x]
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"

        def dense(name: str, x: np.ndarray, layer: str = layer) -> np.ndarray:
            return x @ w[f"{layer}.{name}.weight"].T + w[f"{layer}.{name}.bias"]

        q, k, v = (dense(f"attention.self.{n}", x) for n in ("query", "key", "value"))
        out = dense("attention.output.dense", _attend(q, k, v, mask[:, None, None]))
        x = _norm(w, f"{layer}.attention.output.LayerNorm", x + out)
        inner = dense("intermediate.dense", x)
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        x = _norm(w, f"{layer}.output.LayerNorm", x + dense("output.dense", inner))
        states.append(x)
    return states


def _gpt2_states(w: dict[str, np.ndarray], ids: np.ndarray) -> list[np.ndarray]:
    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    states, past = [x], np.tril(np.ones((ids.shape[1],) * 2, bool))
    for i in range(LAYERS):

        def dense(name: str, x: np.ndarray, layer: str = f"h.{i}") -> np.ndarray:
            return x @ w[f"{layer}.{name}.weight"] + w[f"{layer}.{name}.bias"]

        q, k, v = np.split(dense("attn.c_attn", _norm(w, f"h.{i}.ln_1", x)), 3, -1)
        x = x + dense("attn.c_proj", _attend(q, k, v, past))
        y = dense("mlp.c_fc", _norm(w, f"h.{i}.ln_2", x))
        cube = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
        x = x + dense("mlp.c_proj", y * 0.5 * (1 + np.tanh(cube)))
        states.append(x)
    states[-1] = _norm(w, "ln_f", x)
    return states


@pytest.mark.parametrize("config", [BERT, ROBERTA, GPT2], ids=lambda c: c["model_type"])
def test_every_layer_agrees(tmp_path: Path, config: dict[str, Any]) -> None:
    """Embeddings and both layers, with padding and types where the model has them."""
    w = {n: x.astype(np.float64) for n, x in hugging_face(tmp_path, config).items()}
    ids = np.random.default_rng(1).integers(0, WORDS, (2, LENGTH))
    mask, types = np.ones(ids.shape, bool), np.zeros_like(ids)
    encoder = models.from_softmax(tmp_path)
    if config is GPT2:
        expected, more = _gpt2_states(w, ids), {}
    else:
        mask[1, 4:] = False
        types[:, 3:] = config["type_vocab_size"] - 1
        expected = _bert_states(w, config, ids, mask, types)
        more = {"mask": mask, "token_types": types}
    got = encoder.hidden_states(ids, **more)
    assert len(got) == len(expected) == LAYERS + 1
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a[mask], b[mask], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("config", [BERT, ROBERTA, GPT2], ids=lambda c: c["model_type"])
def test_a_padded_row_is_the_row_alone(tmp_path: Path, config: dict[str, Any]) -> None:
    """Wherever its padding is: positions count real tokens."""
    hugging_face(tmp_path, config)
    encoder = models.from_softmax(tmp_path)
    ids = np.random.default_rng(1).integers(0, WORDS, (3, LENGTH))
    mask = np.array([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]], bool)
    types = np.zeros_like(ids)
    types[:, 4:] = max(config.get("type_vocab_size", 0) - 1, 0)
    for row, real in enumerate(mask):
        more = {} if config is GPT2 else {"token_types": types}
        states = encoder.hidden_states(ids, mask, **more)
        more = {name: x[row, real][None] for name, x in more.items()}
        alone = encoder.hidden_states(ids[row, real][None], **more)
        for got, expected in zip(states, alone, strict=True):
            np.testing.assert_allclose(
                got[row, real], expected[0], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize(
    ("config", "types", "words"),
    [
        (GPT2, np.zeros((1, 2), int), "None, since a gpt2"),
        (BERT, np.full((1, 2), 2), "types, from 0 to 1, got from 2"),
    ],
)
def test_token_types_that_do_not_fit(tmp_path, config, types, words) -> None:
    hugging_face(tmp_path, config)
    encoder = models.from_softmax(tmp_path)
    with pytest.raises(ValueError, match=f"^token_types: expected {words}"):
        encoder(np.array([[1, 2]]), token_types=types)


def test_into_another_mechanism(tmp_path: Path) -> None:
    """Every array but the mechanism's own."""
    hugging_face(tmp_path, BERT)
    same, other = (
        nnx.to_flat_state(nnx.state(model, nnx.Param))
        for model in (
            models.from_softmax(tmp_path),
            models.from_softmax(tmp_path, "linformer", options={"features": 3}),
        )
    )
    theirs = {path: x[...] for path, x in other}
    kept = {path for path in theirs if "parameters" in path}
    assert kept and theirs.keys() - kept == {path for path, _ in same}
    for path, array in same:
        np.testing.assert_array_equal(array[...], theirs[path])


def _split(folder: Path, index: object) -> None:
    """Writes the arrays to two files and an index, as for large models."""
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for part in (0, 1):
        some = dict(list(arrays.items())[part::2])
        save_file(some, folder / f"model-{part}.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    hugging_face(tmp_path, BERT)
    ids = np.array([[1, 2, 3]])
    expected = models.from_softmax(tmp_path)(ids)
    places = {f"array {part}": f"model-{part}.safetensors" for part in (0, 1)}
    _split(tmp_path, {"weight_map": places})
    np.testing.assert_array_equal(models.from_softmax(tmp_path)(ids), expected)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "model-2.safetensors"}}, "model-2.safetensors: expected"),
        ("{", "index.json: expected an index of weights"),
        ({}, "index of weights, got none named 'weight_map'"),
    ],
)
def test_a_damaged_index(tmp_path: Path, index: object, words: str) -> None:
    hugging_face(tmp_path, BERT)
    _split(tmp_path, index)
    with pytest.raises(ValueError, match=words):
        models.from_softmax(tmp_path)


def test_weights_in_another_format(tmp_path: Path) -> None:
    hugging_face(tmp_path, BERT)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"^source: .*safetensors.* with \.bin files$"):
        models.from_softmax(tmp_path)


def test_what_is_no_source(tmp_path: Path) -> None:
    hugging_face(tmp_path, BERT)
    for source, arguments, words in (
        (tmp_path / "nowhere", (), "source: .*, which has no"),
        (3, (), "source: .*, got an int"),
        (tmp_path, ("cosforme",), "mechanism: .* 'cosforme'"),
        (tmp_path, ("fnet",), "mechanism: expected one with queries"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            models.from_softmax(source, *arguments)
    options = {"features": 2, "sharing": "layerwise"}
    with pytest.raises(ValueError, match=r"^sharing: "):
        models.from_softmax(tmp_path, "linformer", options=options)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.json").touch()  # As a run of ours.
    with pytest.raises(ValueError, match=r"^source: expected .*: pass `load.* instead"):
        models.from_softmax(tmp_path)


@pytest.mark.parametrize(
    ("config", "name", "value", "words"),
    [
        # Models that compute something else.
        (BERT, "position_embedding_type", "relative_key", "='absolute', got 'relative"),
        (BERT, "is_decoder", True, "is_decoder=False, got True"),
        (ROBERTA, "pad_token_id", 0, "pad_token_id=1, got 0"),
        (GPT2, "scale_attn_by_inverse_layer_idx", True, "=False, got True"),
        (GPT2, "scale_attn_weights", False, "=True, got False"),
        (BERT, "model_type", "t5", "one of bert, roberta"),
        # Sizes that are none.
        (BERT, "hidden_size", "8", "an int, got '8'"),
        # Other files than the arrays are of; a model of the first layers alone.
        (BERT, "hidden_size", 4, "shape "),
        (BERT, "num_hidden_layers", 3, "an array encoder.layer.2."),
        (BERT, "num_hidden_layers", 1, "1 layers"),
    ],
)
def test_configs_of_other_models(tmp_path: Path, config, name, value, words) -> None:
    hugging_face(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ValueError, match=f"expected .*{re.escape(words)}"):
        models.from_softmax(tmp_path)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"{}"])
def test_what_is_no_config(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"config\.json: expected "):
        read_config(tmp_path / "config.json")


CROSS = "encoder.layer.0.crossattention.self.query.weight"
QUERY = "encoder.layer.0.attention.self.query.weight"
FUSED = "h.1.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("config", "name", "array", "words"),
    [
        # Without cross-attention, say, a model would compute something else.
        (BERT, CROSS, np.ones((WIDTH, WIDTH), "f4"), f"plain bert layer, got {CROSS}"),
        # Weights of quantised models need scales, which are in other arrays.
        (BERT, QUERY, np.ones((WIDTH, WIDTH), "i1"), "a floating dtype.*got int8"),
        (GPT2, FUSED, np.ones((WIDTH, 3 * WIDTH - 1), "f4"), "value.kernel of shape"),
    ],
)
def test_arrays_of_other_models(tmp_path: Path, config, name, array, words) -> None:
    arrays = hugging_face(tmp_path, config)
    save_file(arrays | {name: array}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"expected .*{words}"):
        models.from_softmax(tmp_path)


def test_masks_beside_the_weights_are_no_weights(tmp_path: Path) -> None:
    masks = {"h.0.attn.bias": np.ones((1, 1, 8, 8), "f4")}
    masks["h.0.attn.masked_bias"] = np.array(-1e4, "f4")
    save_file(hugging_face(tmp_path, GPT2) | masks, tmp_path / "model.safetensors")
    models.from_softmax(tmp_path)


def test_a_model_of_ours(tmp_path: Path) -> None:
    small = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 8}
    trained = models.SequenceClassifier(
        5, 3, mechanism="softmax", rngs=nnx.Rngs(params=3), **small
    )
    file = tmp_path / "one.safetensors"
    models.save(file, trained)
    again = models.from_softmax(models.load(file))
    tokens = np.array([[1, 2, 4, 0]])
    np.testing.assert_array_equal(again(tokens), trained(tokens))
    other = models.from_softmax(trained, "cosformer", options={"eps": 1e-4})
    assert other.encoder.blocks[0].attention.mechanism.name == "cosformer"
    old, new = (model.encoder.blocks[0].attention for model in (trained, other))
    for name in ("query", "key", "value", "out"):
        kernels = (getattr(layer, name).kernel[...] for layer in (old, new))
        np.testing.assert_array_equal(*kernels)
    with pytest.raises(ValueError, match="source: expected a model of softmax"):
        models.from_softmax(other, "flow")


class Scaled(nnx.Module):
    """A module from outside, with an array of its own."""

    def __init__(self, num_heads: int):
        self.scale = nnx.Param(jnp.full((num_heads,), 2.0))

    def __call__(self, query, key, value, mask=None):
        return value * self.scale[...][None, None, :, None]


def _of_ours(**settings: Any) -> models.SequenceClassifier:
    sizes = {"num_layers": 2, "embed_dim": 8, "mlp_dim": 8, "max_length": 8}
    settings = {"mechanism": "softmax"} | sizes | settings
    return models.SequenceClassifier(5, 3, rngs=nnx.Rngs(params=3), **settings)


@pytest.mark.parametrize("mechanism", ["luna", "gla", Scaled])
def test_what_a_mechanism_brings_along_is_new(mechanism: Any) -> None:
    trained = _of_ours()
    other = models.from_softmax(trained, mechanism)
    old, new = (nnx.to_flat_state(nnx.state(x, nnx.Param)) for x in (trained, other))
    before, made = ({path: x[...] for path, x in state} for state in (old, new))
    assert len(made) > len(before)
    for path, array in before.items():
        np.testing.assert_array_equal(array, made[path])


def test_a_list_is_one_value_for_all_blocks() -> None:
    """A tuple would hold one value for each block."""
    seen = []

    def attention(query, key, value, *, table=()):
        seen.append(table)
        return value

    other = models.from_softmax(_of_ours(), attention, options={"table": [1, 2]})
    other(np.array([[1, 2]]))
    assert seen == [[1, 2], [1, 2]]


def test_a_source_keeps_its_arrays() -> None:
    trained = _of_ours()
    state = nnx.state(models.from_softmax(trained), nnx.Param)
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(state)
    assert np.isfinite(trained(np.array([[1, 2, 4, 0]]))).all()


def test_a_gate_of_the_source_would_be_lost() -> None:
    with pytest.raises(ValueError, match="mechanism: expected one without a gate"):
        models.from_softmax(_of_ours(gate=True), "gla")


def test_running_means_come_along():
    sizes = {"embed_dim": 8, "mlp_dim": 8, "max_length": 12, "norm": "batch"}
    model = models.SequenceClassifier(
        16, 3, mechanism="softmax", rngs=nnx.Rngs(0), **sizes
    )
    helpers.move_running_means(model)
    tokens = np.random.default_rng(0).integers(1, 16, (2, 12))
    again = models.from_softmax(model, "softmax")
    np.testing.assert_allclose(again(tokens), model(tokens), rtol=1e-6)
