"""Writes the tables of measured results into the pages that show them.

    python benchmarks/results_tables.py

The rows are unchanged `result.json` files of finished runs, in folders of results/, and
the measurements of other scripts. A test compares the pages with these tables.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from common import ROOT, read
from markupsafe import Markup
from papers_in_small import PARTS

from lra_jax.attention import __main__ as mechanisms
from lra_jax.reports.table import Table
from lra_jax.tasks import get_task, suites

ORDER = ("cosformer", "flow", "hgrn", "linear", "linformer", "softmax")
"""The first mechanisms of a table; others follow by name."""

Result = dict[str, Any]
Column = Callable[[Any], Any]


def read_all(folder: str) -> list[Result]:
    """The results in a folder of results/."""
    files = (ROOT / "results" / folder).glob("*.json")
    results = [read(f"{folder}/{file.name}") for file in sorted(files)]

    def place(result: Result) -> tuple[Any, ...]:
        name = result["attention"]
        first = ORDER.index(name) if name in ORDER else len(ORDER)
        return result["task"], first, name, result["steps"], result["seed"]

    return sorted(results, key=place)


def table(columns: Mapping[str, Column], rows: Iterable[Any], note: str) -> str:
    """A Markdown table and a note; a column is its head and the text of a row."""
    cells = [[Markup(text(row)) for text in columns.values()] for row in rows]
    heads = [Markup(head) for head in columns]
    return f"{Table(heads, cells).markdown()}\n\n{note}"


def flag(result: Result, name: str) -> str:
    """The value of a flag of a result's command; empty if it has none."""
    for word in result["command"].split():
        key, _, value = word.partition("=")
        if key.removeprefix("--").replace("-", "_") == name:
            return value
    return ""


def title(result: Result) -> str:
    """The mechanism, its options, and what the command changes in its block."""
    options = flag(result, "model.attention_options")
    plain = flag(result, "model.short_conv") == "0"
    cloned = flag(result, "data.returns") == "False"
    parts = [result["attention"], options]
    parts += ["no convolution"] * plain + ["behaviour cloning"] * cloned
    return ", ".join(filter(None, parts))


def mixers(result: Result) -> str:
    """The mechanism of a run, or those that its blocks take in turn."""
    hybrid = flag(result, "model.hybrid")
    return " / ".join(hybrid.split(",")) or result["attention"]


def pretraining(result: Result) -> str:
    """The text that a run was pretrained on; empty for labels only."""
    return "masked tokens" if flag(result, "pretrain.steps") else ""


def full_runs() -> str:
    """Runs of ListOps' presets modern-quick and compact, with no other flags."""
    every = read_all("listops")
    unchanged = [result for result in _unchanged(every) if not result["seed"]]
    quick, compact = (
        {r["attention"]: r for r in unchanged if r["preset"] == name}
        for name in ("modern-quick", "compact")
    )
    second = [r for r in every if r["seed"] and r["preset"] == "modern-quick"]
    again = {r["attention"]: r for r in second}
    apart = max(abs(_best(quick[name]) - _best(again[name])) for name in again)
    columns = {
        "attention": lambda name: name,
        "ListOps test accuracy": lambda name: _percent(quick[name]),
        "last checkpoint": lambda name: _percent(quick[name], "last"),
        f"with `--seed={_one(second, 'seed')}`": lambda n: _percent(again.get(n)),
        "parameters": lambda name: f"{quick[name]['parameters']:,}",
        "with `compact`": lambda name: _percent(compact.get(name)),
    }
    note = (
        "ListOps asks for the value of a nested expression, one of ten digits. A run "
        f"has {_one(quick.values(), 'steps'):,} steps of the default preset, "
        "`modern-quick`, or in the last column "
        f"{_one(compact.values(), 'steps'):,} steps of `--preset=compact`, the model "
        f"of the PyTorch code bases. Measured on {_machines([*unchanged, *second])}. "
        "Seed 0, except in one column. Test accuracy is that of the checkpoint with "
        "the best validation score, on "
        f"{_one(unchanged, 'test_examples'):,} examples (standard error "
        f"1.1 points); two seeds of one mechanism are up to {apart:.1f} points apart. "
        "Always predicting the majority class scores 17.05 %; reading only the root "
        "operator, 36.6 %. `results/listops/` has the command, commit and versions of "
        "each run."
    )
    return table(columns, quick, note)


