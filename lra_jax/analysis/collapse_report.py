"""The pictures and the page of ``analyze rank-collapse``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lra_jax import plotting
from lra_jax.analysis import published
from lra_jax.analysis.bert_weights import load_bert
from lra_jax.analysis.collapse import model_curves, network_curves, trained_curves
from lra_jax.analysis.networks import SHAPES
from lra_jax.analysis.report import Report
from lra_jax.analysis.variants import VARIANTS, Variant
from lra_jax.attention import registry
from lra_jax.errors import known

__all__ = [
    "add_checkpoint",
    "add_mechanisms",
    "add_networks",
    "add_weights",
    "check",
    "without_norm",
]

_TITLES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}

Curves = Mapping[str, np.ndarray]

_Y_LABEL = "relative residual"
_MEASURE = (
    "||res(X)|| / ||X|| in the composite (1, infinity) norm, with the mean token as "
    "the centre: 0 when all tokens are equal"
)


def without_norm(variants: Mapping[str, Variant] = VARIANTS) -> dict[str, Variant]:
    """The same variants without layer normalisation in the blocks."""
    return {name: v._replace(norm=False) for name, v in variants.items()}


def check(networks: Sequence[str], mechanisms: Sequence[str]) -> None:
    """Raises ``ValueError`` for a name that is not known, or none at all."""
    if not networks or not mechanisms:
        raise ValueError("--network, --attention: expected at least one name in each")
    for name in networks:
        known("--network", name, SHAPES)
    for name in mechanisms:
        registry.resolve(name)


def add_networks(
    report: Report, names: Sequence[str], variants: Mapping[str, Variant], **sizes: Any
) -> None:
    """Figure 2 of the paper, at initialisation: a panel for each network."""
    found = {name: network_curves(name, variants=variants, **sizes) for name in names}
    has_norm = all(v.norm for v in variants.values())
    shown = {n: published.figure_2(n) if has_norm else {} for n in names}
    figure, axes = plotting.figure(1, len(names), size=(3.2, 3.0), sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        _draw(axis, found[name], shown[name])
        axis.set_title(f"{_TITLES[name]}, at initialisation")
    axes[0, 0].set_ylabel(_Y_LABEL)
    axes[0, 0].set_ylim(-0.03)
    plotting.shared_legend(figure, axes[0, 0], columns=5)
    rows = [
        (f"{name}, {variant}", *(f"{x:.3f}" for x in curves.mean(0)[:4]), *printed)
        for name in names
        for variant, curves in found[name].items()
        for printed in [
            [f"{x:.3f}" for x in shown[name].get(variant, [])[:4]] or ["-"] * 4
        ]
    ]
    data = {"ours": _data(found), "published": shown}
    caption = (
        f"Networks at initialisation on random tokens. {_MEASURE}. Lines: means over "
        "initialisations and sequences, one standard deviation shaded. "
        + ("Crosses: published curves, one initialisation each." if has_norm else "")
    )
    report.heading("What keeps the rank: skip connections")
    report.figure("rank-collapse", figure, caption, data)
    head = ("layer", *(f"ours, {i}" for i in range(4)))
    report.table((*head, *(f"published, {i}" for i in range(4))), rows)


def add_mechanisms(
    report: Report,
    network: str,
    mechanisms: Sequence[str],
    variants: Mapping[str, Variant],
    **sizes: Any,
) -> None:
    """The same network with one mechanism after another, a panel for each variant."""
    found = {
        mechanism: network_curves(network, mechanism, variants=variants, **sizes)
        for mechanism in mechanisms
    }
    figure, axes = plotting.figure(1, len(variants), size=(2.9, 2.9), sharex=True)
    for axis, variant in zip(axes[0], variants, strict=True):
        for index, mechanism in enumerate(mechanisms):
            mean = found[mechanism][variant].mean(0)
            # Rounding of float32 is no residual.
            shown = np.maximum(mean, 1e-7)
            axis.plot(shown, label=mechanism, **plotting.line_style(index))
        if axis.get_ylim()[0] < 1e-2:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0)
        axis.set_title(variant)
        axis.set_xlabel("layer")
        plotting.whole_numbers(axis)
    axes[0, 0].set_ylabel(_Y_LABEL)
    plotting.shared_legend(figure, axes[0, 0], columns=len(mechanisms))
    caption = (
        f"A network of {_TITLES[network]}'s shape at initialisation with one mechanism "
        f"after another. {_MEASURE}; means. Where they fall the scale is logarithmic, "
        "cut off at 1e-7, the rounding of float32."
    )
    report.heading("The same for linear attention")
    report.figure("rank-collapse-mechanisms", figure, caption, _data(found))
    last = len(next(iter(found[mechanisms[0]].values()))[0]) - 1
    layers = sorted({min(layer, last) for layer in (1, 2, 4, last)})
    rows = [
        (f"{mechanism}, {variant}", *(f"{curves.mean(0)[i]:.2g}" for i in layers))
        for variant in variants
        for mechanism in mechanisms
        for curves in [found[mechanism][variant]]
    ]
    report.table(("layer", *map(str, layers)), rows)


def add_checkpoint(
    report: Report, saved: Any, batch: Any, variants: Mapping[str, Variant]
) -> None:
    """A trained model of ours on examples of its own.

    Args:
      report: to add to.
      saved: a `lra_jax.training.restore.SavedRun`.
      batch: of its examples.
      variants: by name.
    """
    curves = model_curves(saved.model, lambda: saved.run(batch), variants)
    config = saved.config
    title = f"{config.attention} on {config.task}, step {saved.step}"
    report.heading("A trained model with parts left out")
    _add_curves(report, "rank-collapse-run", title, curves)


def add_weights(report: Report, settings: Any, variants: Mapping[str, Variant]) -> None:
    """A BERT whose weights are on disk, on random tokens."""
    network, shape = load_bert(settings.weights)
    curves = trained_curves(
        network,
        shape,
        variants,
        batch_size=settings.examples,
        length=settings.length,
        seed=settings.seed,
    )
    printed = published.figure_2("bert", "pretrained")
    report.heading("A trained BERT with parts left out")
    title = f"BERT of {shape.num_layers} layers, weights from a file"
    is_base = shape.num_layers == 12 and shape.width == 768
    _add_curves(
        report, "rank-collapse-bert", title, curves, printed if is_base else None
    )


def _add_curves(
    report: Report,
    name: str,
    title: str,
    curves: Curves,
    printed: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """One network, as of a checkpoint."""
    figure, axes = plotting.figure(1, 1, size=(4.2, 3.4))
    _draw(axes[0, 0], curves, printed or {})
    axes[0, 0].set_title(title)
    axes[0, 0].set_ylabel(_Y_LABEL)
    plotting.shared_legend(figure, axes[0, 0], columns=2)
    caption = f"{title}. {_MEASURE}; means, one standard deviation shaded."
    if printed:
        caption += " Crosses: the published curves, on other texts."
    data = {"ours": _data({title: curves})[title], "published": printed or {}}
    report.figure(name, figure, caption, data)
    last = next(iter(curves.values())).shape[1]
    rows = [(n, *(f"{x:.3f}" for x in c.mean(0))) for n, c in curves.items()]
    report.table(("layer", *map(str, range(last))), rows)


def _draw(axis: Any, curves: Curves, printed: Mapping[str, Sequence[float]]) -> None:
    for index, (name, values) in enumerate(curves.items()):
        style = plotting.line_style(index)
        mean, spread = values.mean(0), values.std(0)
        layers = np.arange(len(mean))
        axis.plot(layers, mean, label=name, **style)
        axis.fill_between(
            layers, mean - spread, mean + spread, color=style["color"], alpha=0.12
        )
        points = np.asarray(printed.get(name, ()))[: len(mean)]
        label = "published" if index == 0 and len(points) else None
        axis.plot(layers[: len(points)], points, "x", color=style["color"], label=label)
    axis.set_xlabel("layer")
    plotting.whole_numbers(axis)


def _data(found: Mapping[str, Curves]) -> dict[str, Any]:
    return {
        name: {
            variant: {"mean": values.mean(0), "std": values.std(0)}
            for variant, values in curves.items()
        }
        for name, curves in found.items()
    }
