"""Decoding: what comes token by token is what the whole sequence gives."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import models
from lra_jax.models import decoding
from lra_jax.models.generation import restrict, tokens_in_turn

VOCABULARY = 11


def decoder(mechanism: str = "cosformer", **settings) -> models.CausalLM:
    settings = {"positions": "none", "short_conv": 3, **settings}
    sizes = {"num_layers": 2, "embed_dim": 8, "mlp_dim": 8, "max_length": 80}
    rngs = nnx.Rngs(params=1)
    settings = sizes | settings
    model = models.CausalLM(VOCABULARY, mechanism=mechanism, **settings, rngs=rngs)
    assert isinstance(model.encoder.embed, nnx.Embed)
    # Embeddings so small that every continuation would look alike.
    embedding = model.encoder.embed.embedding
    embedding[...] = embedding[...] * 50
    return model


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("cosformer", {}),
        ("softmax", {"positions": "rotary"}),
        ("linear", {"positions": "sinusoidal", "scale_embeddings": True}),
        ("flow", {"positions": "learned", "short_conv": 0}),
        ("gla", {"mlp": "none"}),
        ("linear", {"post_norm": True, "activation": "relu"}),
        ("cosformer", {"hybrid": ("hgrn", "cosformer"), "num_layers": 3}),
    ],
)
def test_parts_give_what_the_whole_gives(mechanism, settings):
    model = decoder(mechanism, **settings)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 9))
    lengths = np.array([4, 7])
    mask = np.arange(9)[None, :7] < lengths[:, None]
    prompt = np.where(mask, tokens[:, :7], 3)
    # A mask of numbers is one as well.
    shown = mask.astype(np.float32)
    logits, state = helpers.call_model(decoding.prefill, model, prompt, mask=shown)
    whole = helpers.call_model(type(model).__call__, model, tokens)
    for i in range(2):
        np.testing.assert_allclose(logits[i], whole[i][lengths[i] - 1], atol=2e-5)
    for t in range(2):
        chosen = tokens[np.arange(2), lengths + t]
        logits, state = helpers.call_model(decoding.step, model, state, chosen)
        for i in range(2):
            expected = whole[i][lengths[i] + t]
            np.testing.assert_allclose(logits[i], expected, atol=2e-5)
    np.testing.assert_array_equal(state.position, lengths + 2)


def test_a_batch_is_continued_as_each_prompt_alone():
    model = decoder()
    prompts = [[1, 2, 3], [4] * 6, [5]]
    together = models.generate(model, prompts, 5, temperature=0)
    for prompt, text in zip(prompts, together, strict=True):
        (alone,) = models.generate(model, [prompt], 5, temperature=0)
        np.testing.assert_array_equal(alone, text)
        assert len(text) == 5


def test_seeds_fix_the_draws_and_an_end_ends_a_text():
    model = decoder()
    first, again, other = (
        models.generate(model, [[1], [2, 3]], 6, seed=seed) for seed in (0, 0, 1)
    )
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
    end = int(first[0][3])
    ended = models.generate(model, [[1], [2, 3]], 6, seed=0, end=end)
    assert len(ended[0]) == first[0].tolist().index(end)
    steps = list(tokens_in_turn(model, [[1]], 6, seed=0, end=end))
    assert len(steps) == len(ended[0]) + 1


def test_which_tokens_can_be_drawn():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))

    def kept(**settings):
        return np.isfinite(restrict(logits, **settings))[0].tolist()

    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_k=9) == [True] * 4
    assert kept(top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.81) == [True, True, True, False]
    assert kept(top_k=3, top_p=0.5) == [True, False, False, False]


def test_a_probability_of_one_keeps_every_token():
    """In float32 the most probable ones already add up to 1 here."""
    logits = jnp.array([[20.0, 0.0, -1.0, -2.0]])
    assert np.isfinite(restrict(logits, top_p=1.0)).all()


@pytest.mark.parametrize("top_p", [None, 0.5])
def test_a_tiny_temperature_takes_the_most_probable_token(top_p: float | None) -> None:
    """Logits above 0 over it would be infinite, and the first of them would win."""
    model, prompts = decoder("linear"), [np.array([1, 5]), np.array([7])]
    expected = models.generate(model, prompts, 4, temperature=0)
    for temperature in (1e-39, 1e-300):
        actual = models.generate(
            model, prompts, 4, temperature=temperature, top_p=top_p
        )
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"end": 3, "seed": 1}],
)
def test_a_broken_model_says_so(settings: dict) -> None:
    """All its tokens would be the first of the vocabulary."""
    model = decoder("linear")
    model.encoder.blocks[1].mlp.inner.kernel[...] = jnp.full((8, 8), jnp.nan)
    with pytest.raises(ValueError, match=r"^model: expected weights .*, got NaN$"):
        models.generate(model, [[1, 2], [3]], 4, **settings)


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("cosformer", {"max_length": 5}),  # No room for the padding.
        ("softmax", {"positions": "learned", "max_length": 5}),
        ("linear", {"positions": "rotary"}),
        ("retention", {"positions": "sinusoidal"}),
    ],
)
def test_padding_of_a_prompt_may_be_anywhere(mechanism: str, settings: dict) -> None:
    model = decoder(mechanism, **settings)
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (4, 4))
    rows = [[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]]
    mask = np.array(rows, bool)
    logits, state = helpers.call_model(decoding.prefill, model, tokens, mask=mask)
    chosen = np.array([5, 6, 7, 8])
    further, _ = helpers.call_model(decoding.step, model, state, chosen)
    # The real tokens first; what follows them has no influence.
    alone = np.zeros_like(tokens)
    for text, row, real, token in zip(alone, tokens, mask, chosen, strict=True):
        text[: real.sum() + 1] = np.append(row[real], token)
    whole = helpers.call_model(type(model).__call__, model, alone)
    for i, count in enumerate(mask.sum(1)):
        np.testing.assert_allclose(logits[i], whole[i, count - 1], atol=2e-5)
        np.testing.assert_allclose(further[i], whole[i, count], atol=2e-5)


def test_a_prompt_has_a_token() -> None:
    """Without one, no token would be the last."""
    tokens, mask = jnp.ones((2, 3), int), jnp.array([[1, 1, 0], [0, 0, 0]], bool)
    with pytest.raises(ValueError, match=r"^mask: expected at least one real token"):
        decoding.prefill(decoder("linear"), tokens, mask=mask)


def test_how_far_a_model_can_go():
    assert decoding.longest(decoder("linear")) is None
    assert decoding.longest(decoder("cosformer")) == 80
    assert decoding.longest(decoder("softmax")) == 80
    assert decoding.longest(decoder("linear", positions="learned")) == 80


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_stream_ends_where_its_positions_do(positions):
    """Beyond the table every position would have the last one's row."""
    model = decoder("linear", positions=positions, num_layers=1, max_length=3)
    tokens = jnp.zeros((2, 4), int)
    expected = "^tokens: expected at most max_length=3 positions in a stream, got 4"
    with pytest.raises(ValueError, match=expected):
        decoding.prefill(model, tokens)
    _, state = decoding.prefill(model, tokens[:, :3])
    with pytest.raises(ValueError, match=expected):
        decoding.step(model, state, tokens[:, 0])
    late, _ = helpers.call_model(decoding.step, model, state, tokens[:, 0])
    assert np.isnan(late).all()  # Positions are traced, and cannot be checked.
    # Padding on the right takes up no positions.
    mask = np.arange(4)[None] < np.array([[3], [2]])
    padded, _ = decoding.prefill(model, tokens, mask=jnp.asarray(mask))
    alone, _ = decoding.prefill(model, tokens[:1, :3])
    np.testing.assert_allclose(padded[0], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([1] * 79, {}, "prompts: expected at most max_length=80 with"),
        ([], {}, r"prompts: expected integers \[T\] with T > 0"),
        ([11], {}, "prompts: expected ids of .* 0 to 10, got 11 to 11"),
        ([1], {"top_p": 1.5}, "top_p: expected a number above 0"),
        ([1], {"temperature": -1}, "temperature: expected 0 or a pos"),
        ([1], {"seed": 2**32 + 5}, "seed: expected an int from -2"),
        ([1], {"end": 11}, "end: expected an id of the .* got 11"),
        # Then no prompt fits: the number is wrong, not the prompt.
        ([1], {"num_tokens": 80}, "num_tokens: expected an int below max_len"),
    ],
)
def test_what_cannot_be_continued(prompt, settings, message):
    settings = {"num_tokens": 2} | settings
    with pytest.raises(ValueError, match=f"^{message}"):
        models.generate(decoder(), [prompt], **settings)


def test_models_without_a_stream():
    with pytest.raises(ValueError, match=r"^layer: expected a mechanism with a stream"):
        models.generate(decoder("luna"), [[1]], 2)
    with pytest.raises(ValueError, match=r"^model: expected a CausalLM, got a dict"):
        models.generate({}, [[1]], 2)  # pyright: ignore[reportArgumentType]


def test_embeddings_and_logits_are_tied():
    model = decoder()
    names = [str(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert not any("logits" in name for name in names)
    x = jnp.ones((1, 8))
    assert isinstance(model.encoder.embed, nnx.Embed)
    expected = x @ model.encoder.embed.embedding[...].T
    np.testing.assert_allclose(model.compute_logits(x), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^is_causal: expected True"):
        decoder(is_causal=False)


def test_a_language_model_comes_back_from_its_file(tmp_path):
    model = decoder("linear")
    models.save(tmp_path / "m.safetensors", model, raw={"kind": "bytes", "end": 256})
    saved = models.load(tmp_path / "m.safetensors")
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(saved.model), nnx.state(model)
    )
    assert saved.raw["end"] == 256
