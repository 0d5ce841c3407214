"""The pictures of ``analyze spectrum``: Linformer's Figure 1 for our own models."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.capture import (
    AttentionCall,
    capture,
    capture_attention,
    longest_document,
)
from lra_jax.analysis.networks import SHAPES, Network, zipf_tokens
from lra_jax.analysis.projection import (
    projection_bound,
    projection_error,
    truncation_errors,
)
from lra_jax.analysis.spectrum import cumulative_spectrum, effective_rank
from lra_jax.analysis.variants import VARIANTS
from lra_jax.attention import registry
from lra_jax.attention.inputs import check_size
from lra_jax.errors import expected, known
from lra_jax.reports import charts
from lra_jax.reports.page import Page

_GRID = np.linspace(0, 1, 65)
_QUARTER = 16  # of the grid: the paper's 128th of 512 values


class Spectra(dict[str, np.ndarray]):
    """Means over sequences: ``curves`` `[L, N, 65]`, the cumulative spectrum at
    evenly spaced fractions of the number of values; ``ranks`` `[L, N]`, effective ranks
    as a fraction of the number of tokens. N is the largest number of heads; a layer
    with fewer has NaN for the rest.

    For the first sequence, with K ranks ``sizes`` `[K]` up to its length:
    ``length`` `[]`, and the errors that Theorem 1 bounds: ``projected``, ``factors``
    (in units of ``||P|| ||w||``) and ``nearest`` (for the best matrix of that rank),
    means over heads and columns `[L, K]`, and ``worst`` `[K]`, the largest factor."""


def check(network: str, mechanisms: Sequence[str], examples: int) -> None:
    """Raises ``ValueError`` for an unknown name, or a number below 1."""
    known("--network", network, SHAPES)
    check_size("--examples", examples)
    for name in mechanisms:
        registry.resolve(name)


def initial_spectra(
    network: str, mechanism: str, examples: int, length: int, seed: int
) -> Spectra:
    """The spectra of a network at initialisation, on random tokens.

    Raises:
      ValueError: an unknown name, or a mechanism without a matrix.
    """
    shape = SHAPES[known("--network", network, SHAPES)]
    model = Network(shape, mechanism, length=length, rngs=nnx.Rngs(seed))
    tokens = jnp.asarray(zipf_tokens(shape.vocab_size, examples, length, seed))
    whole = VARIANTS["transformer"]
    calls = capture_attention(model, lambda: model(tokens, whole))
    if not calls:
        wanted = "bert or albert"
        got = f"{network}, whose own attention by distance has no matrix"
        raise expected("--network", wanted, got)
    return _spectra(calls, np.ones((examples, length), bool))


def run_spectra(saved: Any, batch: Any) -> Spectra:
    """The spectra of a model trained here, on the real tokens of examples.

    In a packed row these are the tokens of its longest document.

    Raises:
      ValueError: its mechanism has no matrix.
    """
    captured = capture(saved.model, lambda: saved.run(batch))
    return _spectra(captured.calls, longest_document(captured.documents))


def add_spectra(page: Page, found: Mapping[str, Spectra], about: str) -> None:
    """A curve and a heat map for each model."""
    count = len(found)
    # One scale for all panels, from a round number below the minimum.
    least = min(
        np.nanmin(spectra["curves"][..., _QUARTER]) for spectra in found.values()
    )
    low = np.floor(20 * least) / 20
    figure, axes = charts.figure(2, count, size=(3.6, 2.9), sharex="row")
    for (above, below), (name, spectra) in zip(axes.T, found.items(), strict=True):
        _draw_curves(above, np.nanmean(spectra["curves"], 1), name)
        quarter = spectra["curves"][..., _QUARTER]
        layers, heads = quarter.shape
        charts.image(
            figure,
            below,
            quarter,
            "part of the whole" if below is axes[1, -1] else "",
            vmin=low,
            vmax=1,
            origin="lower",
            extent=(0.5, heads + 0.5, 0.5, layers + 0.5),
        )
        below.set_facecolor(charts.OUTSIDE)  # Heads that a layer does not have.
        below.set_xlabel("head")
        charts.whole_numbers(below, "xy")
    axes[0, 0].set_ylabel("cumulative singular values,\nshare of the whole")
    axes[1, 0].set_ylabel("layer")
    charts.legend(figure, axes)
    caption = (
        f"{about} Above: sum of the largest singular values of the attention matrices "
        "over the sum of them all (not squared), means over heads and sequences; the "
        "dotted line is a spectrum of equal values. Below: the same at a quarter of "
        "the values (the paper's 128th of 512), for each layer and head."
    )
    if any(np.isnan(spectra["ranks"]).any() for spectra in found.values()):
        caption += " Blue cells are heads that a layer does not have."
    page.heading("How low is the rank of attention")
    page.figure("spectrum", figure, caption, dict(found) | {"part": _GRID})
    rows = [
        (
            f"{name}, layer {layer + 1}",
            f"{np.nanmean(spectra['curves'][layer, :, _QUARTER]):.3f}",
            f"{np.nanmean(spectra['ranks'][layer]):.3f}",
        )
        for name, spectra in found.items()
        for layer in range(len(spectra["ranks"]))
    ]
    sums = "sum of a quarter of the values"
    page.table(("model", sums, "effective rank, share of the tokens"), rows)


def add_projections(page: Page, found: Mapping[str, Spectra], about: str) -> None:
    """Linformer's Theorem 1 compared with the error of a random projection."""
    figure, axes = charts.figure(1, len(found), size=(3.9, 3.4), sharey=True)
    rows, shown = [], {}
    for axis, (name, spectra) in zip(axes[0], found.items(), strict=True):
        sizes, length = spectra["sizes"], int(spectra["length"])
        bounds = np.array([projection_bound(int(k), length) for k in sizes])
        shown = {
            "random projection, of ||P w||": spectra["projected"].mean(0),
            "random projection, of ||P|| ||w||": spectra["factors"].mean(0),
            "the same, worst column": spectra["worst"],
            "nearest matrix of that rank, of ||P w||": spectra["nearest"].mean(0),
            "Theorem 1": bounds,
        }
        # NaN is not drawn, and neither are errors from rounding of float32 weights.
        lines = [
            charts.Line(label, sizes[y > 1e-5], y[y > 1e-5], style=style)
            for style, (label, y) in enumerate(shown.items())
            if (y > 1e-5).any()
        ]
        title = f"{name}, {length:,} tokens"
        charts.draw(axis, lines, title=title, xlabel="rank k")
        charts.log_lengths(axis, [int(k) for k in sizes])
        charts.log_scale(axis)
        columns = zip(*shown.values(), strict=True)
        rows += [
            (name, f"{k}", *("-" if np.isnan(x) else f"{x:.3f}" for x in values))
            for k, values in zip(sizes, columns, strict=True)
        ]
    axes[0, 0].set_ylabel("error of P w")
    charts.legend(figure, axes)
    caption = (
        f"{about} ||P R^T R w - P w|| for the attention matrices P and the columns w "
        "of the values of the first sequence, R random with k rows, relative to "
        "||P w|| and to ||P|| ||w||; the error of the nearest matrix of rank k; and "
        "the e that Linformer's Theorem 1 allows, k = 5 ln(n) / (e^2 - e^3), which "
        "begins at k = 33.75 ln(n). Means over layers, heads and columns."
    )
    page.heading("The theorem's rank, and the error")
    page.figure("projection", figure, caption)
    page.table(("model", "k", *shown), rows)


