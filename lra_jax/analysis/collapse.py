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
from lra_jax.analysis import published
from lra_jax.analysis.capture import variant_states
from lra_jax.analysis.networks import (
    Network,
    Shape,
    find_shape,
    run_parts,
    zipf_tokens,
)
from lra_jax.analysis.residual import relative_residual
from lra_jax.analysis.variants import VARIANTS, Variant
from lra_jax.attention.inputs import check_size
from lra_jax.errors import expected, renamed
from lra_jax.models.pretrained import PretrainedEncoder, from_softmax
from lra_jax.reports import charts
from lra_jax.reports.figures import Chart, Panel
from lra_jax.reports.page import Section
from lra_jax.reports.table import Table

Curves = dict[str, np.ndarray]
"""By variant float64 `[sequences, L + 1]`, embeddings first."""

_TITLES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
_YLABEL = "relative residual"
_MEASURE = (
    "||res(X)|| / ||X|| in the composite (1, infinity) norm, with the mean token as "
    "the centre: 0 when all tokens are equal"
)


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
      ValueError: as for `networks.Network`, or a number that is not positive.
    """
    check_size("draws", draws)
    check_size("batch_size", batch_size)
    shape = find_shape(shape)
    parts = []
    for draw in range(seed, seed + draws):
        network = Network(
            shape,
            mechanism,
            length=length,
            num_layers=num_layers,
            rngs=nnx.Rngs(draw),
        )
        tokens = zipf_tokens(shape.vocab_size, batch_size, length, draw)
        parts.append(_curves(network, tokens, variants, clock))
    return {name: np.concatenate([part[name] for part in parts]) for name in variants}


def pretrained_curves(
    encoder: PretrainedEncoder,
    variants: Mapping[str, Variant] = VARIANTS,
    *,
    length: int,
    batch_size: int = 8,
    seed: int = 0,
) -> Curves:
    """The same for a BERT, RoBERTa or GPT-2 with trained weights.

    Raises:
      ValueError: sequences longer than its table of positions.
    """
    tokens = zipf_tokens(encoder.config.vocab_size, batch_size, length, seed)
    clock = progress.Clock("curves", len(variants))
    return _curves(encoder, tokens, variants, clock)


def _curves(
    network: Network | PretrainedEncoder,
    tokens: np.ndarray,
    variants: Mapping[str, Variant],
    clock: progress.Clock | None,
) -> Curves:
    graph, weights = nnx.split(network)
    curves = {}
    for name, variant in variants.items():
        states = _run(graph, weights, jnp.asarray(tokens), variant)
        curves[name] = collapse_curves(states)
        if clock is not None:
            clock.tick()
    return curves


@functools.partial(jax.jit, static_argnums=(0, 3))
def _run(graph: Any, weights: Any, tokens: jax.Array, variant: Variant) -> jax.Array:
    """The hidden states `[L + 1, B, T, D]`."""
    network = nnx.merge(graph, weights)
    if isinstance(network, Network):
        return network(tokens, variant)
    states = network.hidden_states(tokens)[:1]
    for block in network.blocks:
        states.append(run_parts(block, states[-1], variant))
    return jnp.stack(states)


def model_curves(
    model: nnx.Module,
    run: Callable[[], Any],
    variants: Mapping[str, Variant] = VARIANTS,
) -> Curves:
    """The curves for a model of this library, one for each example; padding is ignored.

    Args:
      model, run: see `capture.capture`.
      variants: by name.
    """
    states, mask = variant_states(model, run, variants)
    return {name: collapse_curves(x, mask) for name, x in states.items()}


def collapse_curves(states: Any, mask: np.ndarray | None = None) -> np.ndarray:
    """Relative residuals `[B, L + 1]` of hidden states `[L + 1, B, T, D]`.

    Raises:
      ValueError: the states are not finite.
    """
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
    """Figure 2 of the paper, and the first network with one mechanism after another.

    Args:
      networks: names in `networks.SHAPES`.
      mechanisms: registered names.
      variants: by name.
      draws, **sizes: see `network_curves`.
    """
    count = (len(networks) + len(mechanisms)) * draws * len(variants)
    sizes |= {"draws": draws, "clock": progress.Clock("curves", count)}
    curves: dict[str, Curves] = {}
    for name in networks:
        progress.say(f"{name} ({len(curves) + 1} of {len(networks)} networks) ...")
        curves[name] = network_curves(name, variants=variants, **sizes)
    yield _compare_networks(curves, all(v.norm for v in variants.values()))
    curves, network = {}, networks[0]
    for name in mechanisms:
        place = f"{len(curves) + 1} of {len(mechanisms)} mechanisms"
        progress.say(f"{network} with {name} ({place}) ...")
        curves[name] = network_curves(network, name, variants=variants, **sizes)
    yield _compare_mechanisms(network, curves)


def model_section(saved: Any, batch: Any, variants: Mapping[str, Variant]) -> Section:
    """A model trained here, on its own examples.

    Args:
      saved: a `lra_jax.training.restore.SavedRun`.
      batch: of its examples.
      variants: by name.
    """
    curves = model_curves(saved.model, lambda: saved.run(batch), variants)
    config = saved.config
    title = f"{config.mixers} on {config.task}, step {saved.step}"
    chart, table = _show(curves, "rank-collapse-run", title)
    return Section("A trained model with parts left out", [chart, table])


def weights_section(
    weights: str, variants: Mapping[str, Variant], **sizes: Any
) -> Section:
    """A network with weights from disk, on random tokens.

    Args:
      weights: the ``model.safetensors`` of a BERT, RoBERTa or GPT-2, or its folder; the
        ``config.json`` is beside it.
      variants: by name.
      **sizes: see `pretrained_curves`.

    Raises:
      ValueError: see `lra_jax.models.from_softmax`.
    """
    path = Path(weights).expanduser()
    try:
        encoder = from_softmax(path.parent if path.is_file() else path)
    except ValueError as error:
        raise renamed(error, "--weights") from error
    curves = pretrained_curves(encoder, variants, **sizes)
    config = encoder.config
    is_base = (config.kind, config.num_layers, config.embed_dim) == ("bert", 12, 768)
    printed = published.figure_2("bert", "pretrained") if is_base else {}
    kind = {"bert": "BERT", "roberta": "RoBERTa", "gpt2": "GPT-2"}[config.kind]
    title = f"{kind} of {config.num_layers} layers, weights from a file"
    chart, table = _show(curves, "rank-collapse-bert", title, printed)
    return Section(f"A trained {kind} with parts left out", [chart, table])


def _compare_networks(networks: Mapping[str, Curves], has_norm: bool) -> Section:
    """A panel for each network, with the published curves if it has its norms."""
    printed = {n: published.figure_2(n) if has_norm else {} for n in networks}
    panels = [
        _panel(f"{_TITLES[name]}, at initialisation", curves, printed[name])
        for name, curves in networks.items()
    ]
    panels[0] = panels[0]._replace(settings={**panels[0].settings, "ylim": -0.03})
    chart = Chart(
        "rank-collapse",
        panels,
        f"Networks at initialisation on random tokens. {_MEASURE}. Lines: means over "
        "initialisations and sequences, one standard deviation shaded."
        + (" Crosses: the published ones, 128 tokens each." if has_norm else ""),
        data={"ours": _data(networks), "published": printed},
        ylabels=[_YLABEL],
        shared={"sharey": True},
    )
    first = range(min(4, _num_states(networks)))
    rows = []
    for name, curves in networks.items():
        for variant, values in curves.items():
            theirs = printed[name].get(variant)
            ours = (f"{values.mean(0)[i]:.3f}" for i in first)
            cells = (f"{theirs[i]:.3f}" if theirs else "-" for i in first)
            rows.append((f"{name}, {variant}", *ours, *cells))
    head = [f"{whose}, layer {i}" for whose in ("ours", "published") for i in first]
    table = Table(("network", *head), rows)
    return Section("Skip connections keep the rank", [chart, table])


def _compare_mechanisms(network: str, mechanisms: Mapping[str, Curves]) -> Section:
    """A panel for each variant of one network."""
    variants = next(iter(mechanisms.values()))
    panels = []
    for variant in variants:
        # Rounding in float32 is not a residual.
        means = {
            name: np.maximum(curves[variant].mean(0), 1e-7)
            for name, curves in mechanisms.items()
        }
        falls = min(y.min() for y in means.values()) < 1e-2
        # Room above the uppermost markers.
        limits = {} if falls else {"ylim": (0, 1.08 * max(map(np.max, means.values())))}
        panels.append(
            Panel(
                [charts.Line(name, range(len(y)), y) for name, y in means.items()],
                integers="x",
                is_log=falls,
                settings={"title": variant, "xlabel": "layer", **limits},
            )
        )
    chart = Chart(
        "rank-collapse-mechanisms",
        panels,
        f"A network of {_TITLES[network]}'s shape at initialisation with one mechanism "
        f"after another. {_MEASURE}; means. Where they fall the scale is logarithmic, "
        "cut off at 1e-7, the rounding of float32.",
        data=_data(mechanisms),
        size=(3.3, 3.4),
        ylabels=[_YLABEL],
        shared={"sharex": True},
    )
    last = _num_states(mechanisms) - 1
    layers = sorted({min(layer, last) for layer in (1, 2, 4, last)})
    rows = [
        (f"{name}, {variant}", *(f"{curves[variant].mean(0)[i]:.2g}" for i in layers))
        for variant in variants
        for name, curves in mechanisms.items()
    ]
    table = Table(("mechanism", *(f"layer {i}" for i in layers)), rows)
    return Section("The same network with other mechanisms", [chart, table])


def _show(
    curves: Curves,
    name: str,
    title: str,
    printed: Mapping[str, Sequence[float]] | None = None,
) -> tuple[Chart, Table]:
    """The curves of a single network, and the published ones if there are any."""
    crosses = " Crosses: the published curves, on other texts." if printed else ""
    chart = Chart(
        name,
        [_panel(title, curves, printed or {})],
        f"{title}. {_MEASURE}; means, one standard deviation shaded.{crosses}",
        data={"ours": _data({title: curves})[title], "published": printed or {}},
        size=(6, 4),
        ylabels=[_YLABEL],
    )
    layers = range(_num_states({title: curves}))
    rows = [(n, *(f"{x:.3f}" for x in c.mean(0))) for n, c in curves.items()]
    return chart, Table(("parts", *(f"layer {i}" for i in layers)), rows)


def _panel(title: str, curves: Curves, printed: Mapping[str, Sequence[float]]) -> Panel:
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
    return Panel(lines, integers="x", settings={"title": title, "xlabel": "layer"})


def _num_states(networks: Mapping[str, Curves]) -> int:
    """L + 1 of the first network."""
    return next(iter(next(iter(networks.values())).values())).shape[1]


def _data(networks: Mapping[str, Curves]) -> dict[str, Any]:
    return {
        name: {
            variant: {"mean": values.mean(0), "std": values.std(0)}
            for variant, values in curves.items()
        }
        for name, curves in networks.items()
    }
