"""Networks of published shapes: the printed curves, the parts, every mechanism."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_rejects
from flax import nnx

from lra_jax.analysis.bounded_collapse import BoundedCollapse, bounded_collapse
from lra_jax.analysis.collapse import (
    collapse_curves,
    compare_networks,
    figure_2,
    network_curves,
)
from lra_jax.analysis.networks import (
    SHAPES,
    VARIANTS,
    Network,
    Shape,
    Variant,
    zipf_tokens,
)
from lra_jax.analysis.relative import RelativeAttention

TINY = Shape(50, num_layers=3, width=16, num_heads=2, mlp_dim=24, embed_dim=16)
PRINTED_LAYERS = 3


@pytest.fixture
def optimised():
    """Networks of full width, whose weights unoptimised code is slow to draw."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize(("name", "draws"), [("bert", 2), ("xlnet", 1)])
def test_curves_at_initialisation_are_the_published_ones(name, draws, optimised):
    curves_by_name = network_curves(
        name, batch_size=1, num_layers=PRINTED_LAYERS, draws=draws
    )
    for variant, printed in figure_2(name).items():
        np.testing.assert_allclose(
            curves_by_name[variant].mean(0), printed[: PRINTED_LAYERS + 1], atol=0.05
        )


def test_albert_at_initialisation_is_as_published(optimised):
    """One draw of ALBERT's weights differs from the next by more than 0.05, and each
    printed curve is one draw: 0.57 to 0.67 at layer 0, where all four are the same."""
    curves_by_name = network_curves(
        "albert", batch_size=1, num_layers=PRINTED_LAYERS, draws=4
    )
    printed = figure_2("albert")
    start = np.mean([curve[0] for curve in printed.values()])
    assert abs(curves_by_name["attention"][:, 0].mean() - start) < 0.05
    for variant, curve in printed.items():
        distance = np.abs(curves_by_name[variant] - curve[: PRINTED_LAYERS + 1]).max(1)
        assert distance.min() < 0.05


def test_a_network_deeper_than_the_published_one_has_a_table():
    curves = {name: np.ones((2, 15)) for name in VARIANTS}
    printed = {"bert": figure_2("bert")}
    _, table = compare_networks("rank-collapse", {"bert": curves}, printed, "")
    assert {len(row) for row in table.rows} == {len(table.head)} == {16}


@pytest.mark.parametrize("name", ["linear", "linformer", "sparse", "gau", "hgrn"])
def test_mechanisms_have_a_curve(name):
    network = Network(TINY, name, length=16, num_layers=1, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(zipf_tokens(50, 1, 16))
    states = helpers.call_model(run_whole, network, tokens)
    curves = collapse_curves(states)
    assert curves.shape == (1, 2) and 0 < curves[0, 1] < 1.5


def run_whole(network, tokens):
    return network(tokens, Variant(skip=True, mlp=True))


def test_parts_can_be_left_out_one_by_one():
    variants = VARIANTS | {"no norm": Variant(True, True, norm=False)}
    curves_by_name = network_curves(TINY, variants=variants, length=16, num_layers=1)
    starts = {float(curves[0, 0]) for curves in curves_by_name.values()}
    ends = {float(curves[0, 1]) for curves in curves_by_name.values()}
    assert len(starts) == 1 and len(ends) == len(variants)


def dense_block(block, x, variant):
    """A block of softmax attention, written out."""

    def norm(layer, x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)

    def dense(layer, x):
        return x @ np.asarray(layer.kernel[...], np.float64)

    attention = block.attention
    query, key, value = (
        dense(layer, x).reshape(len(x), 2, 8).swapaxes(0, 1)
        for layer in (attention.query, attention.key, attention.value)
    )
    weights = np.exp(query @ key.swapaxes(1, 2) / np.sqrt(8))
    weights /= weights.sum(-1, keepdims=True)
    branch = dense(attention.out, (weights @ value).swapaxes(0, 1).reshape(len(x), 16))
    x = norm(None, branch + variant.skip * x)
    if variant.mlp:
        hidden = dense(block.mlp.inner, x)
        hidden = np.asarray(jax.nn.gelu(jnp.asarray(hidden), approximate=False))
        x = norm(None, x + dense(block.mlp.outer, hidden))
    return x


def test_a_network_is_the_formula():
    network = Network(TINY, length=8, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(zipf_tokens(50, 1, 8))
    for variant in VARIANTS.values():
        states = network(tokens, variant)
        for layer, block in enumerate(network.blocks):
            expected = dense_block(block, np.asarray(states[layer][0], float), variant)
            np.testing.assert_allclose(states[layer + 1][0], expected, atol=1e-4)


def test_relative_attention_is_the_formula():
    layer = RelativeAttention(
        8, 2, kernel_init=nnx.initializers.normal(0.7), rngs=nnx.Rngs(0)
    )
    x = np.random.default_rng(0).normal(size=(5, 8))
    arrays = {
        name: np.asarray(getattr(layer, name)[...], np.float64)
        for name in ("query", "key", "value", "distance", "out")
    }
    content, by_distance = (
        np.asarray(bias[...], np.float64)
        for bias in (layer.content_bias, layer.distance_bias)
    )
    expected = np.zeros((5, 8))
    for n in range(2):
        query, key, value = (x @ arrays[k][:, n] for k in ("query", "key", "value"))
        scores = np.zeros((5, 5))
        for i in range(5):
            for j in range(5):
                angles = (i - j) / 10_000 ** (np.arange(0, 8, 2) / 8)
                row = np.concatenate([np.sin(angles), np.cos(angles)])
                scores[i, j] = (query[i] + content[n]) @ key[j] + (
                    query[i] + by_distance[n]
                ) @ (row @ arrays["distance"][:, n])
        weights = np.exp(scores / 2)
        weights /= weights.sum(-1, keepdims=True)
        expected += weights @ value @ arrays["out"][:, n].T
    np.testing.assert_allclose(
        layer(jnp.asarray(x, jnp.float32)[None])[0], expected, atol=1e-4
    )


def test_tokens_follow_zipf():
    tokens = zipf_tokens(1000, 50, 200)
    assert tokens.shape == (50, 200) and tokens.dtype == np.int32
    shares = np.bincount(tokens.ravel(), minlength=1000) / tokens.size
    expected = 1 / (np.arange(1000) + 2.7)
    np.testing.assert_allclose(shares[:5], (expected / expected.sum())[:5], rtol=0.15)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: network_curves("brt"), ["network", "'bert'"]),
        (lambda: network_curves(TINY, "softmx"), ["softmx"]),
        (lambda: network_curves(TINY, length=513), ["length", "513"]),
        (lambda: collapse_curves(np.full((2, 1, 3, 4), np.nan)), ["layer 0", "finite"]),
    ],
)
def test_errors(call, parts):
    assert_rejects(call, *parts)


