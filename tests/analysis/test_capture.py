"""The contents of a capture, for models of every mechanism and for a saved run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.analysis.capture import call_of, capture, variant_states
from lra_jax.analysis.collapse import collapse_curves, model_curves
from lra_jax.analysis.networks import VARIANTS, Variant
from lra_jax.models import MaskedLM, MatchingClassifier, SequenceClassifier
from lra_jax.models.attention import MultiHeadAttention

pytestmark = pytest.mark.slow

# The weights before a norm that acts on the output, as a gate does.
NORMED = ("norm", "retention", "delta")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 16)), jnp.int32)
LENGTHS = jnp.array([16, 11], jnp.int32)


def classifier(mechanism="softmax", num_layers=2, **settings):
    return SequenceClassifier(
        9,
        3,
        mechanism=mechanism,
        num_layers=num_layers,
        embed_dim=8,
        mlp_dim=8,
        max_length=16,
        **settings,
        rngs=nnx.Rngs(0),
    )


# Of each kind: features, competition, projections, random features, gates, a memory,
# a unit in the MLP's place, a step of a recurrence, and none at all.
KINDS = ("softmax", "cosformer", "flow", "linformer", "performer", "retention", "gla")
KINDS += ("luna", "gau", "hgrn", "fnet")


@pytest.mark.parametrize("name", KINDS)
def test_weights_times_values_are_what_attention_gave(name):
    model = classifier(name, num_layers=1)
    captured = capture(model, lambda: model(TOKENS, LENGTHS))
    call = captured.calls[0]
    assert call.mechanism.name == name
    assert len(captured.calls) == (1 if call.mechanism.mlp else 2)
    if name == "fnet":
        with pytest.raises(ValueError, match="fnet"):
            call.weights()
        return
    weights = call.weights()
    assert weights.shape == (2, call.query.shape[2], 16, 16)
    if name in NORMED or call.mechanism.gates:
        return
    attention = functools.partial(call.mechanism.attention, **call.keywords)
    expected = jax.jit(attention)(call.query, call.key, call.value)
    measured = np.einsum("bnts,bsnh->btnh", weights, np.asarray(call.value))
    real = np.asarray(captured.mask)
    np.testing.assert_allclose(measured[real], np.asarray(expected)[real], atol=1e-4)


def test_states_are_those_between_the_blocks():
    model = classifier()
    plain = model(TOKENS, LENGTHS)
    captured = capture(model, lambda: model(TOKENS, LENGTHS))
    np.testing.assert_array_equal(plain, model(TOKENS, LENGTHS))  # nothing stays
    assert captured.states.shape == (3, 2, 16, 8) and len(captured.calls) == 2
    np.testing.assert_array_equal(captured.mask.sum(1), LENGTHS)
    encoder: Any = model.encoder
    for layer, block in enumerate(encoder.blocks):
        x = jnp.asarray(captured.states[layer])
        out = block(x, jnp.asarray(captured.mask))
        np.testing.assert_allclose(captured.states[layer + 1], out, atol=1e-6)
        value = block.attention.value(block.attention_norm(x))
        call = captured.calls[layer]
        np.testing.assert_allclose(call.value.reshape(value.shape), value, atol=1e-6)
    last = encoder.norm(jnp.asarray(captured.states[-1]))
    expected = encoder(TOKENS, jnp.asarray(captured.mask))
    np.testing.assert_allclose(last, expected, atol=1e-6)


def test_all_parts_are_the_block_itself():
    model = classifier()
    run = lambda: model(TOKENS, LENGTHS)  # noqa: E731
    whole, mask = variant_states(model, run, {"whole": Variant(skip=True, mlp=True)})
    captured = capture(model, run)
    np.testing.assert_array_equal(whole["whole"], captured.states)
    np.testing.assert_array_equal(mask, captured.mask)
    curves = model_curves(model, run, VARIANTS | {"raw": Variant(False, False, False)})
    assert all(c.shape == (2, 3) for c in curves.values())
    assert len({float(c[0, -1]) for c in curves.values()}) == 5


def test_padding_does_not_enter_the_curves():
    model = classifier()
    padded = model_curves(model, lambda: model(TOKENS, LENGTHS))
    alone = model_curves(model, lambda: model(TOKENS[1:, :11], LENGTHS[1:]))
    for name in VARIANTS:
        np.testing.assert_allclose(padded[name][1], alone[name][0], rtol=1e-3)


def test_the_first_document_of_a_pair():
    model = MatchingClassifier(
        9, 2, embed_dim=8, mlp_dim=8, max_length=16, num_layers=2, rngs=nnx.Rngs(0)
    )
    captured = capture(model, lambda: model(TOKENS, LENGTHS, TOKENS, LENGTHS))
    assert len(captured.states) == 3 and len(captured.calls) == 2


def test_errors():
    model = classifier()
    captured = capture(model, lambda: model(TOKENS, LENGTHS))
    for layer in (0, 3, -1):
        with pytest.raises(ValueError, match=f"layer: expected 1 to 2.*got {layer}"):
            call_of(captured.calls, layer)
    bare = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"made of lra_jax\.models\.Block"):
        capture(bare, lambda: None)
    model = classifier("helpers:values_only", num_layers=1)
    captured = capture(model, lambda: model(TOKENS, LENGTHS))
    with pytest.raises(ValueError, match="helpers:values_only"):
        captured.calls[0].weights()


def test_a_memory_is_carried_while_blocks_are_watched():
    model = classifier("luna")
    plain = model(TOKENS, LENGTHS)
    captured = capture(model, lambda: model(TOKENS, LENGTHS))
    assert len(captured.calls) == 2
    encoded = model.encoder.norm(jnp.asarray(captured.states[-1]))
    expected = model.encoder(TOKENS, jnp.asarray(captured.mask))
    np.testing.assert_allclose(encoded, expected, atol=1e-6)
    whole = {"whole": Variant(skip=True, mlp=True)}
    states, _ = variant_states(model, lambda: model(TOKENS, LENGTHS), whole)
    np.testing.assert_array_equal(states["whole"], captured.states)
    np.testing.assert_array_equal(plain, model(TOKENS, LENGTHS))


def test_blocks_that_share_arrays_and_are_computed_again():
    """Twelve of them: in their own order, with the first one's projections."""
    options = {"sharing": "layerwise", "features": 4}
    model = classifier("linformer", 12, attention_options=options, remat=True)
    run = lambda: model(TOKENS, LENGTHS)  # noqa: E731
    captured = capture(model, run)
    first = model.encoder.blocks[0].attention.parameters
    for index, block in enumerate(model.encoder.blocks):
        x = jnp.asarray(captured.states[index])
        out = block(x, jnp.asarray(captured.mask), parameters=first)
        np.testing.assert_allclose(captured.states[index + 1], out, atol=1e-6)
    states, _ = variant_states(model, run, {"whole": Variant(skip=True, mlp=True)})
    np.testing.assert_array_equal(states["whole"], captured.states)


