"""Residual, norm, paths, bound and spectrum: golden values and properties."""

import numpy as np
import pytest
from attention import golden
from attention.mechanisms import assert_rejects

from lra_jax import analysis

needs_golden = pytest.mark.skipif(not golden.AVAILABLE, reason=golden.REASON)
RNG = np.random.default_rng(0)


def case(name: str) -> dict[str, np.ndarray]:
    family = golden.select(name.split("_")[0])
    (entry,) = (entry for entry in family if entry["name"] == name)
    with np.load(golden.FOLDER / entry["file"]) as stored:
        return dict(stored)


def san(x, weights, kernels, bias, skip=False):
    """A network of attention layers whose matrices are given."""
    for matrices, products, row in zip(weights, kernels, bias, strict=True):
        heads = sum(p @ x @ w for p, w in zip(matrices, products, strict=True))
        x = heads + row + (x if skip else 0)
    return x


def stochastic(*shape: int) -> np.ndarray:
    weights = RNG.exponential(size=shape)
    return weights / weights.sum(-1, keepdims=True)


@needs_golden
def test_golden_path_decomposition():
    arrays = case("rank_collapse_path_decomposition")
    kernels = arrays["WV"] @ arrays["WO"]
    actual = analysis.path_decomposition(
        arrays["X"], arrays["attention"], kernels, arrays["bO"]
    )
    np.testing.assert_array_equal(actual.paths, arrays["paths"])
    for name, got in (
        ("path_terms", actual.terms),
        ("remainder", actual.remainder),
        ("out", actual.total()),
    ):
        np.testing.assert_allclose(got, arrays[name], atol=1e-14)
    # No head changes a constant, so only the paths tell one token from another.
    assert analysis.relative_residual(actual.remainder) < 1e-14


