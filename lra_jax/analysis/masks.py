"""Rank collapse by depth under masks, and by width, for every mechanism.

By depth: Wu et al. 2024 (arXiv:2405.18781) prove that causal and local masks slow the
collapse of attention alone and that layer normalisation can prevent it. By width: Nait
Saada et al. 2025 ("Mind the Gap", ICML). Layers are as in an untrained model, tokens
normal and independent: positions enter through the mechanism alone. A local mask is the
mechanism `local`, softmax over 8 positions on each side.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.capture import capture_attention
from lra_jax.analysis.residual import relative_residual
from lra_jax.analysis.spectrum import attention_sink, spectral_gap
from lra_jax.attention import registry
from lra_jax.errors import InputError
from lra_jax.models import MultiHeadAttention
from lra_jax.models.layers import LayerNorm
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel
from lra_jax.reports.page import Section
from lra_jax.reports.table import Table

_WIDTH, _HEADS, _LAYERS = 128, 2, 12
_OPTIONS = {"local": {"window": 8}}
_LENGTHS = (32, 128, 512)


def masks_section(names: Sequence[str], length: int, seeds: Sequence[int]) -> Section:
    """The residual after layers of attention alone, with and without normalisation."""
    kinds = {"without norms": False, "with norms": True}
    curves: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for label, layer in _layers(names):
        for kind, norm in kinds.items():
            runs = [_residuals(layer, norm, length, seed) for seed in seeds]
            curves[kind][label] = np.mean(runs, 0)
    caption = f"Relative residual of {length} tokens, means over {len(seeds)} draws."
    panels = [
        _heat_map(of_kind, "residual, %", range(_LAYERS + 1), kind)
        for kind, of_kind in curves.items()
    ]
    chart = Chart(
        "masks", panels, caption, data=curves, size=_size(curves["with norms"])
    )
    columns = [(kind, layer) for kind in kinds for layer in (1, 4, _LAYERS)]
    rows = [
        (label, *(f"{curves[kind][label][layer]:.2g}" for kind, layer in columns))
        for label in curves["with norms"]
    ]
    head = ("mechanism", *(f"{kind}, layer {layer}" for kind, layer in columns))
    return Section("Depth: masks and norms", [chart, Table(head, rows)])


def widths_section(names: Sequence[str], seeds: Sequence[int]) -> Section:
    """The spectral gap of a layer's matrix by length, and its attention sink."""
    gaps, sinks = {}, {}
    for label, layer in _layers(names):
        try:
            draws = [
                [_gap_and_sink(layer, n, seed) for n in _LENGTHS] for seed in seeds
            ]
        except InputError:
            continue  # FNet mixes columns, too, so it has no matrix.
        gaps[label], sinks[label] = np.mean(draws, 0).T.tolist()
    caption = (
        "The gap of the first two singular values, 1 - s2 / s1, and the largest "
        f"share of one key, by tokens; means over heads and {len(seeds)} draws."
    )
    panels = [
        _heat_map(gaps, "gap, %", _LENGTHS, "gap"),
        _heat_map(sinks, "share, %", _LENGTHS, "sink"),
    ]
    data = {"lengths": _LENGTHS, "gap": gaps, "sink": sinks}
    chart = Chart("widths", panels, caption, data=data, size=_size(gaps))
    rows = [
        (label, *(f"{x:.3f}" for x in (*y, *sinks[label]))) for label, y in gaps.items()
    ]
    heads = (f"{kind}, {n} tokens" for kind in ("gap", "sink") for n in _LENGTHS)
    return Section("Width: gaps and sinks", [chart, Table(("mechanism", *heads), rows)])


def _heat_map(rows: Mapping[str, Any], unit: str, columns: Any, title: str) -> Panel:
    cells, names = 100 * np.stack([*rows.values()]), [*map(str, columns)]
    return charts.heat_map(cells, [*rows], names, unit, {"title": title})


def _size(rows: Mapping[str, Any]) -> tuple[float, float]:
    return 5.5, 1.2 + 0.2 * len(rows)


def _layers(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Each mechanism without a mask and, where it can, causal: a label and a maker."""
    rows = [
        (f"{name}, {'causal' if is_causal else 'full'}", name, is_causal)
        for name in names
        for is_causal in (False, True)
        if not is_causal or registry.resolve(name).causal
    ]
    for label, name, is_causal in progress.track(rows, "masks", len(rows)):
        settings: Any = {"mechanism": name, "options": _OPTIONS.get(name)}
        settings["is_causal"] = is_causal
        yield label, functools.partial(MultiHeadAttention, _HEADS, _WIDTH, **settings)


def _residuals(make: Any, norm: bool, length: int, seed: int) -> np.ndarray:
    rngs, x = nnx.Rngs(seed), _tokens(length, seed)
    states, normalise = [x], LayerNorm(_WIDTH)
    for _ in range(_LAYERS):
        x = _run(*nnx.split(make(max_length=length, rngs=rngs)), x)
        x = normalise(x) if norm else x
        states.append(x)
    return relative_residual(np.stack(states)[:, 0])


def _gap_and_sink(make: Any, length: int, seed: int) -> tuple[float, float]:
    """Means over the heads of one draw, or over the columns, which HGRN has in place of
    heads: the matrices of several draws at once would not fit in memory."""
    layer = make(max_length=length, rngs=nnx.Rngs(seed))
    (call,) = capture_attention(layer, lambda: layer(_tokens(length, seed)))
    matrices = call.weights()[0]
    return spectral_gap(matrices).mean(), attention_sink(matrices).mean()


@functools.partial(jax.jit, static_argnums=0)
def _run(graph: Any, params: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(graph, params)(x)


def _tokens(length: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (1, length, _WIDTH))
