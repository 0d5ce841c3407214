"""The papers' models, scaled down: python benchmarks/papers_in_small.py --publish

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
lengths      the same with rows of 256 and 1,024.

``--publish`` writes results/language/PART.json with every run, the picture
docs/language_PART.png and the table in docs/language_models.md. Runs go to --workdir,
and finished ones are not repeated, so the same command resumes. ``--extend`` keeps the
runs that results/language/PART.json has, and trains only further models, rates and
seeds.
Further flags, such as --train.steps=300, are those of training.
"""

import argparse
import functools
import json
import math
import shlex
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import between, origin, write

from lra_jax import cli, runs, runtime
from lra_jax.attention.registry import MECHANISMS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "language_models.md"
RESULTS = ROOT / "results" / "language"
_PROG = "python benchmarks/papers_in_small.py"
_RATE = "; rate "
Runs = Mapping[str, Sequence[dict[str, Any]]]  # Results by series.


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


def _causal() -> dict[str, list[str]]:
    """Those with one pass for a packed row; others need one pass per text in it."""
    return {
        name: [f"--attention={name}"]
        for name, one in MECHANISMS.items()
        if one.causal and one.packed
    }


_MAPS = ("relu", "identity", "leaky_relu", "elu")


def _lengths() -> dict[str, list[str]]:
    """Rows of lengths other than 512, with as many tokens per step."""
    models = {}
    for length in (256, 1024):
        rows = [f"--data.max_length={length}", f"--model.max_length={length}"]
        rows += [f"--train.batch_size={8192 // length}"]
        models[f"softmax, {length:,}"] = ["--attention=softmax", *rows]
        for features in (32, 128):
            given = _options("linformer", f"features={features}")
            models[f"K={features}, {length:,}"] = [*given, *rows]
    return models


_BYTE = ("test_bits_per_byte_best", "bits per byte")
_HIDDEN = ("test_perplexity_best", "perplexity of masked bytes")
PARTS = {
    "mechanisms": Part("lm", _causal(), "softmax", *_BYTE, True),
    "reweighting": Part(
        "mlm",
        {"softmax": ["--attention=softmax"]}
        | {
            f"{name}, {word} cosine": _options(
                "cosformer", f"feature_map={name},reweight={cosine}"
            )
            for name in _MAPS
            for word, cosine in (("with", True), ("without", False))
        },
        "relu, with cosine",
        *_HIDDEN,
        False,
    ),
    "linformer": Part(
        "mlm",
        {"softmax": ["--attention=softmax"]}
        | {
            f"K={features}, {sharing}": _options(
                "linformer", f"features={features},sharing={sharing}"
            )
            for features in (32, 64, 128)
            for sharing in ("headwise", "key_value", "layerwise")
        },
        "softmax",
        *_HIDDEN,
        False,
    ),
    "lengths": Part("mlm", _lengths(), "softmax, 1,024", *_HIDDEN, False),
    "flow": Part(
        "lm",
        {
            "softmax": ["--attention=softmax"],
            "flow": ["--attention=flow"],
            "flow, relu": _options("flow", "feature_map=relu"),
            "flow, no competition": _options("flow", "competition=False"),
            "flow, no allocation": _options("flow", "allocation=False"),
            "flow, clip=1": _options("flow", "clip=1"),
        },
        "flow",
        *_BYTE,
        False,
    ),
}


def main() -> None:
    """The command line."""
    runtime.tune_allocator()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --seed must not be taken for --seeds.
    )
    parser.add_argument("--part", choices=PARTS, default="mechanisms")
    parser.add_argument("--models", help="of the part, separated by semicolons")
    parser.add_argument("--rates", default="0.001,0.002,0.004")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workdir", default="runs/language")
    parser.add_argument("--publish", action="store_true", help="see above")
    parser.add_argument("--extend", action="store_true", help="see above")
    options, flags = parser.parse_known_args()
    with cli.user_errors():
        part = PARTS[options.part]
        names = options.models.split(";") if options.models else list(part.models)
        unknown = [name for name in names if name not in part.models]
        if unknown:
            raise ValueError(
                f"--models: expected some of {'; '.join(part.models)}, "
                f"got {'; '.join(unknown)}"
            )
        if any(flag.partition("=")[0] == "--seed" for flag in flags):
            raise ValueError("--seed: expected --seeds, got --seed")
        rates = [float(rate) for rate in options.rates.split(",")]
        earlier = published(options.part) if options.extend else None
        old, rows = ({}, {}) if earlier is None else (earlier["runs"], earlier["rows"])
        make = functools.partial(planned, part, workdir=options.workdir, flags=flags)
        pairs = [(name, rate) for name in names for rate in rates]
        plan = make([pair for pair in pairs if series(*pair) not in old])
    try:
        found = runs.run_all(plan) if plan else {}
        best = best_rates(names, rates, found, rows)
        more = [
            run
            for pair in best.items()
            for seed in range(len((old | found)[series(*pair)]), options.seeds)
            for run in make([pair], first_seed=seed)
        ]
        again = runs.run_all(more) if more else {}
    except runs.Stopped as stop:
        raise SystemExit(stop.code) from None
    with cli.user_errors():
        found = joined(old, found, again)
    kept = {name for name, rate in best.items() if is_at(rows.get(name), rate)}
    for name, row in described(part, best, found, without=kept).items():
        if part.positions:
            runtime.configure_jax()
            row["by_position"] = by_position(Path(row["workdir"]))
            print(name, row["by_position"])
        rows[name] = row
    for name in kept:
        rows[name] |= scored(part, found[series(name, best[name])])
    report = make_report(options.part, rows, found)
    if earlier is not None:
        for key in ("command", "device"):
            parts = "; ".join((earlier[key], report[key])).split("; ")
            report[key] = "; ".join(dict.fromkeys(parts))
    print(table(report))
    if options.publish:
        publish(report)


