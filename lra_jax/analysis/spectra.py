"""Linformer's Figure 1 and Theorem 1 (Wang et al. 2020) for our own models: spectra of
their attention matrices, and the errors of random projections."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from lra_jax.analysis.networks import VARIANTS, Network, find_shape, zipf_tokens
from lra_jax.analysis.projection import (
    projection_bound,
    projection_error,
    truncation_errors,
)
from lra_jax.analysis.spectrum import cumulative_spectrum, effective_rank
from lra_jax.errors import expected
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel, image
from lra_jax.reports.page import Section
from lra_jax.reports.table import Table, number

_GRID = np.linspace(0, 1, 65)
_QUARTER = 16  # of the grid: the paper's 128th of 512 values


class Spectra(NamedTuple):
    """Spectra of a model's attention matrices, and the errors that Theorem 1 bounds.

    L layers, N heads (the most that a layer has; another has NaN for the rest), and K
    ranks, up to the number of tokens of the first sequence.

    Attributes:
      curves: `[L, N, 65]`, cumulative spectra at evenly spaced fractions of the number
        of values, means over sequences.
      ranks: `[L, N]`, effective ranks as fractions of the number of tokens, likewise.
      length: tokens of the first sequence, which the rest is about.
      sizes: `[K]`, the ranks.
      projected: `[L, K]`, the error of a random projection in units of ``||P w||``,
        means over heads and columns w of the values.
      factors: the same in units of ``||P|| ||w||``.
      worst: `[K]`, the largest of these.
      nearest: as ``projected``, for the nearest matrix of that rank.
      deviations: `[L, 65]`, of the heads' mean curve over initialisations.
    """

    curves: np.ndarray
    ranks: np.ndarray
    length: int
    sizes: np.ndarray
    projected: np.ndarray
    factors: np.ndarray
    worst: np.ndarray
    nearest: np.ndarray
    deviations: np.ndarray


def initial_spectra(
    network: str, mechanism: str, examples: int, length: int, seeds: Sequence[int]
) -> Spectra:
    """The spectra of a network at initialisation, on random tokens: means over
    seeds."""
    shape = find_shape(network)
    draws = []
    for seed in seeds:
        model = Network(shape, mechanism, length=length, rngs=nnx.Rngs(seed))
        tokens = jnp.asarray(zipf_tokens(shape.vocab_size, examples, length, seed))
        calls = capture_attention(
            model, lambda m=model, t=tokens: m(t, VARIANTS["transformer"])
        )
        if not calls:
            got = f"{network}, whose own attention by distance has no matrix"
            raise expected("--network", "bert or albert", got)
        draws.append(_measure(calls, np.ones((examples, length), bool)))
    return Spectra(*(np.mean(field, 0) for field in zip(*draws, strict=True)))._replace(
        length=length,
        sizes=draws[0].sizes,
        worst=np.max([x.worst for x in draws], 0),
        deviations=np.std([x.curves.mean(1) for x in draws], 0),
    )


def run_spectra(saved: Any, batch: Any) -> Spectra:
    """The spectra of a model trained here, on the real tokens of examples.

    In a packed row these are the tokens of its longest document.
    """
    captured = capture(saved.model, lambda: saved.run(batch))
    return _measure(captured.calls, longest_document(captured.documents))


def spectrum_section(models: Mapping[str, Spectra], about: str) -> Section:
    """A curve and a heat map for each model; ``about`` begins the caption."""
    quarters = {name: x.curves[..., _QUARTER] for name, x in models.items()}
    # One scale for all panels, from a round number below the minimum.
    low = np.floor(20 * min(np.nanmin(x) for x in quarters.values())) / 20
    caption = (
        f"{about} Above: sum of the largest singular values of the attention matrices "
        "over the sum of them all (not squared), means over heads and sequences. "
        "Below: the same at a quarter of the values (the paper's 128th of 512), for "
        "each layer and head."
    )
    if any(np.isnan(x.ranks).any() for x in models.values()):
        caption += " Blue cells are heads that a layer does not have."
    last = [*models][-1]
    chart = Chart(
        "spectrum",
        [
            *(_curves(name, x) for name, x in models.items()),
            *(_heat_map(x, low, name == last) for name, x in quarters.items()),
        ],
        caption,
        data={name: x._asdict() for name, x in models.items()} | {"part": _GRID},
        columns=len(models),
        size=(3.6, 2.9),
        ylabels=["cumulative singular values,\nshare of the whole", "layer"],
        layout={"sharex": "row"},
    )
    rows = [
        (
            f"{name}, layer {n + 1}",
            f"{np.nanmean(quarters[name][n]):.3f}",
            number(x.deviations[n, _QUARTER] or np.nan, ".3f"),
            f"{np.nanmean(ranks):.3f}",
        )
        for name, x in models.items()
        for n, ranks in enumerate(x.ranks)
    ]
    sums = "sum of a quarter of the values"
    head = ("model", sums, "deviation", "effective rank, share of the tokens")
    return Section("How low is the rank of attention", [chart, Table(head, rows)])


def projection_section(models: Mapping[str, Spectra], about: str) -> Section:
    """Linformer's Theorem 1 compared with the error of a random projection."""
    panels, rows = [], []
    head: list[str] = []
    for name, x in models.items():
        errors = {
            "random projection, of ||P w||": x.projected.mean(0),
            "random projection, of ||P|| ||w||": x.factors.mean(0),
            "the same, worst column": x.worst,
            "nearest matrix of that rank, of ||P w||": x.nearest.mean(0),
            "Theorem 1": np.array([projection_bound(k, x.length) for k in x.sizes]),
        }
        head = ["model", "k", *errors]
        # NaN is not drawn, and neither are errors from rounding of float32 weights.
        lines = [
            charts.Line(label, x.sizes[y > 1e-5], y[y > 1e-5], style=style)
            for style, (label, y) in enumerate(errors.items())
            if (y > 1e-5).any()
        ]
        settings = {"title": f"{name}, {x.length:,} tokens", "xlabel": "rank k"}
        panels.append(
            Panel(lines, is_log=True, lengths=x.sizes.tolist(), settings=settings)
        )
        rows += [
            (name, f"{k}", *(number(y, ".3f") for y in cells))
            for k, *cells in zip(x.sizes, *errors.values(), strict=True)
        ]
    caption = (
        f"{about} ||P R^T R w - P w|| for the attention matrices P and the columns w "
        "of the values of the first sequence, R random with k rows, relative to "
        "||P w|| and to ||P|| ||w||; the error of the nearest matrix of rank k; and "
        "the e that Linformer's Theorem 1 allows, k = 5 ln(n) / (e^2 - e^3), which "
        "begins at k = 33.75 ln(n). Means over layers, heads and columns."
    )
    chart = Chart(
        "projection",
        panels,
        caption,
        size=(3.9, 3.4),
        ylabels=["error of P w"],
        layout={"sharey": True},
    )
    return Section("The theorem's rank, and the error", [chart, Table(head, rows)])


