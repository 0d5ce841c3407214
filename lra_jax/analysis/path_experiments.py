"""Which paths do the work: sorting, convex hull and memorisation (Dong, Cordonnier and
Loukas 2021, Figures 4 and 5), trained and then run along random paths of each length.

`PUBLISHED` has the settings of the published commands. `QUICK` has the same tasks with
fewer steps and a larger learning rate, which reach at least the printed accuracies in
minutes.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.path_network import (
    PathNetwork,
    PathSettings,
    draw_paths,
    fit_epochs,
)
from lra_jax.analysis.path_tasks import TokenTask, convex_hull, memorisation, sorting
from lra_jax.analysis.paths import path_length_distribution
from lra_jax.files import read_json, write_json
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel
from lra_jax.reports.page import Section
from lra_jax.reports.table import Table

_SORTING = PathSettings(48, 6, 2, 10, vocab_size=10, longest=512)
_HULL = PathSettings(84, 6, 3, 2, input_layers=2)
_MEMORY = PathSettings(250, 6, 2, 2, vocab_size=30_522)
# The numbers of paths that are summed.
_NUM_PATHS = (5, 20)
# Layers and heads of published models.
_MODELS = {
    "DistilBERT": (6, 12),
    "BERT-base": (12, 12),
    "BERT-large": (24, 16),
    "DeiT-T": (12, 3),
    "GPT-3": (96, 96),
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A task, a network and how it is trained.

    Attributes:
      settings: of the network.
      num_train, num_eval: examples; num_eval 0 evaluates on the training examples.
      epochs, batch_size, learning_rate: of Adam, with examples in a fixed order.
      weight_decay: added to the gradient, as in torch's Adam.
      drops: epochs after which the learning rate is multiplied by 0.91.
      longest: the longest text, in tokens.
      whole: the published accuracy of all paths.
    """

    settings: PathSettings
    num_train: int
    num_eval: int
    epochs: int
    batch_size: int = 30
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    drops: tuple[int, ...] = ()
    longest: int = 128
    whole: float | None = None


PUBLISHED = {
    "sorting": Experiment(_SORTING, 1000, 200, 65, whole=0.98),
    "convex-hull": Experiment(
        _HULL,
        10_000,
        300,
        70,
        weight_decay=1e-3,
        drops=(15, 30, 40, 50, 60),
        whole=0.9,
    ),
    "memorisation": Experiment(_MEMORY, 500, 0, 50, batch_size=8, learning_rate=3e-4),
}

QUICK = {
    "sorting": dataclasses.replace(
        PUBLISHED["sorting"], learning_rate=1e-3, num_train=2000, epochs=20
    ),
    "convex-hull": dataclasses.replace(
        PUBLISHED["convex-hull"],
        learning_rate=1e-3,
        num_train=4000,
        epochs=12,
        drops=(),
    ),
    "memorisation": dataclasses.replace(
        PUBLISHED["memorisation"],
        settings=dataclasses.replace(_MEMORY, width=64, vocab_size=1000, dropout=0.0),
        num_train=60,
        longest=32,
        epochs=60,
        learning_rate=1e-3,
    ),
}


class PathResult(NamedTuple):
    """Accuracies, as shares of the tokens.

    Attributes:
      whole: of the network itself.
      majority: of always answering the most frequent label.
      by_length: for each number of paths, `[L + 1, repeats]`: of the sum of that many
        random paths of length 0..L.
      losses: mean training loss of each epoch.
    """

    whole: float
    majority: float
    by_length: dict[int, np.ndarray]
    losses: np.ndarray


def run_experiment(
    name: str,
    experiment: Experiment,
    *,
    mechanism: str = "softmax",
    repeats: int = 5,
    seed: int = 0,
) -> PathResult:
    """Trains a network and measures it along random paths.

    Args:
      name: a key of `PUBLISHED`.
      experiment: its settings.
      mechanism: attention of the network.
      repeats: draws of the paths to sum, for each length and number of paths.
      seed: of data, weights, dropout and paths.
    """
    train, test = _make_data(name, experiment, seed)
    settings = experiment.settings
    model = PathNetwork(settings, mechanism, rngs=nnx.Rngs(seed))
    losses = _fit(model, train, experiment, seed)

    @nnx.jit
    def score(model: PathNetwork, inputs: Any, labels: Any, paths: Any) -> jax.Array:
        """The share of right labels, of the network itself or along paths."""
        mask = labels >= 0
        if paths is None:
            logits = model(inputs, mask)
        else:
            logits = model.along(inputs, paths, mask)
        return jnp.mean(logits.argmax(-1) == labels, where=mask)

    data = jnp.asarray(test.inputs), jnp.asarray(test.labels)
    rng = np.random.default_rng(seed)
    sizes = settings.num_layers, settings.num_heads
    lengths = range(settings.num_layers + 1)
    clock = progress.Clock("lengths of the paths", len(_NUM_PATHS) * len(lengths))
    by_length = {}
    for count in _NUM_PATHS:
        rows = []
        for length in lengths:
            draws = (draw_paths(length, count, *sizes, rng) for _ in range(repeats))
            rows.append([float(score(model, *data, paths)) for paths in draws])
            clock.tick()
        by_length[count] = np.array(rows)
    whole = float(score(model, *data, None))
    return PathResult(whole, test.majority, by_length, losses)


