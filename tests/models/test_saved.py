"""Models in files: what is saved is what is loaded, and raw examples are read."""

import json
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from flax import nnx

from lra_jax import models
from lra_jax.models.language import LanguageModel
from lra_jax.models.raw import reader
from lra_jax.models.saved import describe, maker

SMALL = {
    "num_layers": 2,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "max_length": 16,
}
WORDS = {"kind": "words", "ids": {"a": 1, "b": 2, "c": 3}, "ignored": "()"}
_IDS = {"<eos>": 0, "a": 1, "b": 2, "<unk>": 3}
IN_WORDS = {
    **{"kind": "vocabulary", "max_length": 4},
    "vocabulary": {"kind": "words", "ids": _IDS},
}


def _classifier(**settings: Any) -> models.SequenceClassifier:
    settings = SMALL | settings
    return models.SequenceClassifier(4, 3, rngs=nnx.Rngs(params=1), **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (models.SequenceClassifier, {"mechanism": "performer", "dtype": "bfloat16"}),
        (
            models.SequenceClassifier,
            {
                "mechanism": "linformer",
                "attention_options": {"features": (4, 2)},
                "pooling": "cls",
            },
        ),
        (models.MatchingClassifier, {"mechanism": "cosformer", "positions": "none"}),
        (models.TokenClassifier, {"mechanism": "gla", "is_causal": True}),
        (models.SequenceClassifier, {"hybrid": ("hgrn", "cosformer")}),
        (models.AutoEncoder, {"mechanism": "helpers:values_only"}),
        (models.CausalLM, {"mechanism": "linear", "num_kv_heads": 1}),
        (models.MaskedLM, {"mechanism": "flow", "num_layers": 1}),
    ],
)
def test_a_model_comes_back(tmp_path: Path, kind: Any, settings: Any) -> None:
    """Arrays to the bit, random features included, and all settings."""
    settings = SMALL | settings
    if "dtype" in settings:
        settings["dtype"] = jax.numpy.dtype(settings["dtype"])
    sizes = (4,) if issubclass(kind, LanguageModel) else (4, 3)
    model = kind(*sizes, rngs=nnx.Rngs(params=1), **settings)
    file = tmp_path / "one.safetensors"
    models.save(file, model, about={"note": 1})
    saved = models.load(file, allow_code=True)
    assert type(saved.model) is kind
    assert saved.config == model.encoder.config
    assert saved.about == {"note": 1}
    expected, got = (nnx.to_flat_state(nnx.state(x)) for x in (model, saved.model))
    assert [path for path, _ in expected] == [path for path, _ in got]
    for (path, a), (_, b) in zip(expected, got, strict=True):
        assert type(a) is type(b), path
        np.testing.assert_array_equal(a[...], b[...])


@pytest.mark.parametrize("dtype", [jax.numpy.bfloat16, "bfloat16", np.float32])
def test_a_dtype_given_in_any_form_comes_back(tmp_path: Path, dtype: Any) -> None:
    file = tmp_path / "one.safetensors"
    models.save(file, _classifier(mechanism="linear", dtype=dtype))
    assert models.load(file).config.dtype == jax.numpy.dtype(dtype)


def _options_kept(query, key, value, mask=None, *, table=()):
    return value


class Counting(nnx.Module):
    """An attention with an array that is neither trained nor a `Buffer`."""

    def __init__(self, num_heads: int, *, rngs: nnx.Rngs):
        self.seen = nnx.BatchStat(jax.numpy.zeros(num_heads))

    def __call__(self, query, key, value, mask=None):
        return value


@pytest.mark.parametrize(
    ("about", "settings", "words"),
    [
        ({"of": object()}, {}, "about: expected JSON values"),
        (
            {},
            {
                "mechanism": "softmax",
                "attention_options": {"precision": jax.lax.Precision.HIGH},
            },
            "attention_options: expected",
        ),
        (
            {},
            {"mechanism": _options_kept, "attention_options": {"table": [1, 2]}},
            "attention_options: expected .* got table=",
        ),
        ({}, {"mechanism": Counting}, "model: expected .* got BatchStat"),
    ],
)
def test_what_a_file_cannot_hold_leaves_an_earlier_one_alone(
    tmp_path: Path, about: Any, settings: Any, words: str
) -> None:
    """A list would come back as a tuple, which holds one value per block."""
    file = tmp_path / "one.safetensors"
    models.save(file, _classifier(num_layers=1))
    before = [(x.name, x.read_bytes()) for x in sorted(tmp_path.iterdir())]
    with pytest.raises(ValueError, match=f"^{words}"):
        models.save(file, _classifier(**settings), about=about)
    assert before == [(x.name, x.read_bytes()) for x in sorted(tmp_path.iterdir())]


