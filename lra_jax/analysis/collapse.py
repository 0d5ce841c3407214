"""How fast the tokens of a network become equal (Dong, Cordonnier and Loukas 2021,
Figure 2): the relative residual after each layer, for each variant of the network."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.capture import variant_states
from lra_jax.analysis.networks import (
    VARIANTS,
    Network,
    Shape,
    Variant,
    find_shape,
    run_parts,
    zipf_tokens,
)
from lra_jax.analysis.residual import relative_residual
from lra_jax.errors import expected, rename
from lra_jax.files import expand_home, read_json
from lra_jax.models.pretrained import PretrainedEncoder, from_softmax
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel
from lra_jax.reports.page import Section
from lra_jax.reports.table import Table

Curves = dict[str, np.ndarray]
"""By variant float64 `[sequences, L + 1]`, embeddings first."""

_TITLES = {
    "bert": "BERT",
    "albert": "ALBERT",
    "xlnet": "XLNet",
    "roberta": "RoBERTa",
    "gpt2": "GPT-2",
}
_YLABEL = "relative residual"
_MEASURE = (
    "||res(X)|| / ||X|| in the composite (1, infinity) norm, with the mean token as "
    "the centre: 0 when all tokens are equal"
)


def figure_2(network: str, weights: str = "init") -> dict[str, list[float]]:
    """The published curves of a network by variant, 13 numbers each; {} if none.

    Args:
      network: "bert", "albert" or "xlnet".
      weights: "init" or "pretrained".
    """
    published = read_json(Path(__file__).with_name("published.json"))
    curves = published.get(f"{network}, {weights}", {})
    # Missing values are 0 to the precision of the figure.
    return {name: [*x, *[0.0] * (13 - len(x))] for name, x in curves.items()}


def network_curves(
    shape: Shape | str,
    mechanism: str = "softmax",
    *,
    variants: Mapping[str, Variant] = VARIANTS,
    draws: int = 1,
    batch_size: int = 8,
    length: int = 128,
    num_layers: int | None = None,
    seed: int = 0,
    clock: progress.Clock | None = None,
) -> Curves:
    """The curves for a network at initialisation, on random tokens.

    Args:
      shape, mechanism, length, num_layers: see `networks.Network`.
      variants: by name.
      draws: number of initialisations, each with its own tokens.
      batch_size: sequences per draw.
      seed: of the first draw.
      clock: counts the curves, one for each draw and variant.

    Returns:
      For each variant float64 `[draws * batch_size, L + 1]`, embeddings first.

    Raises:
      ValueError: as for `networks.Network`.
    """
    shape, parts = find_shape(shape), []
    for draw in range(seed, seed + draws):
        rngs = nnx.Rngs(draw)
        network = Network(
            shape, mechanism, length=length, num_layers=num_layers, rngs=rngs
        )
        tokens = zipf_tokens(shape.vocab_size, batch_size, length, draw)
        parts.append(_curves(network, tokens, variants, clock))
    return {name: np.concatenate([part[name] for part in parts]) for name in variants}


def _curves(
    network: Network | PretrainedEncoder,
    tokens: np.ndarray,
    variants: Mapping[str, Variant],
    clock: progress.Clock | None,
) -> Curves:
    graph, weights = nnx.split(network)
    curves = {}
    for name, variant in variants.items():
        curves[name] = collapse_curves(
            _run(graph, weights, jnp.asarray(tokens), variant)
        )
        if clock is not None:
            clock.tick()
    return curves


@functools.partial(jax.jit, static_argnums=(0, 3))
def _run(graph: Any, weights: Any, tokens: jax.Array, variant: Variant) -> jax.Array:
    """The hidden states `[L + 1, B, T, D]`; GPT-2's last ones after its last norm."""
    network = nnx.merge(graph, weights)
    if isinstance(network, Network):
        return network(tokens, variant)
    states = network.hidden_states(tokens)[:1]
    for block in network.blocks:
        x = run_parts(block, states[-1], variant, block.attention, block.mlp)
        states.append(x)
    if network.config.kind == "gpt2" and variant.norm:
        states[-1] = network.norm(states[-1])
    return jnp.stack(states)


