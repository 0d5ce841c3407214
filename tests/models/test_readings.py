"""Models that read their input several times, with notes."""

import functools
from unittest import mock

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.analysis.capture import capture_attention
from lra_jax.models import MatchingClassifier, SequenceClassifier, TransformerEncoder

VOCABULARY = 7
LENGTHS = jnp.array([12, 5, 9])
SIZES = {
    "num_layers": 1,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "max_length": 16,
    "embed_std": 1.0,
}


def classifier(readings: int = 4, **settings) -> SequenceClassifier:
    settings = {"mechanism": "linear", "pooling": "ends", **settings}
    own = {"reconstructs": True, "readings": readings, **SIZES, **settings}
    return SequenceClassifier(VOCABULARY, 3, **own, rngs=nnx.Rngs(1))


def tokens() -> jax.Array:
    drawn = jax.random.randint(jax.random.key(0), (3, 12), 1, VOCABULARY)
    return jnp.where(real(LENGTHS, 12), drawn, 0)


def real(lengths: jax.Array, size: int) -> jax.Array:
    return jnp.arange(size)[None] < lengths[:, None]


def by_hand(model, readings: int, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """The notes before the last of the readings."""
    notes = jnp.zeros(ids.shape, jnp.int32)
    for _ in range(readings - 1):
        scores = model.reconstructed(ids, lengths, None, notes=notes)
        notes = jnp.where(real(lengths, ids.shape[1]), scores.argmax(-1), 0)
    return notes


@pytest.mark.parametrize("pooling", ["ends", "cls", "mean"])
@pytest.mark.parametrize("readings", [2, 4])
def test_each_reading_sees_the_notes_of_the_one_before(readings: int, pooling: str):
    model = classifier(readings, pooling=pooling)
    notes = by_hand(model, readings, tokens(), LENGTHS)
    np.testing.assert_array_equal(model.noted(tokens(), LENGTHS), notes)
    # The notes matter, and change from reading to reading.
    assert (notes > 0).any()
    assert (notes != by_hand(model, readings + 1, tokens(), LENGTHS)).any()
    mask = real(LENGTHS, 12)
    encoded = model.encoder(tokens(), mask, notes=notes)
    pooled = model._pooled(encoded, mask, encoded[:, 0])
    if pooling != "cls":  # Then its row comes first, and is no token's.
        wanted = model.logits(jax.nn.relu(model.hidden(pooled)))
        found = jax.jit(lambda ids: model(ids, LENGTHS))(tokens())
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_padding_and_packing_change_nothing():
    model = classifier()
    run = functools.partial(helpers.call_model, SequenceClassifier.__call__, model)
    noted = functools.partial(helpers.call_model, SequenceClassifier.noted, model)
    whole = run(tokens(), LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = run(tokens()[row : row + 1, :length])
        np.testing.assert_allclose(whole[row : row + 1], alone, rtol=1e-4, atol=1e-5)
    row = jnp.concatenate([tokens()[1, :5], tokens()[2, :9]])[None]
    segment_ids = jnp.array([[1] * 5 + [2] * 9])
    pair = functools.partial(SequenceClassifier.__call__, documents=2)
    packed = helpers.call_model(pair, model, row, segment_ids=segment_ids)
    np.testing.assert_allclose(packed[0], whole[1:], rtol=1e-4, atol=1e-5)
    # Padding has no notes, here as in a padded batch.
    longer = jnp.pad(row, ((0, 0), (0, 2)), constant_values=3)
    ids = jnp.pad(segment_ids, ((0, 0), (0, 2)))
    found = noted(longer, segment_ids=ids)
    notes = noted(tokens(), LENGTHS)
    assert found is not None and notes is not None
    wanted = jnp.concatenate([notes[1, :5], notes[2, :9], jnp.zeros(2, jnp.int32)])
    np.testing.assert_array_equal(found[0], wanted)


def test_gradients_pass_through_the_last_reading_alone():
    model = classifier()
    notes = model.noted(tokens(), LENGTHS)
    graphdef, state = nnx.split(model)

    def own(state: nnx.State) -> jax.Array:
        return nnx.merge(graphdef, state)(tokens(), LENGTHS).sum()

    def given(state: nnx.State) -> jax.Array:
        merged = nnx.merge(graphdef, state)
        with mock.patch.object(merged, "noted", return_value=notes):
            return merged(tokens(), LENGTHS).sum()

    for ours, wanted in zip(
        *(jax.tree.leaves(jax.jit(jax.grad(f))(state)) for f in (own, given)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def test_a_capture_sees_the_last_reading():
    model = classifier(num_layers=2)
    calls = capture_attention(model, lambda: model(tokens(), LENGTHS))
    assert len(calls) == 2


def test_pairs_and_bfloat16():
    settings = {"reconstructs": True, "readings": 3, "dtype": jnp.bfloat16, **SIZES}
    model = MatchingClassifier(VOCABULARY, 2, **settings, rngs=nnx.Rngs(0))
    found = model(tokens(), LENGTHS, tokens()[::-1], LENGTHS[::-1])
    assert found.shape == (3, 2) and jnp.isfinite(found).all()


def test_notes_beyond_the_vocabulary_give_nan():
    """Under jit, where they are not refused, as tokens do."""
    encode = jax.jit(lambda notes: classifier(2).encoder(tokens(), notes=notes))
    assert jnp.isnan(encode(tokens() + VOCABULARY)).all()


def test_one_reading_has_no_notes():
    model = classifier(1)
    assert model.noted(tokens(), LENGTHS) is None
    assert model.encoder.notes is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: classifier(0), "readings: expected"),
        (lambda: classifier(2, reconstructs=False), "readings: expected 1 without"),
        (
            lambda: classifier(1).reconstructed(tokens(), None, None, notes=tokens()),
            "notes: expected None with readings=1",
        ),
        (
            lambda: classifier(2).encoder(tokens(), notes=tokens()[:, :3]),
            "notes: expected",
        ),
        (
            lambda: classifier(2).encoder(tokens(), notes=tokens() + VOCABULARY),
            "notes: expected ids of the vocabulary",
        ),
        (
            lambda: TransformerEncoder(4, readings=2, **SIZES, rngs=nnx.Rngs(0)),
            "readings: expected 1 without reconstructs",
        ),
    ],
)
def test_errors(call, words: str):
    with pytest.raises(ValueError, match=words):
        call()