def kinds() -> str:
    """One attention on five kinds of data."""
    listops = [r for r in read_all("listops") if r["preset"] == "modern-quick"]
    texts = read("language/mechanisms.json")["rows"]
    runs = {x: _unchanged(read_all(x)) for x in ("series", "images", "control")}

    def of_seeds(results: list[Result]) -> Column:
        def cell(name: str) -> str:
            scores = [_best(r) for r in results if r["attention"] == name]
            return _mean(scores) if scores else "-"

        return cell

    columns = {
        "attention": lambda name: name,
        "ListOps, %": of_seeds(listops),
        "language, bits per byte": lambda name: _mean(texts[name]["scores"], 2),
        "JapaneseVowels, %": of_seeds(runs["series"]),
        "images, %": of_seeds(runs["images"]),
        "control, % of the expert's return": of_seeds(runs["control"]),
    }
    note = (
        "Mean and sample standard deviation over seeds (two for ListOps and language, "
        "three for the others), each checkpoint chosen on a validation split, default "
        "presets. ListOps: the answer is one of ten digits; language: small models of "
        "Python source, byte by byte, lower is better; images: scikit-learn's digits; "
        "control: a pendulum. `results/` has the command, commit, versions and device "
        "of each run, in the folders listops, language, series, images and control."
    )
    return table(columns, ("softmax", "linear", "cosformer", "flow"), note)


def ablations() -> str:
    """Flow without each of its parts, on three kinds of data."""
    rows = ("flow", "flow, competition=false", "flow, allocation=false")

    def of_variant(results: list[Result]) -> Column:
        def row_of(result: Result) -> str:
            options = [row for row in rows[1:] if row[6:] in result["command"].lower()]
            return options[0] if options else result["attention"]

        return lambda name: _mean([_best(r) for r in results if row_of(r) == name])

    columns: dict[str, Column] = {
        "attention": lambda name: name,
        "JapaneseVowels, %": of_variant(read_all("series")),
        "images, %": of_variant(read_all("images")),
        "control, % of the expert's return": of_variant(read_all("control")),
    }
    note = (
        "Mean and sample standard deviation of three seeds; the runs are in the "
        "folders series, images and control of `results/`."
    )
    return table(columns, rows, note)


def _unchanged(results: list[Result]) -> list[Result]:
    """The runs whose command changes neither model, training nor data."""
    known = {"--task", "--attention", "--preset", "--seed", "--workdir"}
    return [
        result
        for result in results
        if {x.partition("=")[0] for x in result["command"].split()[3:]} <= known
    ]


_SCORES: dict[str, Column] = {
    "test accuracy": lambda result: _percent(result),
    "last checkpoint": lambda result: _percent(result, "last"),
}
_PACE: dict[str, Column] = {
    "steps": lambda result: f"{result['steps']:,}",
    "steps/s": lambda result: f"{result['steps_per_second']:.2f}",
    "time": lambda result: "{} min {} s".format(*divmod(round(result["seconds"]), 60)),
}


def learning_runs() -> str:
    """Longer runs on ListOps."""
    results = read_all("learning")
    columns = {
        "attention": mixers,
        "pretrained on": lambda result: pretraining(result) or "-",
        **_SCORES,
        **_PACE,
    }
    note = (
        f"Seed 0, measured on one core of {_machines(results)}, with other work on the "
        "second core; the hybrid used both for its last 3,132 steps. The standard "
        "error on 2,000 test examples is at most 1.1 points."
    )
    return table(columns, results, note)


CHANGES = {
    ("model.short_conv", "0"): "without the short convolution",
    ("model.local_values", "False"): "without the values added to the output",
    ("model.gate", "False"): "without the gate and the norm of each head",
    ("model.pooling", "mean"): "mean pooling",
    ("model.mlp", "dense"): "without the gated MLP",
    ("data.permute", "False"): "arguments in their own order",
    ("train.curriculum", ""): "all lengths from the start",
    ("seed", "1"): "the preset, seed 1",
    ("seed", "2"): "the preset, seed 2",
}
"""In words, the one setting that a run of results/parts/ changes."""