def model_curves(
    model: nnx.Module,
    run: Callable[[], Any],
    variants: Mapping[str, Variant] = VARIANTS,
) -> Curves:
    """The curves for a model of this library, one for each example; padding is ignored.

    ``model`` and ``run`` as in `capture.capture`.
    """
    states, mask = variant_states(model, run, variants)
    return {name: collapse_curves(x, mask) for name, x in states.items()}


def collapse_curves(states: Any, mask: np.ndarray | None = None) -> np.ndarray:
    """Relative residuals `[B, L + 1]` of hidden states `[L + 1, B, T, D]`,
    which must be finite."""
    states = np.asarray(states, np.float64)
    if not np.isfinite(states).all():
        layer = int(np.isfinite(states).all((1, 2, 3)).argmin())
        raise expected("states", "finite numbers", f"others from layer {layer} on")
    if mask is not None:
        mask = np.broadcast_to(mask, states.shape[:3])
    return relative_residual(states, mask=mask).T


def initial_sections(
    networks: Sequence[str],
    mechanisms: Sequence[str],
    variants: Mapping[str, Variant],
    *,
    draws: int,
    **sizes: Any,
) -> Iterator[Section]:
    """Figure 2 of the paper, and its first network with one mechanism after another."""
    count = (len(networks) + len(mechanisms)) * draws * len(variants)
    sizes |= {"draws": draws, "clock": progress.Clock("curves", count)}
    curves = {
        name: network_curves(name, variants=variants, **sizes)
        for name in progress.announce(networks, "networks")
    }
    has_norm = all(v.norm for v in variants.values())
    printed = {n: figure_2(n) if has_norm else {} for n in networks}
    caption = (
        f"Networks at initialisation on random tokens. {_MEASURE}. Lines: means over "
        "initialisations and sequences, one standard deviation shaded."
        + (" Crosses: the published ones, 128 tokens each." if has_norm else "")
    )
    parts = compare_networks("rank-collapse", curves, printed, caption)
    yield Section("Skip connections keep the rank", parts)
    network = networks[0]
    curves = {
        name: network_curves(network, name, variants=variants, **sizes)
        for name in progress.announce(mechanisms, f"mechanisms of {network}")
    }
    caption = (
        f"A network of {_TITLES[network]}'s shape at initialisation with one mechanism "
        f"after another. {_MEASURE}; means. Where they fall the scale is logarithmic, "
        "cut off at 1e-7, the rounding of float32."
    )
    parts = _compare_mechanisms(curves, caption)
    yield Section("The same network with other mechanisms", parts)


def model_section(saved: Any, batch: Any, variants: Mapping[str, Variant]) -> Section:
    """A model trained here, on its own examples."""
    curves = model_curves(saved.model, lambda: saved.run(batch), variants)
    title = f"{saved.config.mixers} on {saved.config.task}, step {saved.step}"
    parts = _show_network("rank-collapse-run", title, curves, {})
    return Section("A trained model with parts left out", parts)


def weights_section(
    weights: str,
    variants: Mapping[str, Variant],
    *,
    length: int,
    batch_size: int,
    seed: int,
) -> Section:
    """A BERT, RoBERTa or GPT-2 with weights from disk (its ``model.safetensors``, or
    the folder, with ``config.json``), on random tokens."""
    path = expand_home(weights, "weights")
    try:
        encoder = from_softmax(path.parent if path.is_file() else path)
    except ValueError as error:
        raise rename(error, "--weights") from error
    config, clock = encoder.config, progress.Clock("curves", len(variants))
    tokens = zipf_tokens(config.vocab_size, batch_size, length, seed)
    curves = _curves(encoder, tokens, variants, clock)
    is_base = (config.kind, config.num_layers, config.embed_dim) == ("bert", 12, 768)
    printed = figure_2("bert", "pretrained") if is_base else {}
    title = f"{_TITLES[config.kind]} of {config.num_layers} layers"
    parts = _show_network("rank-collapse-bert", title, curves, printed)
    return Section("Trained weights with parts left out", parts)