def published(name: str) -> dict[str, Any]:
    """The report of a part in results/.

    Raises:
      ValueError: there is none.
    """
    file = RESULTS / f"{name}.json"
    if not file.exists():
        raise ValueError(f"--extend: expected {file}, got no such file")
    return json.loads(file.read_text())


def joined(earlier: Runs, found: Runs, again: Runs) -> dict[str, list[dict[str, Any]]]:
    """All runs: the earlier ones, those of other models and rates, further seeds.

    Raises:
      ValueError: a further rate or seed had other flags or data than the first, or a
        new model had another text.
    """
    every = {name: list(results) for name, results in {**earlier, **found}.items()}
    first = next(iter(every.values()))[0]
    for name, results in found.items():
        _check_same(name, "data", results[0]["data"], first["data"])
        model = f"{name.partition(_RATE)[0]}{_RATE}"
        for one in (x[0] for other, x in earlier.items() if other.startswith(model)):
            _check_alike(name, results[0], one)
    for name, results in again.items():
        for other in results:
            _check_alike(name, other, every[name][0])
            every[name].append(other)
    return every


def _check_alike(name: str, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses runs of a model that differ in more than their seed and rate."""
    for key in ("data_fingerprint", "parameters", "steps"):
        _check_same(name, key, got[key], wanted[key])
    _check_same(name, "flags", _flags(got["command"]), _flags(wanted["command"]))


def _check_same(name: str, key: str, got: Any, wanted: Any) -> None:
    if got != wanted:
        words = f"the {key} of the earlier runs, {wanted}"
        raise ValueError(f"{name}: expected {words}, got {got}")


def _flags(command: str) -> list[str]:
    """The flags of a run, except for those in which seeds and rates differ."""
    own = ("--seed=", "--workdir=", "--train.learning_rate=")
    given = [flag for flag in shlex.split(command) if not flag.startswith(own)]
    return sorted(flag for flag in given if flag.startswith("--"))


def planned(
    part: Part,
    pairs: Sequence[tuple[str, float]],
    workdir: str,
    flags: Sequence[str],
    seeds: int = 1,
    first_seed: int = 0,
) -> list[runs.Planned]:
    """The runs of models at rates: pairs of a name and a rate."""
    plan = []
    for name, rate in pairs:
        given = [f"--task={part.task}", *part.models[name]]
        given += [f"--train.learning_rate={rate}", f"--workdir={workdir}", *flags]
        given += [f"--seed={first_seed}", f"--seeds={seeds}"]
        one = cli.parse_config(_PROG, "See the script.", given, runs.Seeds)
        plan += runs.make_plan(one, series(name, rate))
    return plan


def series(name: str, rate: float) -> str:
    """The name under which results are stored."""
    return f"{name}{_RATE}{rate:g}"


def best_rates(
    names: Sequence[str],
    rates: Sequence[float],
    found: Runs,
    rows: Mapping[str, dict[str, Any]],
) -> dict[str, float]:
    """The rate with the lowest validation loss of the first seed, by model, among the
    runs and the rate of an earlier row; none if no run finished."""
    best = {}
    for name in names:
        results = {rate: found.get(series(name, rate), []) for rate in rates}
        losses = {rate: least(_curve(_place(x[0]))) for rate, x in results.items() if x}
        if name in rows:
            losses[rows[name]["learning_rate"]] = least(rows[name]["curve"])
        if losses:
            best[name] = min(losses, key=losses.__getitem__)
    return best


def is_at(row: dict[str, Any] | None, rate: float) -> bool:
    """Whether an earlier row is that of a rate."""
    return row is not None and row["learning_rate"] == rate


def described(
    part: Part, best: dict[str, float], found: Runs, without: Container[str] = ()
) -> dict[str, dict[str, Any]]:
    """The scores of each model at its best rate."""
    rows = {}
    for name, rate in best.items():
        if name in without:
            continue
        own = found[series(name, rate)]
        workdir = _place(own[0])
        rows[name] = {
            "learning_rate": rate,
            **scored(part, own),
            "parameters": own[0]["parameters"],
            "state_size": own[0].get("state_size"),
            "workdir": str(workdir),
            "curve": _curve(workdir),
        }
    return rows


def scored(part: Part, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The score of each seed, and their mean."""
    scores = [result[part.score] for result in results]
    return {"score": statistics.fmean(scores), "scores": scores}


def _place(result: dict[str, Any]) -> Path:
    """The directory of a run."""
    return Path(_flag(result["command"], "--workdir"))


def _flag(command: str, name: str) -> str:
    given = [x for x in shlex.split(command) if x.startswith(f"{name}=")]
    return given[-1].partition("=")[2]


def least(curve: Iterable[Sequence[float]]) -> float:
    """The lowest loss of a curve."""
    return min(loss for _, loss in curve)


def _curve(workdir: Path) -> list[tuple[int, float]]:
    """Steps and validation losses of a run."""
    from lra_jax.training.metrics import read_metrics

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
    found = [losses(state, x["tokens"][None], x["labels"][None])[0] for x in whole]
    mean = np.mean(np.stack(found), 0) / math.log(2)
    edges = [0, *(64 * 2**i for i in range(length.bit_length()) if 64 * 2**i < length)]
    bins = zip(edges, [*edges[1:], length], strict=True)
    return {f"{a}-{b}": round(float(mean[a:b].mean()), 4) for a, b in bins}


def make_report(
    part: str, rows: dict[str, Any], found: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The contents of the JSON; its commits are those of the runs."""
    named = [run["commit"] for runs in found.values() for run in runs]
    commits = dict.fromkeys("; ".join(named).split("; "))
    report = {"part": part, "rows": rows, "runs": found, **origin()}
    return report | {"commit": "; ".join(commits)}


def table(report: dict[str, Any]) -> str:
    """The markdown table of a report, best first."""
    part, rows = PARTS[report["part"]], report["rows"]
    base = rows.get(part.baseline, {}).get("score")
    lines = [
        f"| model | {part.unit} | ratio to {part.baseline} | learning rate | state |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["score"]):
        over = "-" if base is None else f"{row['score'] / base:.3f}"
        state = "-" if row["state_size"] is None else f"{row['state_size']:,}"
        lines.append(
            f"| {name} | {_score(row['scores'])} | {over} | {row['learning_rate']:g} | "
            f"{state} |"
        )
    first = next(iter(report["runs"].values()))[0]
    seeds = {len(row["scores"]) for row in rows.values()}
    note = (
        f"Test split of the {first['data']} (fingerprint {first['data_fingerprint']}), "
        f"{first['steps']} steps, {_seeds(seeds)}, on "
        f"{report['device'].replace('; ', ' or ')}. "
        f"`results/language/{report['part']}.json` has the commands."
    )
    return "\n".join([*lines, "", note])


def _score(scores: Sequence[float]) -> str:
    """The mean, and half the range if there are several."""
    mean = f"{statistics.fmean(scores):.3f}"
    if len(scores) == 1:
        return mean
    return f"{mean} ± {(max(scores) - min(scores)) / 2:.3f}"


def _seeds(numbers: set[int]) -> str:
    if max(numbers) == 1:
        return "one seed"
    words = f"mean and half the range of {max(numbers)} seeds"
    return words if len(numbers) == 1 else f"{words}, or fewer where no range is given"


def draw(report: dict[str, Any]) -> Any:
    """Validation curves, and the loss against the position where it was measured."""
    from lra_jax.reports import charts

    part, rows = PARTS[report["part"]], report["rows"]
    figure, axes = charts.figure(1, 1 + part.positions, size=(6.0, 4.2))
    curves = [
        charts.Line(name, [x for x, _ in row["curve"]], [y for _, y in row["curve"]])
        for name, row in rows.items()
    ]
    labels = {"xlabel": "steps", "ylabel": "validation loss, nats"}
    charts.draw(axes[0, 0], curves, **labels)
    if part.positions:
        lines = [
            charts.Line(
                name,
                [int(x.partition("-")[2]) for x in row["by_position"]],
                list(row["by_position"].values()),
            )
            for name, row in rows.items()
        ]
        labels = {"xlabel": "positions up to", "ylabel": "bits per token"}
        charts.draw(axes[0, 1], lines, **labels)
        charts.log_lengths(axes[0, 1], [int(x) for line in lines for x in line.x])
    charts.legend(figure, axes)
    return figure


def publish(report: dict[str, Any]) -> None:
    """Writes the JSON, the picture, and the table between the part's markers."""
    from lra_jax.reports import charts

    part = report["part"]
    RESULTS.mkdir(exist_ok=True)
    write(RESULTS / f"{part}.json", report)
    with charts.style():
        picture = charts.to_png(draw(report))
    (PAGE.parent / f"language_{part}.png").write_bytes(picture)
    marks = f"<!-- {part} -->", f"<!-- end of {part} -->"
    PAGE.write_text(between(PAGE.read_text(), marks[0], table(report), marks[1]))


if __name__ == "__main__":
    main()