def part_runs() -> str:
    """cosFormer's runs with one part of the block changed."""
    results = sorted(read_all("parts"), key=lambda result: result["test_loss_last"])

    def change(result: Result) -> str:
        words = (x.removeprefix("--").partition("=") for x in result["command"].split())
        changes = [CHANGES.get((name, value)) for name, _, value in words]
        device = result["device"]
        place = ("in part " if "H100" in device else "") + "on 2 CPU cores"
        text = next(filter(None, changes), "the preset")
        return f"{text}, {place}" if "CPU" in device else text

    columns = {
        "cosFormer, ListOps": change,
        **_SCORES,
        "loss of the last": lambda result: f"{result['test_loss_last']:.3f}",
    }
    note = (
        f"Preset `modern-quick`, {_one(results, 'steps'):,} steps, with one change; "
        "seed 0 where none is given. Test accuracy is that of the checkpoint with the "
        f"best validation score, on {_one(results, 'test_examples'):,} "
        "examples (standard error 1.1 points), on an H100 where no CPU is named. "
        "`results/parts/` has the command, commit and versions of each run."
    )
    return table(columns, results, note)


def pathfinder_runs() -> str:
    """Runs on Pathfinder."""
    results = read_all("pathfinder")
    columns = {
        "attention": lambda result: result["attention"],
        "level": lambda result: flag(result, "data.level"),
        "patches": lambda result: flag(result, "model.patch") or "-",
        "batch": lambda result: flag(result, "train.batch_size"),
        "seed": lambda result: result["seed"],
        "test accuracy": _percent,
        **_PACE,
    }
    note = (
        f"32 x 32 pixels, measured on one core of {_machines(results)}, with other "
        f"work on the second core; {_one(results, 'test_examples'):,} test images "
        "(standard error at most 1.1 points); chance is 50 %. `results/pathfinder/` "
        "has the command, commit and versions of each run."
    )
    return table(columns, results, note)


def best_of_tests(results: Sequence[Result]) -> dict[str, dict[str, Result]]:
    """For each mechanism and test, the result with the best validation accuracy."""
    best: dict[str, dict[str, Result]] = {}
    for result in sorted(results, key=lambda one: one["valid_accuracy_best"]):
        best.setdefault(title(result), {})[result["task"]] = result
    return best


def score(result: Result) -> float:
    """Percent; for state tracking above chance, for the needle over all lengths."""
    if result["task"] in {task.name for task in suites()["state"]}:
        return 100 * result["test_scaled_accuracy"]
    return get_task(result["task"]).accuracy_of(result)


SEPARATING = ("mqar", "needle", "mad-noisy-recall", "mad-selective-copy", "parity")
"""The tests on which mechanisms differ most after 600 steps."""


def suite_runs() -> str:
    """Mechanisms by tests, the best mean over the tests first."""
    results = read_all("suites")
    rates: dict[str, list[str]] = {}
    for test in SEPARATING:
        members = [result for result in results if result["task"] == test]
        tried = sorted({flag(x, "train.learning_rate") for x in members}, key=float)
        rates.setdefault(" and ".join(tried), []).append(f"`{test}`")

    def scores(row: tuple[str, dict[str, Result]]) -> tuple[int, float]:
        scores = [score(row[1][test]) for test in SEPARATING if test in row[1]]
        return len(scores), statistics.fmean(scores)

    def of_test(test: str) -> Column:
        return lambda row: f"{score(row[1][test]):.1f}" if test in row[1] else "-"

    def state(row: tuple[str, dict[str, Result]]) -> str:
        sizes = [x["state_size"] for x in row[1].values() if x["state_size"]]
        return f"{max(sizes):,}" if sizes else "-"

    columns: dict[str, Column] = {
        "mechanism": lambda row: row[0],
        **{test.removeprefix("mad-"): of_test(test) for test in SEPARATING},
        "state": state,
    }
    rows = sorted(best_of_tests(results).items(), key=scores, reverse=True)
    hours = sum(result["seconds"] for result in results) / 3600
    tried = "; ".join(f"{rate} ({', '.join(names)})" for rate, names in rates.items())
    note = (
        f"Preset `quick`, {_one(results, 'steps')} steps, one seed; learning rates "
        f"tried: {tried}. Percent correct on the test split; for parity, scaled; for "
        "the needle, the mean over 128, 256, 1,024 and 4,096 tokens. "
        f"Measured on {_machines(results)}. State: numbers kept by all layers. The "
        f"{len(results)} runs took {hours:.1f} hours; `results/suites/` has the "
        "command of each."
    )
    return table(columns, rows, note)


