"""Collapse under masks and by width; the gap of singular values, and sinks."""

import json

import numpy as np
import pytest

from lra_jax import analyze
from lra_jax.analysis import masks
from lra_jax.analysis.spectrum import attention_sink, spectral_gap


def test_the_gap_of_random_stochastic_matrices_grows_with_their_size():
    """Mind the Gap: the second value of T positions falls as 1 / sqrt(T)."""
    rng = np.random.default_rng(0)
    gaps = []
    for size in (16, 32, 128):
        weights = rng.random((10, size, size))
        gaps.append(spectral_gap(weights / weights.sum(-1, keepdims=True)).mean())
    assert gaps[0] < gaps[1] < gaps[2]
    assert (1 - gaps[1]) / (1 - gaps[2]) == pytest.approx(2, rel=0.1)
    assert spectral_gap(np.eye(5)) == 0 and spectral_gap(np.zeros((3, 3))) == 1


def test_sinks():
    first = np.zeros((2, 6, 6))
    first[..., 0] = 1
    np.testing.assert_allclose(attention_sink(first), 1)
    np.testing.assert_allclose(attention_sink(np.full((6, 6), 1 / 6)), 1 / 6)
    # A causal mean: row i gives the first key 1 / i.
    causal = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    assert attention_sink(causal) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert attention_sink([[-3.0, 1.0]]) == 0.75


def test_masks_and_widths_make_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(masks, "_LAYERS", 4)
    monkeypatch.setattr(masks, "_LENGTHS", (8, 32))
    names = "softmax,fnet"
    settings = analyze.RankCollapse(
        masks=True, widths=True, attention=names, length=32, out=str(tmp_path), draws=1
    )
    page = analyze.run(settings).with_suffix(".md").read_text()
    assert "softmax, causal" in page and "fnet, causal" not in page
    curves = json.loads((tmp_path / "masks.json").read_text())["data"]["with norms"]
    full, causal = (np.array(curves[f"softmax, {x}"]) for x in ("full", "causal"))
    assert full.shape == (5,) and full[0] == causal[0] and full[-1] < causal[-1] / 100
    stored = json.loads((tmp_path / "widths.json").read_text())["data"]
    assert set(stored["gap"]) == {"softmax, full", "softmax, causal"}
    small, large = stored["gap"]["softmax, full"]
    assert small < large
    assert stored["sink"]["softmax, causal"][0] > stored["sink"]["softmax, full"][0]