def _show_network(
    name: str, title: str, curves: Curves, printed: Mapping[str, Sequence[float]]
) -> tuple[Chart, Table]:
    caption = f"{title}. {_MEASURE}; means, one standard deviation shaded."
    if printed:
        caption += " Crosses: the published curves, on other texts."
    return compare_networks(name, {title: curves}, {title: printed}, caption)


def compare_networks(
    name: str,
    networks: Mapping[str, Curves],
    printed: Mapping[str, Mapping[str, Sequence[float]]],
    caption: str,
) -> tuple[Chart, Table]:
    """A panel for each network, and a row for each curve, ours and the published."""
    panels, rows = [], []
    ours = {network: _average(curves) for network, curves in networks.items()}
    for network, averages in ours.items():
        lines = []
        for variant, curve in averages.items():
            mean, theirs = curve["mean"], printed[network].get(variant, ())
            looks = {"spread": curve["std"], "published": theirs}
            lines.append(charts.Line(variant, range(len(mean)), mean, **looks))
            label = f"{network}, {variant}" if len(networks) > 1 else variant
            rows.append((label, *(f"{x:.3f}" for x in mean)))
            if theirs:
                cells = [f"{x:.3f}" for x in theirs[: len(mean)]]
                cells += ["-"] * (len(mean) - len(cells))
                rows.append((f"{label}, published", *cells))
        settings = {"title": _TITLES.get(network, network), "xlabel": "layer"}
        panels.append(Panel(lines, integers="x", settings=settings | {"ylim": -0.03}))
    chart = Chart(
        name,
        panels,
        caption,
        data={"ours": ours, "published": printed},
        size=(3.6, 3.4) if len(networks) > 1 else (6, 4),
        ylabels=[_YLABEL],
        layout={"sharey": True},
    )
    head = ("network", *(f"layer {n}" for n in range(len(rows[0]) - 1)))
    return chart, Table(head, rows)


def _compare_mechanisms(
    mechanisms: Mapping[str, Curves], caption: str
) -> tuple[Chart, Table]:
    """A panel for each variant of one network."""
    panels, rows = [], []
    averages = {name: _average(curves) for name, curves in mechanisms.items()}
    for variant in next(iter(averages.values())):
        means = {name: x[variant]["mean"] for name, x in averages.items()}
        # Rounding in float32 is not a residual.
        lines = [
            charts.Line(name, range(len(mean)), np.maximum(mean, 1e-7))
            for name, mean in means.items()
        ]
        settings: dict[str, Any] = {"title": variant, "xlabel": "layer"}
        is_log = min(mean.min() for mean in means.values()) < 1e-2
        if not is_log:  # Room above the uppermost markers.
            settings["ylim"] = (0, 1.08 * max(mean.max() for mean in means.values()))
        panels.append(Panel(lines, integers="x", is_log=is_log, settings=settings))
        rows += [
            (f"{name}, {variant}", *(f"{x:.2g}" for x in mean))
            for name, mean in means.items()
        ]
    chart = Chart(
        "rank-collapse-mechanisms",
        panels,
        caption,
        data=averages,
        size=(3.3, 3.4),
        ylabels=[_YLABEL],
        layout={"sharex": True},
    )
    head = ("mechanism", *(f"layer {n}" for n in range(len(rows[0]) - 1)))
    return chart, Table(head, rows)


def _average(curves: Curves) -> dict[str, dict[str, np.ndarray]]:
    """Mean and standard deviation over the sequences."""
    return {
        variant: {"mean": values.mean(0), "std": values.std(0)}
        for variant, values in curves.items()
    }
