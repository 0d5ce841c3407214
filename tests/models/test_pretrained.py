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


def _written(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A model of random numbers in Hugging Face's format; its arrays."""
    rng = np.random.default_rng(0)
    linear, norm = {}, {}
    if config["model_type"] == "gpt2":
        prefix, tables = "transformer.", {"wte": WORDS, "wpe": LENGTH}
        for i in range(LAYERS):
            linear |= {
                f"h.{i}.attn.c_attn": (WIDTH, 3 * WIDTH),
                f"h.{i}.attn.c_proj": (WIDTH, WIDTH),
                f"h.{i}.mlp.c_fc": (WIDTH, INNER),
                f"h.{i}.mlp.c_proj": (INNER, WIDTH),
            }
            norm |= {f"h.{i}.ln_1": "weight", f"h.{i}.ln_2": "weight"}
        norm["ln_f"] = "weight"
    else:
        prefix = f"{config['model_type']}."
        tables = {
            "embeddings.word_embeddings": WORDS,
            "embeddings.position_embeddings": config["max_position_embeddings"],
            "embeddings.token_type_embeddings": config["type_vocab_size"],
        }
        norm["embeddings.LayerNorm"] = "gamma"
        for i in range(LAYERS):
            layer = f"encoder.layer.{i}"
            for name in ("query", "key", "value"):
                linear[f"{layer}.attention.self.{name}"] = (WIDTH, WIDTH)
            linear[f"{layer}.attention.output.dense"] = (WIDTH, WIDTH)
            linear[f"{layer}.intermediate.dense"] = (INNER, WIDTH)
            linear[f"{layer}.output.dense"] = (WIDTH, INNER)
            norm[f"{layer}.attention.output.LayerNorm"] = "weight"
            norm[f"{layer}.output.LayerNorm"] = "weight"
    arrays = {f"{name}.weight": (rows, WIDTH) for name, rows in tables.items()}
    for name, shape in linear.items():
        out = shape[1] if prefix == "transformer." else shape[0]
        arrays |= {f"{name}.weight": shape, f"{name}.bias": (out,)}
    for name, word in norm.items():
        other = "beta" if word == "gamma" else "bias"
        arrays |= {f"{name}.{word}": (WIDTH,), f"{name}.{other}": (WIDTH,)}
    made = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in arrays.items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    head = {"cls.predictions.bias": np.zeros(WORDS, np.float32)}
    named = {f"{prefix}{name}": array for name, array in made.items()}
    save_file(named | (head if prefix == "bert." else {}), folder / "model.safetensors")
    return made


def _norm(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    word = ("gamma", "beta") if f"{name}.gamma" in w else ("weight", "bias")
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return scaled * w[f"{name}.{word[0]}"] + w[f"{name}.{word[1]}"]


def _attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, see: np.ndarray) -> Any:
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
        out = dense("attention.output.dense", _attended(q, k, v, mask[:, None, None]))
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
        x = x + dense("attn.c_proj", _attended(q, k, v, past))
        y = dense("mlp.c_fc", _norm(w, f"h.{i}.ln_2", x))
        cube = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
        x = x + dense("mlp.c_proj", y * 0.5 * (1 + np.tanh(cube)))
        states.append(x)
    states[-1] = _norm(w, "ln_f", x)
    return states


@pytest.mark.parametrize("config", [BERT, ROBERTA, GPT2], ids=lambda c: c["model_type"])
def test_every_layer_agrees(tmp_path: Path, config: dict[str, Any]) -> None:
    """Embeddings and both layers, with padding and types where the model has them."""
    w = {n: x.astype(np.float64) for n, x in _written(tmp_path, config).items()}
    ids = np.random.default_rng(1).integers(0, WORDS, (2, LENGTH))
    mask, types = np.ones(ids.shape, bool), np.zeros_like(ids)
    encoder = models.from_softmax(tmp_path)
    if config is GPT2:
        wanted, more = _gpt2_states(w, ids), {}
    else:
        mask[1, 4:] = False
        types[:, 3:] = config["type_vocab_size"] - 1
        wanted = _bert_states(w, config, ids, mask, types)
        more = {"mask": mask, "token_types": types}
    got = encoder.hidden_states(ids, **more)
    assert len(got) == len(wanted) == LAYERS + 1
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a[mask], b[mask], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("config", [BERT, ROBERTA, GPT2], ids=lambda c: c["model_type"])
def test_a_padded_row_is_the_row_alone(tmp_path: Path, config: dict[str, Any]) -> None:
    """Wherever its padding is: positions count real tokens."""
    _written(tmp_path, config)
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
        for got, wanted in zip(states, alone, strict=True):
            np.testing.assert_allclose(got[row, real], wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "types", "words"),
    [
        (GPT2, np.zeros((1, 2), int), "None, since a gpt2 model has no token types"),
        (BERT, np.full((1, 2), 2), "types, from 0 to 1, got from 2 to 2"),
        (BERT, np.zeros((1, 2)), "an integer dtype"),
        (BERT, np.zeros((1, 3), int), r"\[B, T\]=\(1, 2\)"),
    ],
)
def test_token_types_that_do_not_fit(
    tmp_path: Path, config: dict[str, Any], types: np.ndarray, words: str
) -> None:
    _written(tmp_path, config)
    encoder = models.from_softmax(tmp_path)
    with pytest.raises(ValueError, match=f"^token_types: expected {words}"):
        encoder(np.array([[1, 2]]), token_types=types)