def _draw_curves(axis: Any, curves: np.ndarray, title: str) -> None:
    last = len(curves)
    shown = sorted({1, (last + 1) // 2, last})
    lines = [charts.Line(f"layer {n}", _GRID, curves[n - 1]) for n in shown]
    charts.draw(axis, lines, title=title, xlabel="index, share of the tokens")
    axis.plot(_GRID, _GRID, color=charts.GREY, linestyle=":", linewidth=1)
    axis.axvline(0.25, color=charts.GREY, linewidth=0.8)
    axis.set_ylim(0, 1.02)


def _spectra(calls: Sequence[AttentionCall], mask: np.ndarray) -> Spectra:
    curves, ranks, means, worst = [], [], [], []
    length = 0
    for call in progress.told(calls, "layers", len(calls)):
        weights = call.weights()
        by_example = [w[:, m][:, :, m] for w, m in zip(weights, mask, strict=True)]
        curves.append(np.mean([_on_grid(w) for w in by_example], 0))
        ranks.append(np.mean([effective_rank(w) / w.shape[-1] for w in by_example], 0))
        length = by_example[0].shape[-1]
        errors = _errors(by_example[0], np.asarray(call.value)[0, mask[0]])
        means.append(errors.mean((-1, -2)))
        worst.append(errors[1].max((-1, -2)))
    projected, factors, nearest = np.moveaxis(np.stack(means), 1, 0)
    return Spectra(
        curves=_stacked(curves),
        ranks=_stacked(ranks),
        length=np.array(length),
        sizes=_sizes(length),
        projected=projected,
        factors=factors,
        worst=np.max(worst, 0),
        nearest=nearest,
    )


def _stacked(layers: Sequence[np.ndarray]) -> np.ndarray:
    """`[L, N, ...]` of `[heads of the layer, ...]`, filled up with NaN."""
    heads = max(len(layer) for layer in layers)
    stacked = np.full((len(layers), heads, *layers[0].shape[1:]), np.nan)
    for row, layer in zip(stacked, layers, strict=True):
        row[: len(layer)] = layer
    return stacked


def _sizes(length: int) -> np.ndarray:
    """Powers of two up to a length, from 4 on if it has that many tokens."""
    return 2 ** np.arange(2 if length >= 4 else 0, length.bit_length())


def _errors(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Errors `[3, K, N, H]`, as in `Spectra`, for `[N, T, T]` and `[T, N, H]`."""
    values = np.moveaxis(values, 1, 0)
    values = np.repeat(values, len(weights) // len(values), 0)
    sizes = _sizes(weights.shape[-1])
    projected, factors = (
        [projection_error(weights, values, int(k), factors=unit) for k in sizes]
        for unit in (False, True)
    )
    nearest = np.moveaxis(truncation_errors(weights, values), -2, 0)[sizes]
    return np.stack([projected, factors, nearest])


def _on_grid(weights: np.ndarray) -> np.ndarray:
    """Cumulative spectra `[N, 65]` of `[N, T, T]`, 0 at 0."""
    sums = cumulative_spectrum(weights)
    parts = np.arange(sums.shape[-1] + 1) / sums.shape[-1]
    whole = np.concatenate([np.zeros((len(sums), 1)), sums], 1)
    return np.stack([np.interp(_GRID, parts, row) for row in whole])