def seed_runs(task: str, about: str) -> str:
    """Runs of several seeds in the folder of a task, the best mean first."""
    groups: dict[str, list[Result]] = {}
    for result in read_all(task):
        groups.setdefault(title(result), []).append(result)

    def scores(checkpoint: str) -> Column:
        name = f"test_accuracy_{checkpoint}"
        return lambda row: _mean([result[name] for result in row[1]])

    every = [result for results in groups.values() for result in results]
    metric = every[0].get("metric", "accuracy")
    columns: dict[str, Column] = {
        "attention": lambda row: row[0],
        f"test {metric}, %": scores("best"),
        "last checkpoint": scores("last"),
        "parameters": lambda row: f"{_one(row[1], 'parameters'):,}",
    }
    (seeds,) = {len(results) for results in groups.values()}
    rows = sorted(groups.items(), key=lambda row: -statistics.fmean(map(_best, row[1])))
    note = (
        f"{about}, preset `{_one(every, 'preset')}`, {_one(every, 'steps'):,} steps, "
        f"mean and sample standard deviation of {seeds} seeds; the test score is that "
        "of the checkpoint with the best validation score. Measured on "
        f"{_machines(every)}; `results/{task}/` has the command, commit and versions "
        "of each run."
    )
    return table(columns, rows, note)


def official_series() -> str:
    """Flowformer's protocol on JapaneseVowels, beside the published accuracies."""
    every = read_all("series_official")
    published = {row.official: row.accuracy for row in get_task("series").published}

    def scores(validation: str, checkpoint: str) -> Column:
        return lambda name: _mean(
            [
                result[f"test_accuracy_{checkpoint}"]
                for result in every
                if (result["attention"], result["validation"]) == (name, validation)
            ]
        )

    columns: dict[str, Column] = {
        "attention": lambda name: name,
        "best epoch on the test split, %": scores("test", "best"),
        "epoch chosen on a held-out fifth": scores("holdout", "best"),
        "last epoch": scores("holdout", "last"),
        "published": lambda name: published.get(name, "-"),
    }
    seeds = len({result["seed"] for result in every})
    note = (
        f"Test accuracy, mean and sample standard deviation of {seeds} seeds, "
        f"{_one(every, 'steps'):,} steps; the last epoch is that of the runs that hold "
        "out a fifth. Measured on one or two CPU cores (AMD EPYC), with other work on "
        "them; `results/series_official/` has the command, commit and versions of each "
        "run."
    )
    names = ("softmax", "linear", "cosformer", "flow", "performer", "hgrn")
    return table(columns, names, note)


def by_pairs(result: Result) -> dict[int, float]:
    """Accuracy of `mqar` in percent by the number of pairs to recall."""
    parts = result["test_accuracy_by_length"]
    return {int(name.rpartition("/")[2]): value for name, value in parts.items()}


def most_pairs(result: Result) -> float:
    """Accuracy of `mqar` in percent with the most pairs."""
    parts = by_pairs(result)
    return parts[max(parts)]


LAYERS = range(0, 13, 3)
"""Of the curves in the table of rank collapse; the picture has all."""


def collapse() -> str:
    """Residuals at initialisation of networks with skip connections."""
    data = read("analysis/rank-collapse/rank-collapse.json")["data"]
    rows = [
        (network, variant, curves[variant], data["published"][network][variant])
        for network, curves in data["ours"].items()
        for variant in ("attention + skip", "transformer")
    ]

    def numbers(values: Sequence[float]) -> str:
        return " ".join(f"{values[layer]:.2f}".lstrip("0") for layer in LAYERS)

    columns: dict[str, Column] = {
        "network": lambda row: f"{row[0]}, {row[1].removeprefix('attention ')}",
        "ours": lambda row: numbers(row[2]["mean"]),
        "deviation": lambda row: f"{max(row[2]['std']):.2f}",
        "printed": lambda row: numbers(row[3]),
    }
    layers = ", ".join(map(str, LAYERS))
    return table(columns, rows, f"Layers {layers}; largest standard deviation.")