def test_into_another_mechanism(tmp_path: Path) -> None:
    """Every array but the mechanism's own; other files are refused."""
    _written(tmp_path, BERT)
    same, other = (
        nnx.to_flat_state(nnx.state(model, nnx.Param))
        for model in (
            models.from_softmax(tmp_path),
            models.from_softmax(tmp_path, "linformer", options={"features": 3}),
        )
    )
    theirs = {path: x[...] for path, x in other}
    own = {path for path in theirs if "parameters" in path}
    assert own and theirs.keys() - own == {path for path, _ in same}
    for path, array in same:
        np.testing.assert_array_equal(array[...], theirs[path])
    with pytest.raises(ValueError, match="mechanism: expected one with queries"):
        models.from_softmax(tmp_path, "fnet")
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"model_type": "t5"}))
    with pytest.raises(ValueError, match="model_type: expected one of bert, roberta"):
        models.from_softmax(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"hidden_size": 4}))
    with pytest.raises(ValueError, match=r"of shape \(4,\), got \(8,\)"):
        models.from_softmax(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"expected an array encoder\.layer\.2\."):
        models.from_softmax(tmp_path)


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
    _written(tmp_path, BERT)
    ids = np.array([[1, 2, 3]])
    wanted = models.from_softmax(tmp_path)(ids)
    places = {f"array {part}": f"model-{part}.safetensors" for part in (0, 1)}
    _split(tmp_path, {"weight_map": places})
    np.testing.assert_array_equal(models.from_softmax(tmp_path)(ids), wanted)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "model-2.safetensors"}}, "model-2.safetensors: expected"),
        ({"weight_map": ["a"]}, "index.json: expected an index of weights"),
        ("{", "index.json: expected an index of weights"),
        ({}, "index of weights, got none named 'weight_map'"),
    ],
)
def test_a_damaged_index(tmp_path: Path, index: object, words: str) -> None:
    _written(tmp_path, BERT)
    _split(tmp_path, index)
    with pytest.raises(ValueError, match=words):
        models.from_softmax(tmp_path)


def test_weights_in_another_format(tmp_path: Path) -> None:
    _written(tmp_path, BERT)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"^source: .*safetensors.* with \.bin files$"):
        models.from_softmax(tmp_path)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^source: expected .*, got .*, which has no"):
        models.from_softmax(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"^source: expected one of Seq.*, got an int"):
        models.from_softmax(3)
    with pytest.raises(ValueError, match=r"^mechanism: expected one of .* 'cosforme'"):
        models.from_softmax(tmp_path, "cosforme")
    _written(tmp_path, BERT)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"GPT-2, got none named 'model_type'$"):
        models.from_softmax(tmp_path)
    (tmp_path / "model.json").touch()  # As a run of ours.
    with pytest.raises(
        ValueError, match=r"^source: expected .*: pass `load.* instead$"
    ):
        models.from_softmax(tmp_path)


