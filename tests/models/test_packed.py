"""Models on rows of several documents: what each document alone gives."""

from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_rejects
from flax import nnx

from lra_jax.models import MultiHeadAttention, SequenceClassifier

IDS = np.array([[1, 1, 1, 1, 2, 3, 3, 3, 0, 0], [0, 5, 5, 5, 5, 5, 0, 5, 5, 5]])
# Row, first position and the one after the last, document by document.
SPANS = [(0, 0, 4), (0, 4, 5), (0, 5, 8), (1, 1, 6), (1, 7, 10)]


def _classifier(**changes: Any) -> SequenceClassifier:
    settings = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 12, "max_length": 12}
    return SequenceClassifier(11, 4, rngs=nnx.Rngs(0), **settings | changes)


def _together(model: SequenceClassifier, tokens: np.ndarray) -> Any:
    return model(jnp.asarray(tokens), segment_ids=jnp.asarray(IDS), documents=3)


def _apart(model: SequenceClassifier, tokens: np.ndarray, lengths: np.ndarray) -> Any:
    return model(tokens, lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"mechanism": "linear", "pooling": "mean"},
        {"mechanism": "cosformer", "pooling": "attention+ends", "short_conv": 3},
        {"mechanism": "linear", "pooling": "last", "norm": "batch", "post_norm": True},
        {"mechanism": "softmax", "pooling": "first", "positions": "rotary"},
        {"mechanism": "linear", "pooling": "attention", "norm": "instance"},
        {"mechanism": "linear", "positions": "rotary"},
        {"mechanism": "gau", "positions": "sinusoidal"},
        {"hybrid": ("hgrn", "cosformer"), "num_layers": 2},
    ],
)
def test_a_packed_row_gives_the_logits_of_each_document(changes: dict) -> None:
    tokens = np.random.default_rng(0).integers(1, 11, IDS.shape)
    model = _classifier(**changes)
    helpers.move_running_means(model)
    together = np.asarray(helpers.call_model(_together, model, tokens))
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    rows = np.zeros((len(SPANS), 5), int)
    for one, (row, first, end) in enumerate(SPANS):
        rows[one, : end - first] = tokens[row, first:end]
    lengths = np.array([end - first for _, first, end in SPANS])
    alone = np.asarray(helpers.call_model(_apart, model, rows, lengths))
    for place, expected in zip(places, alone, strict=True):
        np.testing.assert_allclose(together[place], expected, rtol=2e-5, atol=2e-5)
    assert np.isfinite(together).all()


def test_where_there_can_be_no_documents() -> None:
    tokens = np.ones(IDS.shape, int)
    for changes, part in (
        ({"pooling": "cls"}, "a class vector"),
        ({"padding": "zeros"}, "padding='zeros'"),
        ({"mechanism": lambda q, k, v: v}, "does not take it"),
    ):
        model = _classifier(**changes)
        assert_rejects(
            lambda model=model: _together(model, tokens), "segment_ids", part
        )
    layer = MultiHeadAttention(2, 8, mechanism="linear", rngs=nnx.Rngs(0))
    x = jnp.ones((2, 10, 8))
    assert_rejects(
        lambda: layer(x, x, segment_ids=jnp.asarray(IDS)),
        "segment_ids",
        "with a context",
    )
    model = _classifier(mechanism="linear")
    with pytest.raises(
        ValueError, match="documents: expected a positive int, got None"
    ):
        model(tokens, segment_ids=jnp.asarray(IDS))
