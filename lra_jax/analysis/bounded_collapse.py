"""The collapse of pure attention compared with the theorem's bound, in float64.

In float32 a residual is lost in rounding after two layers; in float64 after three.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.bound import collapse_beta, collapse_bound
from lra_jax.analysis.capture import capture, longest_document
from lra_jax.analysis.networks import Network, Shape, find_shape, zipf_tokens
from lra_jax.analysis.residual import composite_norm, residual
from lra_jax.errors import expected
from lra_jax.models import EncoderBlock, MultiHeadAttention
from lra_jax.models.batch_norm import BatchNorm
from lra_jax.models.instance_norm import InstanceNorm
from lra_jax.models.layers import LayerNorm
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

    Raises:
      ValueError: as for `networks.Network`, or a shape whose layers have more than
        attention (ALBERT's, XLNet's).
    """
    shape = find_shape(shape)
    if shape.relative or shape.shared:
        raise expected("shape", "one of attention by content alone, as BERT's", shape)
    network = Network(shape, length=length, num_layers=num_layers, rngs=nnx.Rngs(seed))
    tokens = jnp.asarray(zipf_tokens(shape.vocab_size, 1, length, seed))
    x = np.asarray(network.embed_tokens(tokens)[0], np.float64)
    return _run(x * scale, list(network.blocks), "after" if norm else None)


def bounded_model(
    model: nnx.Module, run: Callable[[], Any], *, norm: bool = False
) -> BoundedCollapse:
    """Runs only the attention of a model trained here, on its first example.

    Computed in float64 from the weights, on the longest document of the first row.

    Args:
      model, run: see `capture.capture`.
      norm: keep the normalisation of each attention.

    Raises:
      ValueError: its attention is not that of the theorem: softmax of query times key
        over all positions, computed from the layer's own input.
    """
    blocks = [x for _, x in nnx.iter_modules(model) if isinstance(x, EncoderBlock)]
    for block in blocks:
        _check_layer(block.attention)
    captured = capture(model, run)
    document = longest_document(captured.documents)[0]
    x = captured.states[0, 0][document].astype(np.float64)
    place = "after" if blocks[0].post_norm else "before"
    return _run(x, blocks, place if norm else None)


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
    return _describe(runs, subject, (4.6, 3.6))


def model_section(model: nnx.Module, run: Callable[[], Any]) -> Section:
    """`bounded_model` of a model trained here, or why the theorem does not apply."""
    progress.say("the bound for this model, in float64 ...")
    try:
        runs = {
            "without the norm": bounded_model(model, run),
            "with the norm": bounded_model(model, run, norm=True),
        }
    except ValueError as error:
        reason = str(error).removeprefix("model: ")
        sentence = f"Theorem 2.2 does not apply to this model: {reason}."
        return Section("The bound", [sentence])
    subject = (
        "The trained model's attention alone on the longest document of the first "
        "example"
    )
    return _describe(runs, subject, (6, 4))


def _describe(
    runs: Mapping[str, BoundedCollapse], subject: str, size: tuple[float, float]
) -> Section:
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
        size=size,
        ylabels=["residual"],
    )
    rows = [
        (layer, *(number(x, ".2g") for x in cells))
        for layer, cells in enumerate(zip(*columns, strict=True))
    ]
    return Section("The bound", [chart, Table(head, rows)])


def _is_drawn(y: np.ndarray) -> np.ndarray:
    return (y > 1 / _LARGEST) & (y < _LARGEST)


def _run(
    x: np.ndarray, blocks: Sequence[Any], norm: Literal["before", "after"] | None
) -> BoundedCollapse:
    """Runs the attention of blocks on one sequence `[T, D]`, with or without norms."""
    states, layers = [x], [block.attention for block in blocks]
    for block in blocks:
        x = states[-1]
        if norm == "before":
            x = _normalise(x, block.attention_norm)
        x = _attend(x, block.attention)
        if norm == "after":
            x = _normalise(x, block.attention_norm)
        states.append(x)
    residuals = composite_norm(residual(np.stack(states)))
    heads = {"head_dim": layers[0].head_dim, "num_heads": layers[0].num_heads}
    beta = max(map(_beta, layers))

    def bound(start: float, depth: int) -> float:
        return collapse_bound(float(start), depth, beta=beta, **heads)

    return BoundedCollapse(
        residuals,
        np.finfo(np.float64).eps * composite_norm(np.stack(states)),
        np.array([bound(residuals[0], depth) for depth in range(len(residuals))]),
        np.array([residuals[0], *(bound(x, 1) for x in residuals[:-1])]),
        beta,
    )


def _beta(layer: Any) -> float:
    """The beta of a layer with kernels ``query``, ``key``, ``value`` and ``out``."""
    query, key, value = (
        _split_heads(_array(part.kernel), layer.num_heads)
        for part in (layer.query, layer.key, layer.value)
    )
    out = _array(layer.out.kernel)
    shape = (layer.num_heads, -1, out.shape[-1])
    return collapse_beta(query, key, value @ out.reshape(shape))


def _check_layer(layer: MultiHeadAttention) -> None:
    wrong = {
        f"attention {layer.mechanism.name!r}": layer.mechanism.name != "softmax",
        "a causal model": layer.is_causal,
        "rotary positions": layer.rotary,
        "shared heads of keys": layer.num_kv_heads != layer.num_heads,
        "short_conv": layer.short_conv > 0,
        "gate": layer.out_gate is not None,
        "local_values": layer.local_values,
        "options": bool(layer.options.function),
    }
    reasons = [name for name, is_so in wrong.items() if is_so]
    if reasons:
        kind = "plain softmax over all positions of the layer's own inputs"
        raise expected("model", kind, " and ".join(reasons))


def _attend(x: np.ndarray, layer: MultiHeadAttention) -> np.ndarray:
    """The layer on one sequence `[T, D]`."""
    query, key, value = (
        _split_heads(_project(x, part), layer.num_heads)
        for part in (layer.query, layer.key, layer.value)
    )
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(layer.head_dim)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.moveaxis(weights @ value, 0, 1)
    return _project(mixed.reshape(len(x), -1), layer.out)


def _project(x: np.ndarray, layer: Any) -> np.ndarray:
    out = x @ _array(layer.kernel)
    return out if layer.bias is None else out + _array(layer.bias)


def _normalise(
    x: np.ndarray, layer: LayerNorm | InstanceNorm | BatchNorm
) -> np.ndarray:
    """The norm of one sequence `[T, D]`, over columns or over positions."""
    if isinstance(layer, BatchNorm):
        mean, var = _array(layer.mean), _array(layer.var)
    else:
        axis = 0 if isinstance(layer, InstanceNorm) else -1
        mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    scaled = (x - mean) / np.sqrt(var + layer.epsilon)
    return scaled * _array(layer.scale) + _array(layer.bias)


def _split_heads(x: np.ndarray, num_heads: int) -> np.ndarray:
    """`[T, N * H]` to `[N, T, H]`."""
    return np.moveaxis(x.reshape(len(x), num_heads, -1), 1, 0)


def _array(parameter: Any) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)