def masks() -> str:
    """Collapse by mechanism: with norms by depth, and by width."""
    depth = read("analysis/masks/masks.json")
    curves = depth["data"]["with norms"]
    width = read("analysis/masks/widths.json")["data"]

    def pair(digits: int, *values: float | None) -> str:
        parts = ["-" if x is None else f"{x:.{digits}f}".lstrip("0") for x in values]
        return "/".join(parts)

    def at(rows: Mapping[str, Sequence[float]], name: str, place: int) -> float | None:
        return rows[name][place] if name in rows else None

    columns: dict[str, Column] = {
        "mechanism": lambda name: name,
        "residual, full/causal": lambda name: pair(
            2, *(at(curves, f"{name}, {mask}", 4) for mask in ("full", "causal"))
        ),
        "gap, 32/512 tokens": lambda name: pair(
            2, *(at(width["gap"], f"{name}, full", place) for place in (0, -1))
        ),
        "sink, full/causal": lambda name: pair(
            3,
            *(at(width["sink"], f"{name}, {mask}", -1) for mask in ("full", "causal")),
        ),
    }
    names = [name.removesuffix(", full") for name in curves if name.endswith("full")]
    order = sorted(names, key=lambda name: curves[f"{name}, full"][4])
    return table(columns, order, f"`{depth['command']}`")


def causal_forms() -> str:
    """The measurements of `causal.py` with the C library's own allocator."""
    report = read("causal.json")
    rows = [row for row in report["times"] if row["allocator"] == "default"]
    times = {(row["form"], row["length"], row["pass"]): row for row in rows}
    forms = {
        name: form["title"] for name, form in report["forms"].items() if "error" in form
    }

    def of_length(length: int) -> Column:
        def cell(form: str) -> str:
            figure = "median_ms" if form == "linear" else "ratio"
            figures = [
                times.get((form, length, name), {}).get(figure)
                for name in ("forward", "forward+backward")
            ]
            return " / ".join("-" if x is None else _round(x) for x in figures)

        return cell

    columns: dict[str, Column] = {
        "": lambda form: forms[form] + (", ms" if form == "linear" else ""),
        **{f"{n:,}": of_length(n) for n in (4_096, 65_536)},
    }
    return table(columns, forms, f"`{report['command']}`, {_machines([report])}.")


def costs() -> str:
    """The measurements of `cost_exponent.py`."""
    report = read("cost_exponent.json")
    rows = sorted(report["mechanisms"].items(), key=lambda x: x[1]["time_exponent"])
    last = report["lengths"][-1]
    columns: dict[str, Column] = {
        "attention": lambda row: row[0],
        "time": lambda row: f"{row[1]['time_exponent']:.2f}",
        f"ms at {last:,}": lambda row: f"{row[1]['fastest_ms'][-1]:,.1f}",
        f"MB at {last:,}": lambda row: f"{row[1]['temporary_mb'][-1]:,.0f}",
    }
    elsewhere = [f"{name} on {row['device']}" for name, row in rows if "device" in row]
    note = (
        f"Batch 1, {report['heads']} x {report['head_dim']} wide, float32, forward "
        f"and backward, {', '.join([report['device'], *elsewhere])}, jax "
        f"{report['versions']['jax']}; `{report['command']}`, "
        "results/cost_exponent.json."
    )
    return table(columns, rows, note)


def language(name: str) -> str:
    """A part of `papers_in_small.py`, best first."""
    report = read(f"language/{name}.json")
    part, rows = PARTS[name], report["rows"]

    def scores(model: str) -> str:
        values = rows[model]["scores"]
        mean, reach = statistics.fmean(values), (max(values) - min(values)) / 2
        return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {reach:.3f}"

    columns: dict[str, Column] = {
        "model": lambda model: model,
        part.unit: scores,
    }
    if all(row["state_size"] for row in rows.values()):
        columns["state"] = lambda model: f"{rows[model]['state_size']:,}"
    first = next(iter(report["runs"].values()))[0]
    numbers = sorted({len(row["scores"]) for row in rows.values()})
    seeds = f"mean and half the range of {numbers[-1]} seeds"
    if len(numbers) > 1:
        seeds += ", or fewer where no range is shown"
    note = (
        f"{first['steps']} steps, {seeds}; `results/language/{name}.json` has the "
        "commands, learning rates, data and devices."
    )
    return table(columns, sorted(rows, key=lambda m: rows[m]["score"]), note)


