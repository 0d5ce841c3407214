"""Graphs of ONNX compute what the models do, in onnxruntime."""

from pathlib import Path
from typing import Any

import helpers
import numpy as np
import onnxruntime
import pytest
from flax import nnx

from lra_jax import models

SMALL = {
    "num_layers": 1,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "max_length": 12,
}


def _run(file: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options)
    (logits,) = session.run(["logits"], inputs)
    return np.asarray(logits)


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("softmax", {"positions": "rotary", "mlp": "glu", "pooling": "ends"}),
        ("linear", {"positions": "sinusoidal"}),
        ("cosformer", {"pooling": "cls"}),
        ("cosformer", {"grid": (2, 4), "options": {"grid": True}, "max_length": 8}),
        ("linformer", {"options": {"features": 4}, "pooling": "attention"}),
        ("cosformer", {"short_conv": 3, "gate": True, "local_values": True}),
        ("linear", {"norm": "instance", "pooling": "attention"}),
        ("cosformer", {"norm": "batch", "post_norm": True, "pooling": "last"}),
        ("linear", {"activation": "relu", "padding": "zeros", "pooling": "last"}),
        (
            "linear",
            {"inputs": "linear", "positions": "learned_2d", "grid": (2, 4)}
            | {"max_length": 8},
        ),
        (
            "linear",
            {"inputs": "linear", "grid": (2, 4), "patch": 2, "max_length": 8}
            | {"padding": "zeros", "pooling": "attention"},
        ),
        ("linear", {"padding": "zeros", "pooling": "ends"}),
        *(
            ("linformer", {"options": {"projection": kind, "window": 3}})
            for kind in ("mean", "max")
        ),
        ("linformer", {"options": {"projection": "convolution", "features": 4}}),
        ("flow", {}),
        ("flow", {"options": {"feature_map": "relu"}}),
        ("linear", {"hybrid": ("cosformer", "linear"), "num_layers": 2}),
    ],
)
def test_a_graph_is_the_model(tmp_path: Path, mechanism: str, settings: Any) -> None:
    """On random tokens, of which the second row has fewer."""
    length = 8
    model = models.SequenceClassifier(
        16, 3, mechanism=mechanism, rngs=nnx.Rngs(params=0), **(SMALL | settings)
    )
    helpers.move_running_means(model)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (2, length)).astype(np.int32)
    lengths = np.array([length, 5], np.int32)
    file = tmp_path / "model.onnx"
    models.export_onnx(file, model, batch_size=2, length=length)
    wanted = helpers.call_model(type(model).__call__, model, tokens, lengths)
    got = _run(file, {"tokens": tokens, "lengths": lengths})
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["last", "ends"])
def test_the_ends_of_a_single_sequence(tmp_path: Path, pooling: Any) -> None:
    model = models.SequenceClassifier(
        16, 3, mechanism="linear", pooling=pooling, rngs=nnx.Rngs(0), **SMALL
    )
    tokens = np.random.default_rng(0).integers(0, 16, (1, 8)).astype(np.int32)
    lengths = np.array([5], np.int32)
    file = tmp_path / "model.onnx"
    models.export_onnx(file, model, length=8)
    got = _run(file, {"tokens": tokens, "lengths": lengths})
    np.testing.assert_allclose(got, model(tokens, lengths), rtol=1e-4, atol=1e-5)


def test_long_softmax_has_a_graph(tmp_path: Path) -> None:
    """Beyond 256 positions its quickest form is a loop over blocks."""
    model = models.SequenceClassifier(
        16, 3, mechanism="softmax", rngs=nnx.Rngs(0), **(SMALL | {"max_length": 300})
    )
    tokens = np.random.default_rng(0).integers(0, 16, (1, 300)).astype(np.int32)
    lengths = np.array([290], np.int32)
    file = tmp_path / "model.onnx"
    models.export_onnx(file, model, length=300)
    wanted = helpers.call_model(type(model).__call__, model, tokens, lengths)
    got = _run(file, {"tokens": tokens, "lengths": lengths})
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_length_is_that_of_training_where_the_mean_counts_padding(
    tmp_path: Path,
) -> None:
    model = models.SequenceClassifier(
        16, 3, mechanism="linear", padding="zeros", rngs=nnx.Rngs(0), **SMALL
    )
    raw = {"kind": "ids", "buckets": [8], "max_length": 12}
    saved = models.Saved(model, model.encoder.config, raw)
    file = tmp_path / "model.onnx"
    for length in (8, 12):
        models.export_onnx(file, saved, length=length)
    with pytest.raises(ValueError, match=r"length: .*such as 12, got 10.*zeros"):
        models.export_onnx(file, saved, length=10)


def test_pairs_have_four_inputs(tmp_path: Path) -> None:
    model = models.MatchingClassifier(
        16, 3, mechanism="linear", rngs=nnx.Rngs(params=0), **SMALL
    )
    tokens = np.arange(6, dtype=np.int32)[None]
    inputs = {
        "tokens_1": tokens,
        "lengths_1": np.array([6], np.int32),
        "tokens_2": tokens + 3,
        "lengths_2": np.array([4], np.int32),
    }
    file = tmp_path / "model.onnx"
    models.export_onnx(file, models.Saved(model, model.encoder.config), length=6)
    wanted = helpers.call_model(type(model).__call__, model, *inputs.values())
    np.testing.assert_allclose(_run(file, inputs), wanted, rtol=1e-4, atol=1e-5)


def test_what_has_no_graph(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match="model: expected a classifier"):
        models.export_onnx(file, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), length=4)
    tagger = models.TokenClassifier(
        16, 3, mechanism="linear", rngs=nnx.Rngs(params=0), **SMALL
    )
    with pytest.raises(ValueError, match=r"classifier of whole.*TokenClassifier"):
        models.export_onnx(file, tagger, length=8)
    sorted_ = models.SequenceClassifier(
        16, 3, mechanism="reformer", rngs=nnx.Rngs(params=0), **SMALL
    )
    with pytest.raises(ValueError, match="model: expected one that"):
        models.export_onnx(file, sorted_, length=8)
    with pytest.raises(ValueError, match="length: expected at most 12"):
        models.export_onnx(file, sorted_, length=13)
    for dtype in ("bfloat16", "float16"):
        half = models.SequenceClassifier(
            16, 3, mechanism="linear", dtype=dtype, rngs=nnx.Rngs(params=0), **SMALL
        )
        with pytest.raises(ValueError, match="model: expected one that computes in"):
            models.export_onnx(file, half, length=8)
    assert not file.exists()
