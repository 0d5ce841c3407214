"""Trains the papers' models, scaled down: python benchmarks/papers_in_small.py

Each part trains several models on the same tokens, tries a few learning rates for each,
and selects the rate with the lowest validation loss of seed 0. Further seeds
(--seeds=2) run only at that rate.

mechanisms   every causal mechanism, next byte: Flowformer's and cosFormer's tables on
             WikiText-103, of which only the order of the mechanisms is comparable.
reweighting  cosFormer's ablation: feature maps, with and without the cosine, masked
             bytes; the curves compare with its Figure 4.
flow         Flowformer's ablation: without competition, without allocation, clip=1,
             and with ReLU instead of sigmoids.
linformer    masked bytes against K and sharing in rows of 512: Linformer's Figure 3.

``--out`` writes every run, as results/language/PART.json has them; `results_tables.py`
and `figures.py` show them. Runs go to --workdir, and finished ones are not repeated, so
the same command resumes. Further flags, such as --train.steps=300, are those of
training.
"""

import functools
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import flags, origin, write

from lra_jax import cli, runs, runtime
from lra_jax.attention.registry import MECHANISMS
from lra_jax.training.metrics import read_metrics

PROG = "python benchmarks/papers_in_small.py"
Results = Mapping[str, Sequence[dict[str, Any]]]  # By series.


class Part(NamedTuple):
    """Attributes: `task`; `models`, flags of training by name; `baseline`, one of them;
    `score`, a key of a result, and its `unit`; `positions`, whether a model is also
    scored by position."""

    task: str
    models: dict[str, list[str]]
    baseline: str
    score: str
    unit: str
    positions: bool


def _options(attention: str, text: str) -> list[str]:
    return [f"--attention={attention}", f"--model.attention_options={text}"]


# Those with one pass for a packed row; others need one pass per text in it.
_CAUSAL = {
    name: [f"--attention={name}"]
    for name, one in MECHANISMS.items()
    if one.causal and one.packed
}
_SOFTMAX = {"softmax": _CAUSAL["softmax"]}
_REWEIGHTING = {
    f"{name}, {word} cosine": _options(
        "cosformer", f"feature_map={name},reweight={cosine}"
    )
    for name in ("relu", "identity", "leaky_relu", "elu")
    for word, cosine in (("with", True), ("without", False))
}
_LINFORMER = {
    f"K={features}, {sharing}": _options(
        "linformer", f"features={features},sharing={sharing}"
    )
    for features in (32, 64, 128)
    for sharing in ("headwise", "key_value", "layerwise")
}
_FLOW = {
    "flow": _CAUSAL["flow"],
    "flow, relu": _options("flow", "feature_map=relu"),
    "flow, no competition": _options("flow", "competition=False"),
    "flow, no allocation": _options("flow", "allocation=False"),
    "flow, clip=1": _options("flow", "clip=1"),
}
_BYTE = ("test_bits_per_byte_best", "bits per byte")
_MASKED = ("test_perplexity_best", "perplexity of masked bytes")
PARTS = {
    "mechanisms": Part("lm", _CAUSAL, "softmax", *_BYTE, True),
    "reweighting": Part(
        "mlm", _SOFTMAX | _REWEIGHTING, "relu, with cosine", *_MASKED, False
    ),
    "linformer": Part("mlm", _SOFTMAX | _LINFORMER, "softmax", *_MASKED, False),
    "flow": Part("lm", _SOFTMAX | _FLOW, "flow", *_BYTE, False),
}


def main() -> None:
    """The command line."""
    runtime.tune_allocator()
    parser = flags(
        __doc__,
        part=list(PARTS),
        rates=(0.001, 0.002, 0.004),
        seeds=1,
        workdir="runs/language",
    )
    options, others = parser.parse_known_args()
    if any(flag.partition("=")[0] == "--seed" for flag in others):
        parser.error("--seed: expected --seeds")
    part, rates = PARTS[options.part], options.rates
    make = functools.partial(make_plan, part, [f"--workdir={options.workdir}", *others])
    with cli.user_errors():
        results = train(make([(name, rate) for name in part.models for rate in rates]))
        best = best_rates(part.models, rates, results)
        more = {}
        if options.seeds > 1:
            more = train(make(best.items(), 1, options.seeds - 1))
    for name, every in more.items():
        results[name] += every
    rows = {
        name: describe(part, rate, results[series(name, rate)])
        for name, rate in best.items()
    }
    if part.positions:
        runtime.configure_jax()
        for row in rows.values():
            row["by_position"] = by_position(Path(row["workdir"]))
    for name, row in rows.items():
        print(name, row["scores"], row["learning_rate"])
    write(options.out, make_report(options.part, rows, results))


