"""The pictures and tables of ``analyze rank-collapse``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lra_jax import progress
from lra_jax.analysis import published
from lra_jax.analysis.bert_weights import load_bert
from lra_jax.analysis.collapse import model_curves, network_curves, trained_curves
from lra_jax.analysis.networks import SHAPES
from lra_jax.analysis.variants import VARIANTS, Variant
from lra_jax.attention import registry
from lra_jax.errors import known
from lra_jax.reports import charts
from lra_jax.reports.page import Page

_TITLES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}

Curves = Mapping[str, np.ndarray]
Published = Mapping[str, Sequence[float]]

_Y_LABEL = "relative residual"
_MEASURE = (
    "||res(X)|| / ||X|| in the composite (1, infinity) norm, with the mean token as "
    "the centre: 0 when all tokens are equal"
)


def without_norm() -> dict[str, Variant]:
    """The published variants without layer normalisation in the blocks."""
    return {name: v._replace(norm=False) for name, v in VARIANTS.items()}


def check(networks: Sequence[str], mechanisms: Sequence[str]) -> None:
    """Raises ``ValueError`` for an unknown name."""
    for name in networks:
        known("--network", name, SHAPES)
    for name in mechanisms:
        registry.resolve(name)


def add_networks(
    page: Page, names: Sequence[str], variants: Mapping[str, Variant], **sizes: Any
) -> None:
    """Figure 2 of the paper, at initialisation: a panel for each network."""
    found = {}
    for name in names:
        progress.say(f"{name} ({len(found) + 1} of {len(names)} networks) ...")
        found[name] = network_curves(name, variants=variants, **sizes)
    has_norm = all(v.norm for v in variants.values())
    shown = {n: published.figure_2(n) if has_norm else {} for n in names}
    figure, axes = charts.figure(1, len(names), size=(3.6, 3.4), sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        _draw(axis, found[name], shown[name], f"{_TITLES[name]}, at initialisation")
    axes[0, 0].set(ylabel=_Y_LABEL, ylim=-0.03)
    charts.legend(figure, axes)
    caption = (
        f"Networks at initialisation on random tokens. {_MEASURE}. Lines: means over "
        "initialisations and sequences, one standard deviation shaded."
        + (" Crosses: the published ones, 128 tokens each." if has_norm else "")
    )
    page.heading("Skip connections keep the rank")
    data = {"ours": _data(found), "published": shown}
    page.figure("rank-collapse", figure, caption, data)
    first = range(min(4, next(iter(found[names[0]].values())).shape[1]))
    rows = [
        (
            f"{name}, {variant}",
            *(f"{curves.mean(0)[i]:.3f}" for i in first),
            *(f"{printed[i]:.3f}" if printed else "-" for i in first),
        )
        for name in names
        for variant, curves in found[name].items()
        for printed in [shown[name].get(variant)]
    ]
    head = [f"{whose}, layer {i}" for whose in ("ours", "published") for i in first]
    page.table(("network", *head), rows)


def add_mechanisms(
    page: Page,
    network: str,
    mechanisms: Sequence[str],
    variants: Mapping[str, Variant],
    **sizes: Any,
) -> None:
    """The same network with one mechanism after another, a panel for each variant."""
    found = {}
    for mechanism in mechanisms:
        count = f"{len(found) + 1} of {len(mechanisms)} mechanisms"
        progress.say(f"{network} with {mechanism} ({count}) ...")
        found[mechanism] = network_curves(
            network, mechanism, variants=variants, **sizes
        )
    figure, axes = charts.figure(1, len(variants), size=(3.3, 3.4), sharex=True)
    for axis, variant in zip(axes[0], variants, strict=True):
        # Rounding in float32 is not a residual.
        means = {m: np.maximum(found[m][variant].mean(0), 1e-7) for m in mechanisms}
        lines = [charts.Line(m, range(len(y)), y) for m, y in means.items()]
        charts.draw(axis, lines, title=variant, xlabel="layer")
        charts.whole_numbers(axis)
        if min(y.min() for y in means.values()) < 1e-2:
            charts.log_scale(axis)
        else:
            # Room above the uppermost markers.
            axis.set_ylim(0, 1.08 * max(y.max() for y in means.values()))
    axes[0, 0].set_ylabel(_Y_LABEL)
    charts.legend(figure, axes)
    caption = (
        f"A network of {_TITLES[network]}'s shape at initialisation with one mechanism "
        f"after another. {_MEASURE}; means. Where they fall the scale is logarithmic, "
        "cut off at 1e-7, the rounding of float32."
    )
    page.heading("The same network with other mechanisms")
    page.figure("rank-collapse-mechanisms", figure, caption, _data(found))
    last = len(next(iter(found[mechanisms[0]].values()))[0]) - 1
    layers = sorted({min(layer, last) for layer in (1, 2, 4, last)})
    rows = [
        (f"{m}, {variant}", *(f"{found[m][variant].mean(0)[i]:.2g}" for i in layers))
        for variant in variants
        for m in mechanisms
    ]
    page.table(("mechanism", *(f"layer {i}" for i in layers)), rows)


def add_checkpoint(
    page: Page, saved: Any, batch: Any, variants: Mapping[str, Variant]
) -> None:
    """A model trained here, on its own examples."""
    curves = model_curves(saved.model, lambda: saved.run(batch), variants)
    config = saved.config
    title = f"{config.mixers} on {config.task}, step {saved.step}"
    page.heading("A trained model with parts left out")
    _add_curves(page, "rank-collapse-run", title, curves)


def add_weights(page: Page, settings: Any, variants: Mapping[str, Variant]) -> None:
    """A BERT with weights from disk, on random tokens."""
    network, shape = load_bert(settings.weights)
    curves = trained_curves(
        network,
        shape,
        variants,
        batch_size=settings.examples,
        length=settings.length,
        seed=settings.seed,
    )
    is_base = shape.num_layers == 12 and shape.width == 768
    printed = published.figure_2("bert", "pretrained") if is_base else {}
    page.heading("A trained BERT with parts left out")
    title = f"BERT of {shape.num_layers} layers, weights from a file"
    _add_curves(page, "rank-collapse-bert", title, curves, printed)


def _add_curves(
    page: Page, name: str, title: str, curves: Curves, printed: Published | None = None
) -> None:
    """The curves of a single network, such as a checkpoint."""
    printed = printed or {}
    figure, axes = charts.figure(1, 1, size=(6, 4))
    _draw(axes[0, 0], curves, printed, title)
    axes[0, 0].set_ylabel(_Y_LABEL)
    charts.legend(figure, axes)
    caption = f"{title}. {_MEASURE}; means, one standard deviation shaded."
    if printed:
        caption += " Crosses: the published curves, on other texts."
    data = {"ours": _data({title: curves})[title], "published": printed}
    page.figure(name, figure, caption, data)
    layers = range(next(iter(curves.values())).shape[1])
    rows = [(n, *(f"{x:.3f}" for x in c.mean(0))) for n, c in curves.items()]
    page.table(("parts", *(f"layer {i}" for i in layers)), rows)


def _draw(axis: Any, curves: Curves, printed: Published, title: str) -> None:
    lines = [
        charts.Line(
            name,
            range(values.shape[1]),
            values.mean(0),
            spread=values.std(0),
            published=printed.get(name, ()),
        )
        for name, values in curves.items()
    ]
    charts.draw(axis, lines, title=title, xlabel="layer")
    charts.whole_numbers(axis)


def _data(found: Mapping[str, Curves]) -> dict[str, Any]:
    return {
        name: {
            variant: {"mean": values.mean(0), "std": values.std(0)}
            for variant, values in curves.items()
        }
        for name, curves in found.items()
    }