def _curves(title: str, spectra: Spectra) -> Panel:
    """The first, the middle and the last layer."""
    curves, spread = np.nanmean(spectra.curves, 1), spectra.deviations
    last = len(curves)
    lines = [
        charts.Line(f"layer {n}", _GRID, curves[n - 1], spread=spread[n - 1])
        for n in sorted({1, (last + 1) // 2, last})
    ]
    lines.append(charts.Line("equal values", (0, 1), (0, 1)))
    lines.append(charts.Line("a quarter of the values", (0.25, 0.25), (0, 1)))
    xlabel = "index, share of the tokens"
    settings = {"title": title, "xlabel": xlabel, "ylim": (0, 1.02)}
    return Panel(lines, settings=settings)


def _heat_map(quarter: np.ndarray, low: float, is_last: bool) -> Panel:
    """Layers and heads, with the label of the colours in the last panel."""
    layers, heads = quarter.shape
    # Heads that a layer does not have are outside the scale.
    settings = {"xlabel": "head", "facecolor": charts.OUTSIDE}
    return image(
        quarter,
        "part of the whole" if is_last else "",
        settings,
        vmin=low,
        vmax=1,
        origin="lower",
        extent=(0.5, heads + 0.5, 0.5, layers + 0.5),
    )


def _measure(calls: Sequence[AttentionCall], mask: np.ndarray) -> Spectra:
    curves, ranks, means, worst = [], [], [], []
    for call in progress.track(calls, "layers", len(calls)):
        weights = call.weights()
        by_example = [w[:, m][:, :, m] for w, m in zip(weights, mask, strict=True)]
        curves.append(np.mean([_interpolate(w) for w in by_example], 0))
        ranks.append(np.mean([effective_rank(w) / w.shape[-1] for w in by_example], 0))
        errors = _errors(by_example[0], np.asarray(call.value)[0, mask[0]])
        means.append(errors.mean((-1, -2)))
        worst.append(errors[1].max((-1, -2)))
    projected, factors, nearest = np.moveaxis(np.stack(means), 1, 0)
    length = int(mask[0].sum())
    return Spectra(
        curves=_stack(curves),
        ranks=_stack(ranks),
        length=length,
        sizes=_sizes(length),
        projected=projected,
        factors=factors,
        worst=np.max(worst, 0),
        nearest=nearest,
        deviations=np.zeros((len(curves), len(_GRID))),
    )


def _stack(layers: Sequence[np.ndarray]) -> np.ndarray:
    """`[L, N, ...]` of `[heads of the layer, ...]`, filled up with NaN."""
    heads = max(map(len, layers))
    stacked = np.full((len(layers), heads, *layers[0].shape[1:]), np.nan)
    for row, layer in zip(stacked, layers, strict=True):
        row[: len(layer)] = layer
    return stacked


def _sizes(length: int) -> np.ndarray:
    """Powers of two up to a length, from 4 on if it has that many tokens."""
    return 2 ** np.arange(2 if length >= 4 else 0, length.bit_length())


def _errors(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``projected``, ``factors`` and ``nearest`` of `Spectra` `[3, K, N, H]`, for
    `[N, T, T]` and `[T, N, H]`."""
    values = np.moveaxis(values, 1, 0)
    values = np.repeat(values, len(weights) // len(values), 0)
    sizes = _sizes(weights.shape[-1])
    projected, factors = (
        [projection_error(weights, values, int(k), factors=unit) for k in sizes]
        for unit in (False, True)
    )
    nearest = np.moveaxis(truncation_errors(weights, values), -2, 0)[sizes]
    return np.stack([projected, factors, nearest])


def _interpolate(weights: np.ndarray) -> np.ndarray:
    """Cumulative spectra `[N, 65]` of `[N, T, T]`, 0 at 0."""
    sums = cumulative_spectrum(weights)
    parts = np.arange(sums.shape[-1] + 1) / sums.shape[-1]
    curves = np.concatenate([np.zeros((len(sums), 1)), sums], 1)
    return np.stack([np.interp(_GRID, parts, row) for row in curves])