@needs_golden
def test_golden_spectrum():
    arrays = case("spectrum_cumulative")
    curves = analysis.cumulative_spectrum(arrays["P"])
    np.testing.assert_allclose(curves, arrays["cumulative"], atol=1e-13)
    np.testing.assert_allclose(curves.mean(0), arrays["mean_curve"], atol=1e-13)
    quarter = curves[..., curves.shape[-1] // 4 - 1]
    np.testing.assert_allclose(quarter, arrays["value_at_quarter"], atol=1e-13)


def test_residual_of_equal_rows_is_zero():
    equal = np.ones((5, 1)) * RNG.normal(size=(3, 1, 4))
    assert np.abs(analysis.residual(equal)).max() < 1e-15
    assert analysis.relative_residual(equal).max() < 1e-15
    assert analysis.relative_residual(np.zeros((3, 4))) == 0


def test_composite_norm_is_the_formula():
    x = np.array([[1.0, -2.0, 0.0], [3.0, 1.0, -1.0]])
    assert analysis.composite_norm(x) == np.sqrt(4 * 5)
    np.testing.assert_allclose(
        analysis.composite_norm(np.stack([x, 2 * x])), np.sqrt(20) * np.array([1, 2])
    )


@pytest.mark.parametrize("held", [1e6, np.nan, np.inf])
def test_masked_tokens_are_left_out(held: float):
    x = RNG.normal(size=(2, 5, 3))
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    garbage = np.where(mask[..., None], x, held)
    out = analysis.residual(garbage, mask)
    np.testing.assert_allclose(out[0, :3], analysis.residual(x[0, :3]), atol=1e-9)
    assert not out[0, 3:].any()
    np.testing.assert_allclose(
        analysis.relative_residual(garbage, mask)[0],
        analysis.relative_residual(x[0, :3]),
    )


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("stochastic_rows", [True, False])
def test_paths_sum_to_the_network(skip, stochastic_rows):
    weights = (
        stochastic(3, 2, 5, 5) if stochastic_rows else RNG.normal(size=(3, 2, 5, 5))
    )
    kernels, bias = RNG.normal(size=(3, 2, 4, 4)), RNG.normal(size=(3, 4))
    x = RNG.normal(size=(5, 4))
    actual = analysis.path_decomposition(x, weights, kernels, bias, skip=skip)
    expected = san(x, weights, kernels, bias, skip)
    np.testing.assert_allclose(actual.total(), expected, atol=1e-10)
    assert actual.num_paths == len(actual.paths) == (3 if skip else 2) ** 3
    counts = np.bincount(actual.lengths, minlength=4)
    shares = analysis.path_length_distribution(3, 2) if skip else np.array([0, 0, 0, 1])
    np.testing.assert_allclose(counts / counts.sum(), shares)
    if skip:
        np.testing.assert_array_equal(actual.terms[actual.lengths == 0], x[None])


def test_sampled_paths_estimate_the_network():
    weights, kernels = stochastic(3, 2, 4, 4), RNG.normal(size=(3, 2, 3, 3)) / 2
    x = RNG.normal(size=(4, 3))
    exact = analysis.path_decomposition(x, weights, kernels, skip=True)
    sample = analysis.path_decomposition(
        x, weights, kernels, skip=True, num_samples=20_000
    )
    assert sample.num_paths == 27 and len(sample.paths) == 20_000
    spread = exact.terms.std(0) * 27 / np.sqrt(20_000)
    assert np.all(np.abs(sample.total() - exact.total()) < 5 * spread + 1e-12)


@pytest.mark.parametrize(
    ("layers", "heads", "lengths", "share"),
    [
        (12, 12, (11, 12), 0.38),  # BERT-base
        (6, 12, (6,), 0.62),  # DistilBERT
        (24, 128, (24,), 0.83),  # T5-11B
        (96, 96, (95, 96), 0.37),  # GPT-3
    ],
)
def test_path_lengths_as_published(layers, heads, lengths, share):
    actual = analysis.path_length_distribution(layers, heads)
    assert actual.shape == (layers + 1,) and abs(actual.sum() - 1) < 1e-12
    assert set(np.argsort(actual)[-len(lengths) :]) == set(lengths)
    np.testing.assert_allclose(actual[list(lengths)], share, atol=0.01)


@pytest.mark.parametrize("scale", [0.05, 0.3])
def test_pure_attention_stays_below_the_bound(scale):
    length, width, depth = 6, 8, 3
    for seed in range(5):
        rng = np.random.default_rng(seed)
        query, key = rng.normal(size=(2, depth, width, 4)) * scale
        value = rng.normal(size=(depth, width, width)) * scale
        x = rng.normal(size=(length, width)) * scale
        start = float(analysis.composite_norm(analysis.residual(x)))
        beta = analysis.collapse_beta(query, key, value)
        for layer in range(depth):
            logits = (x @ query[layer]) @ (x @ key[layer]).T / 2
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            x = weights / weights.sum(-1, keepdims=True) @ x @ value[layer]
            actual = analysis.composite_norm(analysis.residual(x))
            bound = analysis.collapse_bound(start, layer + 1, beta=beta, head_dim=4)
            assert actual <= bound + 1e-15


def test_bound_is_the_formula_and_stays_in_range():
    actual = analysis.collapse_bound(
        0.5, 2, beta=0.3, head_dim=16, num_heads=2, gamma=1.5, lipschitz=3
    )
    np.testing.assert_allclose(actual, (4 * 1.5 * 0.3 * 2 * 3 / 4) ** 4 * 0.5**9)
    assert analysis.collapse_bound(0.5, 0, beta=9, head_dim=4) == 0.5
    for depth in (12, 700):
        assert analysis.collapse_bound(9, depth, beta=9, head_dim=4) == np.inf
        assert analysis.collapse_bound(0.1, depth, beta=1e-3, head_dim=4) == 0
    assert analysis.collapse_bound(0, 3, beta=1, head_dim=4) == 0
    # One factor overflows, the other underflows, their product does neither.
    assert 0 < analysis.collapse_bound(1e-5, 6, beta=0.5e10, head_dim=4) < np.inf


def test_effective_rank():
    matrices = np.stack([np.eye(6), np.ones((6, 6)), np.zeros((6, 6))])
    np.testing.assert_allclose(analysis.effective_rank(matrices), [6, 1, 0], atol=1e-6)
    np.testing.assert_array_equal(analysis.cumulative_spectrum(matrices)[2], np.ones(6))
    actual = analysis.cumulative_spectrum(np.diag([1.0, 3.0, 4.0]))
    np.testing.assert_allclose(actual, [0.5, 0.875, 1.0])


X, P, W = np.ones((4, 3)), np.ones((2, 2, 4, 4)), np.ones((2, 2, 3, 3))


DEEP = np.ones((20, 2, 4, 4)), np.ones((20, 2, 3, 3))


@pytest.mark.parametrize(
    ("function", "arguments", "parts"),
    [
        (analysis.residual, (X, np.ones(4)), ["mask", "float64"]),
        (analysis.residual, (X, np.ones(3, bool)), ["mask", "(3,)"]),
        (analysis.path_decomposition, (X[0], P, W), ["[T, D]", "(3,)"]),
        (analysis.path_decomposition, (X, P[..., :3], W), ["weights", "4, 3"]),
        (analysis.path_decomposition, (X, P, W[:1]), ["kernels", "(1, 2"]),
        (analysis.path_decomposition, (X, P, W, X), ["bias", "(4, 3)"]),
        (analysis.path_decomposition, (X, *DEEP), ["num_samples", str(2**20)]),
        (analysis.path_length_distribution, (0, 2), ["num_layers", "got 0"]),
        (analysis.cumulative_spectrum, (X * np.nan,), ["weights", "NaN"]),
    ],
)
def test_errors(function, arguments, parts):
    assert_rejects(lambda: function(*arguments), *parts)


@pytest.mark.parametrize(
    ("name", "value"),
    [("beta", -1), ("residual_norm", np.nan), ("head_dim", 0), ("num_heads", 0)],
)
def test_numbers_that_have_no_bound(name, value):
    sizes = {"residual_norm": 1, "depth": 2, "beta": 1, "head_dim": 4} | {name: value}
    assert_rejects(lambda: analysis.collapse_bound(**sizes), name)