def make_plan(
    part: Part,
    flags: Sequence[str],
    pairs: Iterable[tuple[str, float]],
    first_seed: int = 0,
    seeds: int = 1,
) -> list[runs.Planned]:
    """The runs of models at rates: pairs of a name and a rate."""
    plan = []
    for name, rate in pairs:
        chosen = [f"--train.learning_rate={rate}", f"--seed={first_seed}"]
        args = [f"--task={part.task}", *part.models[name], *flags, *chosen]
        args += [f"--seeds={seeds}"]
        parsed = cli.parse_config(PROG, "See the script.", args, runs.Seeds)
        plan += runs.make_plan(parsed, series(name, rate))
    return plan


def train(plan: Sequence[runs.Planned]) -> dict[str, list[dict[str, Any]]]:
    """The results of a plan, by series."""
    groups = runs.run_all(plan) if plan else {}
    return {
        name: [result.to_dict() for result in group.results]
        for name, group in groups.items()
    }


def series(name: str, rate: float) -> str:
    """The name under which results are stored."""
    return f"{name}; rate {rate:g}"


def best_rates(
    names: Iterable[str], rates: Sequence[float], results: Results
) -> dict[str, float]:
    """The rate with the lowest validation loss of the first seed, by model; none if no
    run finished."""
    best = {}
    for name in names:
        losses = {
            rate: min(loss for _, loss in curve(workdir_of(results[key][0])))
            for rate in rates
            if (key := series(name, rate)) in results
        }
        if losses:
            best[name] = min(losses, key=losses.__getitem__)
    return best


def describe(
    part: Part, rate: float, results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The scores of a model at its best rate, one for each seed."""
    first, scores = results[0], [result[part.score] for result in results]
    return {
        "learning_rate": rate,
        "score": statistics.fmean(scores),
        "scores": scores,
        "parameters": first["parameters"],
        "state_size": first.get("state_size"),
        "workdir": str(workdir_of(first)),
        "curve": curve(workdir_of(first)),
    }


def workdir_of(result: dict[str, Any]) -> Path:
    """The directory of a run."""
    flags = [x.partition("=") for x in shlex.split(result["command"])]
    return Path([value for name, _, value in flags if name == "--workdir"][-1])


def curve(workdir: Path) -> list[tuple[int, float]]:
    """Steps and validation losses of a run."""
    lines = read_metrics(workdir)
    return [(x["step"], x["loss"]) for x in lines if x["split"] == "valid"]


def by_position(workdir: Path) -> dict[str, float]:
    """Bits per token of the test split against the position, up to 8 rows.

    Only for texts of that length, so that every position has the same ones.
    """
    import jax
    import numpy as np
    from flax import nnx
    from optax.losses import softmax_cross_entropy_with_integer_labels

    from lra_jax.data.language.prepare import prepare
    from lra_jax.data.language.rows import NO_TARGET
    from lra_jax.models import load

    saved = load(workdir)
    data = saved.about["config"]["data"]
    length = min(8 * data["max_length"], saved.config.max_length)
    settings = {n: data[n] for n in ("path", "pattern", "tokenizer", "vocab_size")}
    rows = prepare(**settings, max_length=length, slides=False).source("test")
    graph, state = nnx.split(saved.model)

    @jax.jit
    def losses(state: Any, tokens: Any, labels: Any) -> Any:
        logits = nnx.merge(graph, state)(tokens)
        return softmax_cross_entropy_with_integer_labels(logits, labels)

    whole = [x for x in rows if x["segment_ids"].min() == x["segment_ids"].max() == 1]
    whole = [x for x in whole if (x["labels"] != NO_TARGET).all()]
    if not whole:
        return {}
    bits = [losses(state, x["tokens"][None], x["labels"][None])[0] for x in whole]
    mean = np.mean(np.stack(bits), 0) / math.log(2)
    edges = [0, *(64 * 2**i for i in range(length.bit_length()) if 64 * 2**i < length)]
    bins = zip(edges, [*edges[1:], length], strict=True)
    return {f"{a}-{b}": round(float(mean[a:b].mean()), 4) for a, b in bins}


def make_report(part: str, rows: dict[str, Any], results: Results) -> dict[str, Any]:
    """The contents of the JSON; its commits are those of the runs."""
    commits = [run["commit"] for every in results.values() for run in every]
    joined = "; ".join(dict.fromkeys("; ".join(commits).split("; ")))
    return {"part": part, "rows": rows, "runs": results, **origin(), "commit": joined}


if __name__ == "__main__":
    main()