def test_shapes_are_those_of_the_models():
    """Parameters of the published encoders, pooler and head left out."""
    counts = {"bert": 107_719_680, "albert": 11_092_992, "xlnet": 116_718_336}
    for name, expected in counts.items():
        network = nnx.eval_shape(
            lambda name=name: Network(SHAPES[name], rngs=nnx.Rngs(0))
        )
        size = sum(x.size for x in jax.tree.leaves(nnx.state(network)))
        # One row of token types in place of two, no segments in XLNet.
        assert abs(size - expected) / expected < 1e-3, (name, size)


def test_pure_attention_of_a_network_stays_below_its_bound() -> None:
    collapse = bounded_collapse(TINY, length=12, seed=3)
    above = collapse.residuals > 10 * collapse.rounding
    assert above[1]
    assert (collapse.residuals <= collapse.bounds)[above].all()
    assert (collapse.residuals <= collapse.next_bounds)[above].all()
    assert collapse.bounds[1] == collapse.next_bounds[1]
    half = bounded_collapse(TINY, scale=0.5, length=12, seed=3)
    np.testing.assert_allclose(half.bounds[2], collapse.bounds[2] / 2**9, rtol=1e-12)
    # With layer normalisation the tokens keep their size. In float32 the residual of
    # the second layer would be rounding.
    normal = bounded_collapse(TINY, norm=True, length=12, seed=3)
    assert normal.residuals[1] > collapse.residuals[1]
    assert 10 * normal.rounding[2] < normal.residuals[2] < 1e-8


def test_bounds_of_other_networks() -> None:
    with pytest.raises(ValueError, match="shape: expected one of attention by content"):
        bounded_collapse("albert")


def test_no_bound_is_given_from_a_residual_lost_in_rounding():
    """It would be far below the residual that it should bound."""
    collapse = BoundedCollapse(
        residuals=np.array([3.7, 5e-4, 4e-15, 6e-15]),
        rounding=np.full(4, 1e-15),
        bounds=np.array([3.7, 5e3, 1e13, 3e41]),
        next_bounds=np.array([3.7, 5e3, 1.4e-8, 6e-42]),
        beta=37.0,
    )
    measured, bounds, next_bounds = collapse.columns().values()
    np.testing.assert_array_equal(measured, [3.7, 5e-4, np.nan, np.nan])
    np.testing.assert_array_equal(bounds, collapse.bounds)
    np.testing.assert_array_equal(next_bounds, [3.7, 5e3, 1.4e-8, np.nan])