def acting() -> str:
    """How fast a decision transformer acts."""
    report = read("acting.json")
    columns: dict[str, Column] = {
        "attention": lambda row: row[0],
        "stream, ms": lambda row: f"{row[1]['stream_ms']:.2f}",
        "its first and last 100 steps": lambda row: (
            f"{row[1]['stream_first_ms']:.2f}, {row[1]['stream_last_ms']:.2f}"
        ),
        "context, ms": lambda row: f"{row[1]['context_ms']:.2f}",
        "context / stream": lambda row: f"{row[1]['speed_up']:.1f}",
    }
    note = (
        "Milliseconds of a step of 10 episodes at once, preset official (3 blocks, 256 "
        f"wide), episodes of {report['steps']:,} steps, a context of "
        f"{report['context']}; the softmax stream looks at a table of 3,000 keys. "
        f"{_machines([report])}, with other work on both; `results/acting.json`."
    )
    return table(columns, report["mechanisms"].items(), note)


def fine_tuning() -> str:
    """The measurements of `fine_tuning.py`, in its order."""
    report = read("language/finetuning.json")
    rows = report["rows"]

    def scores(start: str) -> Column:
        return lambda name: _mean(rows[f"{name}, {start}"]["scores"])

    columns: dict[str, Column] = {
        "attention": lambda name: name,
        "pretrained, %": scores("pretrained"),
        "labels only, %": scores("labels alone"),
    }
    first = next(iter(rows.values()))
    note = (
        f"Test accuracy on {first['test_examples']} examples (standard error at most "
        "2.7 points): mean and sample standard deviation of "
        f"{len(first['scores'])} seeds of fine-tuning, from one model pretrained by "
        "2,000 steps of masked bytes; 300 steps of labels, at the rate that validation "
        "prefers; 19 % of the examples are from one module. "
        f"{report['device']}, with other work on both; `{report['command']}`, "
        "`results/language/finetuning.json`."
    )
    return table(columns, dict.fromkeys(x.partition(",")[0] for x in rows), note)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "kinds"): kinds,
    ("docs/which.md", "kinds"): kinds,
    ("docs/which.md", "ablations"): ablations,
    ("docs/which.md", "results"): full_runs,
    ("docs/weights.md", "finetuning"): fine_tuning,
    ("docs/suites.md", "results"): suite_runs,
    ("docs/images.md", "results"): functools.partial(
        seed_runs,
        "images",
        "scikit-learn's digits, 359 test images (standard error about 1.1 points)",
    ),
    ("docs/series.md", "results"): functools.partial(
        seed_runs,
        "series",
        "JapaneseVowels, 370 test series (standard error about 0.8 points)",
    ),
    ("docs/series.md", "official"): official_series,
    ("docs/learning.md", "results"): learning_runs,
    ("docs/learning.md", "parts"): part_runs,
    ("docs/learning.md", "pathfinder"): pathfinder_runs,
    ("docs/analysis.md", "collapse"): collapse,
    ("docs/analysis.md", "masks"): masks,
    ("docs/performance.md", "results"): causal_forms,
    ("docs/control.md", "returns"): functools.partial(
        seed_runs,
        "control",
        "Pendulum, medium-expert, 100 test episodes a seed, in percent of the way from "
        "a random policy to the expert",
    ),
    ("docs/control.md", "acting"): acting,
    ("docs/mechanisms.md", "mechanisms"): mechanisms.markdown,
    ("docs/mechanisms.md", "costs"): costs,
    **{
        ("docs/language_models.md", name): functools.partial(language, name)
        for name in PARTS
    },
}
"""The tables, by page and by the name in the markers around each."""


def fill(page: str, name: str) -> str:
    """Returns the text of a page, with one of its tables made from the results."""
    start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = (ROOT / page).read_text().partition(start)
    if end not in f"\n{rest}":
        raise ValueError(f"{page}: expected {start.strip()} and{end}")
    _, _, after = f"\n{rest}".partition(end)
    return f"{before}{start}{TABLES[page, name]()}{end}{after}"


def _one(rows: Iterable[Result], key: str) -> int:
    """The only value of a key: rows that are compared have the same budget."""
    (value,) = {row[key] for row in rows}
    return value


def _best(result: Result) -> float:
    return result["test_accuracy_best"]


def _mean(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample standard deviation."""
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def _percent(result: Result | None, checkpoint: str = "best") -> str:
    return "-" if result is None else f"{result[f'test_accuracy_{checkpoint}']:.2f} %"


def _round(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _machines(results: Iterable[Result]) -> str:
    devices = {f"{r['device']}, jax {r['versions']['jax']}" for r in results}
    return ", or ".join(sorted(devices))


def main() -> None:
    """The command line."""
    for page, name in TABLES:
        (ROOT / page).write_text(fill(page, name))


if __name__ == "__main__":
    main()