def test_parts_left_out_of_a_packed_row_keep_documents_apart():
    """Two documents, of 9 and 5 tokens, and 2 of padding."""
    sizes = {"num_layers": 2, "embed_dim": 8, "mlp_dim": 8, "max_length": 16}
    model = MaskedLM(9, **sizes, rngs=nnx.Rngs(0))
    segments = jnp.asarray([[1] * 9 + [2] * 5 + [0] * 2], jnp.int32)
    run = lambda: model(TOKENS[:1], segment_ids=segments)  # noqa: E731
    whole = {"whole": Variant(skip=True, mlp=True), "alone": Variant(False, False)}
    states, mask = variant_states(model, run, whole)
    captured = capture(model, run)
    np.testing.assert_array_equal(states["whole"], captured.states)
    np.testing.assert_array_equal(captured.documents, segments)
    np.testing.assert_array_equal(mask[0], [True] * 9 + [False] * 7)
    ones = jnp.ones((1, 9), jnp.int32)
    alone = lambda: model(TOKENS[:1, :9], segment_ids=ones)  # noqa: E731
    states, _ = variant_states(model, alone, whole)
    curves = model_curves(model, run, whole)
    for name in whole:
        np.testing.assert_allclose(
            curves[name], collapse_curves(states[name]), rtol=1e-4, atol=1e-6
        )