def run_seeds(
    name: str,
    experiment: Experiment,
    seeds: Sequence[int],
    *,
    folder: Path,
    **settings: Any,
) -> PathResult:
    """`run_experiment` of each seed: means; the draws of all seeds side by side.

    The folder keeps the result of each seed for the next call with these settings.
    """
    digest = hashlib.sha256(repr((experiment, sorted(settings.items()))).encode())
    runs = []
    for seed in seeds:
        file = folder / f"{name}-seed{seed}-{digest.hexdigest()[:8]}.json"
        if not file.exists():
            result = run_experiment(name, experiment, seed=seed, **settings)
            folder.mkdir(exist_ok=True)
            draws = {n: rows.tolist() for n, rows in result.by_length.items()}
            losses = result.losses.tolist()
            write_json(file, result._replace(by_length=draws, losses=losses)._asdict())
        kept = PathResult(**read_json(file))
        draws = {int(n): np.array(rows) for n, rows in kept.by_length.items()}
        runs.append(kept._replace(by_length=draws, losses=np.array(kept.losses)))
    draws = {n: np.hstack([x.by_length[n] for x in runs]) for n in _NUM_PATHS}
    whole = float(np.mean([x.whole for x in runs]))
    majority = float(np.mean([x.majority for x in runs]))
    return PathResult(whole, majority, draws, np.mean([x.losses for x in runs], 0))


def _make_data(
    name: str, experiment: Experiment, seed: int
) -> tuple[TokenTask, TokenTask]:
    """The training and the evaluation examples of an experiment."""
    num_train, count = experiment.num_train, experiment.num_train + experiment.num_eval
    if name == "memorisation":
        vocabulary = experiment.settings.vocab_size or 1
        task = memorisation(count, seed, experiment.longest, vocabulary)
    else:
        task = {"sorting": sorting, "convex-hull": convex_hull}[name](count, seed)
    train = TokenTask(*(array[:num_train] for array in task))
    test = TokenTask(*(array[num_train:] for array in task))
    return train, test if experiment.num_eval else train


def _fit(
    model: PathNetwork, task: TokenTask, experiment: Experiment, seed: int
) -> np.ndarray:
    """Trains with Adam on cross-entropy over the tokens; the losses."""
    size = min(experiment.batch_size, len(task.inputs))
    steps = len(task.inputs) // size
    schedule = optax.piecewise_constant_schedule(
        experiment.learning_rate, {drop * steps: 0.91 for drop in experiment.drops}
    )
    optimizer = optax.chain(
        optax.add_decayed_weights(experiment.weight_decay), optax.adam(schedule)
    )

    def loss(model: Any, inputs: Any, labels: Any, rngs: nnx.Rngs) -> jax.Array:
        """The mean over the tokens of a batch."""
        mask = labels >= 0
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            model(inputs, mask, rngs), jnp.where(mask, labels, 0)
        )
        return jnp.mean(losses, where=mask)

    return fit_epochs(model, loss, task, size, optimizer, experiment.epochs, seed)


def lengths_section() -> Section:
    """The number of paths of each length in published models, in closed form."""
    lines, data = [], {}
    for name, (layers, heads) in _MODELS.items():
        shares = path_length_distribution(layers, heads)
        label = f"{name}, {layers} layers of {heads} heads"
        lines.append(charts.Line(label, np.linspace(0, 1, len(shares)), shares))
        data[name] = {"layers": layers, "heads": heads, "shares": shares}
    xlabel = "length of a path, share of the layers"
    caption = (
        "Paths by their length, C(L, k) H^k of (1 + H)^L: nearly all of them are "
        "nearly as long as the network is deep."
    )
    chart = Chart(
        "path-lengths",
        [Panel(lines, settings={"xlabel": xlabel, "xlim": (0.5, 1.01)})],
        caption,
        data=data,
        size=(7.5, 4),
        ylabels=["share of the paths"],
    )
    return Section("Most paths are long", [chart])


def results_section(
    results: Mapping[str, PathResult],
    experiments: Mapping[str, Experiment],
    is_quick: bool,
) -> Section:
    """Accuracy against path length, a panel for each experiment."""
    caption = (
        "Accuracy of the sum of random paths by their length; one standard deviation "
        "over draws of the paths and seeds is shaded."
        + (" Quick settings: fewer steps, larger learning rate." if is_quick else "")
    )
    data = {
        name: {
            "whole": result.whole,
            "majority": result.majority,
            "losses": result.losses,
            **{f"{count} paths": rows for count, rows in result.by_length.items()},
        }
        for name, result in results.items()
    }
    chart = Chart(
        "paths",
        [_panel(name, result) for name, result in results.items()],
        caption,
        data=data,
        ylabels=["share of tokens labelled correctly"],
        layout={"sharey": True},
    )
    rows = []
    for name, result in results.items():
        means = result.by_length[max(result.by_length)].mean(1)
        printed = experiments[name].whole
        rows.append(
            (
                name,
                f"{result.whole:.3f}",
                "-" if printed is None else printed,
                f"{result.majority:.3f}",
                *(f"{means[length]:.3f}" for length in (0, 1, 3, -1)),
            )
        )
    head = ("experiment", "whole network", "published", "most frequent label")
    lengths = ("length 0", "length 1", "length 3", "length L")
    return Section("Short paths do the work", [chart, Table((*head, *lengths), rows)])


def _panel(title: str, result: PathResult) -> Panel:
    lines = [
        charts.Line(f"{n} paths", range(len(rows)), rows.mean(1), spread=rows.std(1))
        for n, rows in result.by_length.items()
    ]

    levels = {"whole network": result.whole, "most frequent label": result.majority}
    ends = (0, result.by_length[_NUM_PATHS[0]].shape[0] - 1)
    lines += [charts.Line(label, ends, (y, y)) for label, y in levels.items()]
    xlabel = "length of the paths, layers"
    settings = {"title": title, "xlabel": xlabel, "ylim": (0, 1.03)}
    return Panel(lines, integers="x", settings=settings)