@pytest.mark.parametrize(
    ("config", "name", "given", "plain"),
    [
        (BERT, "position_embedding_type", "relative_key", "absolute"),
        (BERT, "is_decoder", True, False),
        (ROBERTA, "pad_token_id", 0, 1),
        (GPT2, "scale_attn_by_inverse_layer_idx", True, False),
        (GPT2, "scale_attn_weights", False, True),
    ],
)
def test_models_that_compute_something_else_are_refused(
    tmp_path: Path, config: dict[str, Any], name: str, given: Any, plain: Any
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {name: plain}))
    assert read_config(file).num_layers == LAYERS
    file.write_text(json.dumps(config | {name: given}))
    wanted = re.escape(f"{file}: expected {name}={plain!r}, got {given!r}")
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        read_config(file)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (BERT, {"hidden_size": "8"}, "embed_dim: expected a positive int, got '8'"),
        (BERT, {"vocab_size": None}, "vocab_size: expected a positive int, got None"),
        (BERT, {"num_hidden_layers": 0}, "num_layers: expected a positive int, got 0"),
        (ROBERTA, {"max_position_embeddings": 2}, "max_length: expected .* got 0"),
        (BERT, {"layer_norm_eps": "1e-5"}, "epsilon: expected .* got '1e-5'"),
        (GPT2, {"layer_norm_epsilon": None}, "epsilon: expected .* got None"),
    ],
)
def test_sizes_that_are_none(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: {words}"):
        read_config(file)


def test_a_config_in_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(
        ValueError, match=r"config\.json: expected the config of a BERT"
    ):
        models.from_softmax(tmp_path)


@pytest.mark.parametrize("config", [BERT, GPT2], ids=lambda c: c["model_type"])
def test_layers_that_the_config_leaves_out(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """A model of the first layers alone would compute something else."""
    _written(tmp_path, config)
    name = "n_layer" if config is GPT2 else "num_hidden_layers"
    (tmp_path / "config.json").write_text(json.dumps(config | {name: LAYERS - 1}))
    with pytest.raises(ValueError, match=r"^model\.safetensors: expected 1 layers"):
        models.from_softmax(tmp_path)


def test_layers_with_more_parts_are_refused(tmp_path: Path) -> None:
    """Without cross-attention, say, a model would compute something else."""
    arrays, file = _written(tmp_path, BERT), tmp_path / "model.safetensors"
    more = "encoder.layer.0.crossattention.self.query.weight"
    save_file(arrays | {more: np.ones((WIDTH, WIDTH), "f4")}, file)
    with pytest.raises(ValueError, match=f"arrays of a plain bert layer, got {more}"):
        models.from_softmax(tmp_path)
    arrays = _written(tmp_path, GPT2)
    masks = {"h.0.attn.bias": np.ones((1, 1, 8, 8), "f4")}
    masks["h.0.attn.masked_bias"] = np.array(-1e4, "f4")
    save_file(arrays | masks, file)
    models.from_softmax(tmp_path)


@pytest.mark.parametrize("shape", [(WIDTH, 3 * WIDTH - 1), (1,), (3, WIDTH, WIDTH)])
def test_queries_keys_and_values_that_do_not_divide(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    arrays, name = _written(tmp_path, GPT2), "h.1.attn.c_attn.weight"
    save_file(arrays | {name: np.ones(shape, "f4")}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=f"^model.safetensors: expected {name} of shape"
    ):
        models.from_softmax(tmp_path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    """Those of quantised models need scales, which are in other arrays."""
    arrays = _written(tmp_path, BERT)
    name = next(name for name in arrays if name.endswith("query.weight"))
    save_file(
        arrays | {name: np.ones((WIDTH, WIDTH), np.int8)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"query.weight of a floating dtype.*got int8"):
        models.from_softmax(tmp_path)


def test_blocks_of_others_share_nothing(tmp_path: Path) -> None:
    _written(tmp_path, BERT)
    options = {"features": 2, "sharing": "layerwise"}
    with pytest.raises(
        ValueError, match=r"^sharing: expected another, since each block"
    ):
        models.from_softmax(tmp_path, "linformer", options=options)


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
    given, made = ({path: x[...] for path, x in state} for state in (old, new))
    assert len(made) > len(given)
    for path, array in given.items():
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
