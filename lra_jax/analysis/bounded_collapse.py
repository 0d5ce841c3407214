"""The collapse of pure attention compared with the theorem's bound, in float64.

In float32 a residual is lost in rounding after two layers; in float64 after three.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.bound import collapse_beta, collapse_bound
from lra_jax.analysis.networks import (
    Network,
    Shape,
    Variant,
    find_shape,
    zipf_tokens,
)
from lra_jax.analysis.residual import composite_norm, residual
from lra_jax.errors import expected
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel
from lra_jax.reports.page import Section
from lra_jax.reports.table import Table, number

NETWORK = "bert"
"""The network in the picture; the others have more than attention by content."""
_LAYERS = 4
_LARGEST = 1e40


class BoundedCollapse(NamedTuple):
    """Residual norms ``||res(X_l)||`` of one sequence, float64 `[L + 1]` each.

    Attributes:
      residuals: measured, after each layer; the input first.
      rounding: the part of them that may be rounding, ``eps ||X_l||``.
      bounds: Theorem 2.2 applied from the input on.
      next_bounds: the same for one layer, from the measured residual before it; for the
        input, its own residual.
      beta: of the weights, see `lra_jax.analysis.collapse_beta`.
    """

    residuals: np.ndarray
    rounding: np.ndarray
    bounds: np.ndarray
    next_bounds: np.ndarray
    beta: float

    def columns(self) -> dict[str, np.ndarray]:
        """The columns that can be shown, `[L + 1]` each.

        NaN from the first layer on where rounding may be a hundredth of the residual,
        and for bounds computed from such a residual, which mean nothing.
        """
        is_lost = np.logical_or.accumulate(self.residuals < 100 * self.rounding)
        follows = np.append(False, is_lost[:-1])
        return {
            "measured": np.where(is_lost, np.nan, self.residuals),
            "bound from the input on": self.bounds,
            "bound of one layer": np.where(follows, np.nan, self.next_bounds),
        }


def bounded_collapse(
    shape: Shape | str,
    *,
    norm: bool = False,
    scale: float = 1.0,
    length: int = 128,
    num_layers: int | None = None,
    seed: int = 0,
) -> BoundedCollapse:
    """Runs only the attention of a network at initialisation, on random tokens.

    Args:
      shape: of the network; its attention must be that of the theorem.
      norm: apply layer normalisation after each layer, unlike the theorem.
      scale: of the embedded tokens, and so of their residual.
      length, num_layers: see `networks.Network`.
      seed: of weights and tokens.
    """
    shape = find_shape(shape)
    if shape.relative or shape.shared:
        raise expected("shape", "one of attention by content alone, as BERT's", shape)
    network = Network(shape, length=length, num_layers=num_layers, rngs=nnx.Rngs(seed))
    tokens = jnp.asarray(zipf_tokens(shape.vocab_size, 1, length, seed))
    variant = Variant(skip=False, mlp=False, norm=norm)
    graph, params = nnx.split(network)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        network = nnx.merge(graph, params)
        states = [network.embed_tokens(tokens)[:1] * scale]
        for block in network.blocks:
            states.append(network.run_block(block, states[-1], variant))
        return _measure(np.stack(states)[:, 0], [x.attention for x in network.blocks])


def initial_section(
    seeds: Sequence[int], *, length: int, num_layers: int | None
) -> Section:
    """`bounded_collapse` of BERT's shape, means over seeds, for two scales of the
    tokens."""
    layers = _LAYERS if num_layers is None else min(_LAYERS, num_layers)
    sizes: dict[str, Any] = {"length": length, "num_layers": layers}
    settings: dict[str, dict[str, Any]] = {
        "tokens as they are": {},
        "tokens a ten-thousandth as large": {"scale": 1e-4},
        "with layer normalisation": {"norm": True},
    }
    progress.say(f"the bound for {NETWORK}, in float64 ...")
    draws = {
        name: [
            bounded_collapse(NETWORK, **sizes, **options, seed=seed) for seed in seeds
        ]
        for name, options in settings.items()
    }
    runs = {
        name: BoundedCollapse(*(np.mean(x, 0) for x in zip(*of_name, strict=True)))
        for name, of_name in draws.items()
    }
    first = [run.residuals[1] for run in draws["tokens as they are"]]
    subject = (
        "Attention alone, without layer normalisation, of a network of BERT's shape at "
        f"initialisation on one sequence of random tokens, means of {len(seeds)} draws "
        f"({np.mean(first):.2g} after one layer, standard deviation "
        f"{np.std(first):.2g})"
    )
    return _describe(runs, subject)


def _describe(runs: Mapping[str, BoundedCollapse], subject: str) -> Section:
    """A panel for each run; the last run, with the norm, is a line in the first."""
    *names, normal = runs
    panels, head, columns = [], ["layer"], []
    for name in names:
        curves = runs[name].columns()
        if name == names[0]:
            curves["measured, with the norm"] = runs[normal].columns()["measured"]
        lines = [
            charts.Line(label, range(len(y)), np.where(_is_drawn(y), y, np.nan))
            for label, y in curves.items()
        ]
        settings = {"title": name, "xlabel": "layer"}
        panels.append(Panel(lines, integers="x", is_log=True, settings=settings))
        head += [f"{label}, {name}" for label in curves]
        columns += curves.values()
    caption = (
        f"{subject}, computed in float64: ||res(X)|| in the composite norm, and "
        "Theorem 2.2 with gamma = 1 and the weights' own beta = "
        f"{runs[names[0]].beta:.3g}. Lines end where rounding may be a hundredth of "
        f"the residual, and bounds beyond {_LARGEST:g} or below its inverse."
    )
    chart = Chart(
        "rank-collapse-bound",
        panels,
        caption,
        data={name: run._asdict() for name, run in runs.items()},
        size=(4.6, 3.6),
        ylabels=["residual"],
    )
    rows = [
        (layer, *(number(x, ".2g") for x in cells))
        for layer, cells in enumerate(zip(*columns, strict=True))
    ]
    return Section("The bound", [chart, Table(head, rows)])


def _is_drawn(y: np.ndarray) -> np.ndarray:
    return (y > 1 / _LARGEST) & (y < _LARGEST)


def _measure(states: np.ndarray, layers: Sequence[Any]) -> BoundedCollapse:
    """The residuals of the states `[L + 1, T, D]`, and the bounds of the layers."""
    residuals = composite_norm(residual(states))
    heads = {"head_dim": layers[0].head_dim, "num_heads": layers[0].num_heads}
    beta = max(map(_beta, layers))

    def bound(start: float, depth: int) -> float:
        return collapse_bound(float(start), depth, beta=beta, **heads)

    return BoundedCollapse(
        residuals,
        np.finfo(np.float64).eps * composite_norm(states),
        np.array([bound(residuals[0], depth) for depth in range(len(residuals))]),
        np.array([residuals[0], *(bound(x, 1) for x in residuals[:-1])]),
        beta,
    )


def _beta(layer: Any) -> float:
    """The beta of a layer with kernels ``query``, ``key``, ``value`` and ``out``."""
    query, key, value = (
        np.stack(np.split(np.asarray(part.kernel[...]), layer.num_heads, -1))
        for part in (layer.query, layer.key, layer.value)
    )
    out = np.stack(np.split(np.asarray(layer.out.kernel[...]), layer.num_heads))
    return collapse_beta(query, key, value @ out)