@pytest.mark.parametrize("thing", [None, 3, nnx.Linear(1, 1, rngs=nnx.Rngs(0))])
def test_what_is_none_of_our_models(tmp_path: Path, thing: Any) -> None:
    with pytest.raises(ValueError, match=r"^model: expected one of Seq"):
        models.save(tmp_path / "one.safetensors", thing)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "none" / "one.safetensors"
    with pytest.raises(FileNotFoundError, match=r"one\.safetensors"):
        models.save(file, _classifier(num_layers=1))


@pytest.mark.parametrize("description", ["{}", "[1]", '{"task": "listops"}', "no JSON"])
def test_another_file_is_not_replaced_by_a_description(
    tmp_path: Path, description: str
) -> None:
    """Such as the config.json of a run, by config.safetensors."""
    other = tmp_path / "config.json"
    other.write_text(description)
    with pytest.raises(
        ValueError, match=r"^file: expected .*, got .* next to config\.json, which"
    ):
        models.save(tmp_path / "config.safetensors", _classifier(num_layers=1))
    assert [x.name for x in tmp_path.iterdir()] == ["config.json"]
    assert other.read_text() == description


@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "letters"},
        {"kind": "ids", "buckets": [8, 4]},
        *({"kind": "words", "ids": ids} for ids in (None, {})),
        {"kind": "pixels"},
        {"kind": "bytes", "max_length": 99},
    ],
)
def test_what_does_not_describe_raw_examples(tmp_path: Path, raw: Any) -> None:
    with pytest.raises(ValueError, match=r"^raw: expected "):
        models.save(tmp_path / "one.safetensors", _classifier(num_layers=1), raw=raw)
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_and_nested_tuples_come_back(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    table = (((1, 2), (3, 4)), ((5, 6), (7, np.int64(8))))
    settings = {"mechanism": _options_kept, "attention_options": {"table": table}}
    model = _classifier(**settings, num_layers=np.int64(2))
    models.save(file, model, about={"accuracy": np.float32(0.5)})
    saved = models.load(file, allow_code=True)
    assert saved.config.options == model.encoder.config.options
    assert saved.about == {"accuracy": 0.5}


def test_a_description_of_an_earlier_version_is_read() -> None:
    """Whose encoders named some settings otherwise, and had the head's beside them."""
    settings = {"attention_options": {"eps": 0.1}, "qkv_dim": 8, "pooling": "cls"}
    model = _classifier(**settings)
    described = describe(model)
    encoder = described["encoder"]
    encoder["options"] = encoder.pop("attention_options")
    encoder["qkv_features"] = encoder.pop("qkv_dim")
    encoder["cls_token"] = True
    for name in ("pooling", "padding"):
        described[name] = encoder.pop(name)
    del encoder["interaction"]
    again = maker(described)(nnx.Rngs(params=1))
    assert again.encoder.config == model.encoder.config


def test_code_is_imported_only_when_allowed(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    models.save(file, _classifier(mechanism="helpers:values_only"))
    with pytest.raises(ValueError, match="allow_code: expected True to import"):
        models.load(file)


def test_predictions_are_those_of_the_model(tmp_path: Path) -> None:
    """Words looked up, rows padded, the last batch filled up."""
    model = _classifier()
    file = tmp_path / "one.safetensors"
    models.save(file, model, raw=WORDS)
    saved = models.load(file)
    texts = ["a b ( c )", "b", "c c a b a", "a", "b a"]
    actual = saved.predict(texts, batch_size=2)
    for row, text in enumerate(texts):
        ids = np.array([["_abc".index(x) for x in text if x in "abc"]])
        expected = jax.nn.softmax(helpers.call_model(type(model).__call__, model, ids))
        np.testing.assert_allclose(actual.probabilities[row], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(actual.labels, actual.probabilities.argmax(-1))


@pytest.mark.parametrize(
    ("raw", "widths"),
    [
        ({}, (16, 16)),
        ({"max_length": 12}, (12, 12)),
        ({"max_length": 12, "buckets": [4, 8]}, (4, 8)),
    ],
)
def test_a_mean_over_padding_has_the_width_of_training(
    raw: Any, widths: tuple[int, int]
) -> None:
    """By LRA's rule, which counts every position of the bucket or longest sequence."""
    model = _classifier(padding="zeros", pooling="mean")
    saved = models.Saved(model, model.encoder.config, {"kind": "ids", **raw})
    examples = [[1, 2, 1], [2, 1, 2, 2, 1]]
    actual = saved.predict([*examples, examples[0]]).probabilities
    for row, width in enumerate((*widths, widths[0])):
        tokens = np.zeros((1, width), np.int32)
        content = examples[row % 2]
        tokens[0, : len(content)] = content
        lengths = np.array([len(content)])
        logits = helpers.call_model(type(model).__call__, model, tokens, lengths)
        np.testing.assert_allclose(actual[row], jax.nn.softmax(logits)[0], rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"mechanism": "cosformer", "attention_options": {"grid": True}},
        {"mechanism": "linear", "short_conv": 3, "conv_grid": True},
        {"inputs": "linear", "patch": 2},
    ],
)
def test_images_are_not_padded(settings: dict[str, Any]) -> None:
    """Whichever part of the model knows their rows and columns."""
    model = _classifier(grid=(4, 4), num_layers=1, **settings)
    raw = {"kind": "pixels", "shape": [4, 4]}
    image = np.zeros((4, 4), np.uint8)
    actual = models.Saved(model, model.encoder.config, raw).predict([image, image])
    assert actual.labels.shape == (2,)


def test_what_is_no_list_of_examples() -> None:
    model = _classifier()
    saved: Any = models.Saved(model, model.encoder.config)
    for examples in (None, 7, {"a": 1}, iter([[1]]), [], "text"):
        with pytest.raises(ValueError, match="examples: expected a list of at least"):
            saved.predict(examples)
    for example in ([[1, 2], [3]], 1.5):
        with pytest.raises(ValueError, match=r"example 0: expected integers \[T\]"):
            saved.predict([example])


@pytest.mark.parametrize("ids", [[1, 4], [-1, 1], [2**32 + 1]])
def test_ids_beyond_the_vocabulary_have_no_prediction(ids: list[int]) -> None:
    """A compiled lookup would answer with NaN, or with the row of another id."""
    model = _classifier()
    saved = models.Saved(model, model.encoder.config)
    with pytest.raises(ValueError, match=r"^example 1: expected ids of the vocabulary"):
        saved.predict([[1, 2], ids])
    with pytest.raises(ValueError, match=r"^batch_size: expected"):
        saved.predict([[1, 2]], batch_size=0)


@pytest.mark.parametrize(
    ("raw", "example", "tokens"),
    [
        ({"kind": "bytes", "max_length": 3}, "héllo", [104, 195, 169]),
        ({"kind": "bytes", "strip": True}, " \n a b\n", [97, 32, 98]),
        ({"kind": "bytes", "strip": True}, b" ", [10]),
        ({"kind": "bytes"}, b" a", [32, 97]),
        ({"kind": "pixels", "shape": [2, 3]}, np.arange(6, dtype=np.uint8), None),
        (
            {"kind": "pixels", "shape": [2, 3]},
            np.arange(6, dtype=np.uint8).reshape(2, 3),
            [0, 1, 2, 3, 4, 5],
        ),
        (IN_WORDS, "b  zebra\na a", [2, 3, 0, 1]),
        (IN_WORDS, b"", [0]),
        (IN_WORDS, [1, 2], [1, 2]),
        (IN_WORDS, 0.5, None),
        (IN_WORDS, [1] * 9, None),
        (IN_WORDS, b"\xff", None),
        ({"kind": "ids"}, [3, 1], [3, 1]),
        ({"kind": "ids"}, [0.5], None),
        (WORDS, "a d", None),
        (WORDS, " ", None),
        (WORDS, b"a", None),
    ],
)
def test_raw_examples(raw: Any, example: Any, tokens: list[int] | None) -> None:
    if tokens is not None:
        read = reader(raw, raw.get("max_length", 8))
        assert read("one", example).tolist() == tokens
        return
    with pytest.raises(ValueError, match=r"^one: expected"):
        reader(raw, 8)("one", example)


@pytest.mark.parametrize("example", [5, "ab", [[1]], [[1], [2], [3]]])
def test_what_is_no_pair(example: Any) -> None:
    model = models.MatchingClassifier(4, 3, rngs=nnx.Rngs(params=1), **SMALL)
    saved = models.Saved(model, model.encoder.config)
    with pytest.raises(ValueError, match=r"^example 0: expected a pair, got"):
        saved.predict([example])


def test_what_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    models.save(file, _classifier())
    (tmp_path / "two.safetensors").touch()
    for path, words in (
        (tmp_path / "three", "which does not exist"),
        (tmp_path, "run: expected a run directory with model.safetensors"),
        (tmp_path / "one.json", "file: expected NAME.safetensors"),
        (tmp_path / "two.safetensors", "expected .* of a model, got no such file"),
    ):
        with pytest.raises(ValueError, match=words):
            models.load(path)
    notes = file.with_suffix(".json")
    description = json.loads(notes.read_text())
    unsealed = {k: v for k, v in description.items() if k != "seal"}

    def changed(start: dict[str, Any], **values: Any) -> str:
        model = start["model"]
        encoder = model["encoder"] | values
        return json.dumps(start | {"model": model | {"encoder": encoder}})

    for text, words in (
        ("[]", "expected .* of a model, got a list"),
        (changed(description, embed_dim=16), "the description that was written"),
        (changed(unsealed, embed_dim=16), r"expected encoder\..* of float32"),
        (changed(unsealed, ema=2), r"model: expected model\.ema=0, .*, got 2$"),
    ):
        notes.write_text(text)
        with pytest.raises(ValueError, match=words):
            models.load(file)
    notes.write_text(changed(unsealed, ema=0))  # Of an earlier version.
    models.load(file)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        models.load(file)
    with pytest.raises(ValueError, match="model: expected an attention given by name"):
        models.save(file, _classifier(mechanism=lambda query, key, value: value))
