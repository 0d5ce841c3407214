"""Writes the tables of measured results into the pages that show them.

    python benchmarks/results_tables.py

The rows come from results/listops/*.json (README.md), results/small/*.json
(docs/tasks.md), results/learning/*.json and results/parts/*.json (docs/learning.md) and
results/suites/*.json (docs/suites.md), which are the unchanged `result.json` files of
finished runs, and from results/causal.json (docs/performance.md). A test compares the
pages with these tables.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import between

from lra_jax.tasks import get_task, suites

ROOT = Path(__file__).parents[1]
ORDER = ("cosformer", "flow", "hgrn", "linear", "linformer", "softmax")


def full_runs() -> str:
    """The markdown table of runs of ListOps' presets modern-quick and compact.

    Runs whose command changes the preset are left out.
    """
    results = [result for result in _read("listops") if _is_default(result)]
    quick, compact = (
        {r["attention"]: r for r in results if r["preset"] == name}
        for name in ("modern-quick", "compact")
    )
    other = [r for r in _read("listops") if r["seed"] and r["preset"] == "modern-quick"]
    again = {r["attention"]: r for r in other}
    seed = _one({r["seed"] for r in again.values()})
    head = (
        "| attention | ListOps test accuracy | last checkpoint "
        f"| with `--seed={seed}` | parameters | with `compact` |"
    )
    lines = (
        f"| {name} | {_scores(quick[name])} | {_accuracy(again.get(name))} "
        f"| {quick[name]['parameters']:,} | {_accuracy(compact.get(name))} |"
        for name in quick
    )
    steps, few = ({r["steps"] for r in rows.values()} for rows in (quick, compact))
    accuracy = "test_accuracy_best"
    apart = max(abs(quick[name][accuracy] - again[name][accuracy]) for name in again)
    note = (
        "ListOps asks for the value of a nested expression, one of ten digits. A run "
        f"has {_one(steps):,} steps of the default preset, `modern-quick`, or in the "
        f"last column {_one(few):,} steps of `--preset=compact`, the model of the "
        "PyTorch code bases. Measured on "
        f"{_machines([*results, *again.values()])}. Seed 0, except in one column. Test "
        "accuracy is that of the checkpoint with the best validation score, on "
        f"{_one({r['test_examples'] for r in results}):,} examples (standard error "
        f"1.1 points); two seeds of one mechanism are up to {apart:.1f} points apart. "
        "Always predicting the majority class scores 17.05 %; reading only the root "
        "operator, 36.6 %. `results/listops/` has the command, commit and versions of "
        "each run."
    )
    return _table(head, lines, note)


def _table(head: str, rows: Iterable[str], note: str) -> str:
    """A markdown table and a note on it."""
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows, "", note])


def _one(values: set[int]) -> int:
    """The only value of a set: rows that are compared have the same budget."""
    (value,) = values
    return value


def _accuracy(result: dict[str, Any] | None) -> str:
    return "-" if result is None else f"{result['test_accuracy_best']:.2f} %"


def _is_default(result: dict[str, Any]) -> bool:
    """Whether a run used the preset unchanged, except for mechanism and directory."""
    flags = {word.partition("=")[0] for word in result["command"].split()[3:]}
    return flags <= {"--task", "--attention", "--preset", "--workdir"}


def learning_runs() -> str:
    """The markdown table of runs of ListOps' modern presets."""
    results = _read("learning")
    head = (
        "| attention | pretrained on | seed | test accuracy | last checkpoint "
        "| best validation | parameters | steps | steps/s | time |"
    )
    lines = (
        f"| {mixers(result)} | {taught(result) or '-'} | {result['seed']} "
        f"| {_scores(result)} | {result['valid_accuracy_best']:.2f} % "
        f"| {result['parameters']:,} | {_pace(result)} |"
        for result in results
    )
    note = (
        f"Measured on one core of {_machines(results)}, with other work on the second "
        "core; the hybrid used both for its last 3,132 steps. The standard error on "
        "2,000 test examples is at most 1.1 points."
    )
    return _table(head, lines, note)


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
"""What a run of results/parts/ changes in the preset, by flag and value."""


def part_runs() -> str:
    """The markdown table of cosFormer's runs with one part of the block changed."""
    rows = sorted(_read("parts"), key=lambda result: result["test_loss_last"])
    lines = (
        f"| {_changed(result)} | {_short_device(result)} | {_scores(result)} "
        f"| {result['test_loss_last']:.3f} | {result['parameters']:,} |"
        for result in rows
    )
    head = (
        "| cosFormer, ListOps | device | test accuracy | last checkpoint "
        "| loss of the last | parameters |"
    )
    steps, tested = ({r[name] for r in rows} for name in ("steps", "test_examples"))
    note = (
        f"Preset `modern-quick`, {_one(steps):,} steps, with one change; seed 0 where "
        "none is given. Test accuracy is that of the checkpoint with the best "
        f"validation score, on {_one(tested):,} "
        "examples (standard error 1.1 points). The runs on the GPU shared it. "
        "`results/parts/` has the command, commit and versions of each run."
    )
    return _table(head, lines, note)


def _changed(result: dict[str, Any]) -> str:
    """In words, the one setting that a run changes."""
    words = (
        word.removeprefix("--").partition("=") for word in result["command"].split()
    )
    found = [
        CHANGES[name, value] for name, _, value in words if (name, value) in CHANGES
    ]
    (change,) = found or ["the preset"]
    return change


def _short_device(result: dict[str, Any]) -> str:
    """The devices of a run, in turn."""
    names = {"H100": "an H100", "H200": "an H200", "CPU": "2 CPU cores"}
    devices = result["device"].split("; ")
    return ", then ".join(
        name for device in devices for kind, name in names.items() if kind in device
    )


def pathfinder_runs() -> str:
    """The markdown table of runs on Pathfinder."""
    results = _read("pathfinder")
    head = (
        "| attention | level | patches | batch | seed | test accuracy "
        "| last checkpoint | parameters | steps | steps/s | time |"
    )
    lines = (
        f"| {result['attention']} | {flag(result, 'data.level')} "
        f"| {flag(result, 'model.patch') or '-'} "
        f"| {flag(result, 'train.batch_size')} "
        f"| {result['seed']} | {_scores(result)} "
        f"| {result['parameters']:,} | {_pace(result)} |"
        for result in results
    )
    note = (
        f"32 x 32 pixels, measured on one core of {_machines(results)}, with other "
        "work on the second core; "
        f"{_one({r['test_examples'] for r in results}):,} test images (standard error "
        "at most 1.1 points); chance is 50 %. `results/pathfinder/` has the command, "
        "commit and versions of each run."
    )
    return _table(head, lines, note)


def mixers(result: dict[str, Any]) -> str:
    """The mechanism of a run, or those that its blocks take in turn."""
    hybrid = flag(result, "model.hybrid")
    return " / ".join(hybrid.split(",")) or result["attention"]


def taught(result: dict[str, Any]) -> str:
    """What a run was pretrained on; empty for labels alone."""
    return "masked tokens" if flag(result, "pretrain.steps") else ""


def small_runs() -> str:
    """The markdown table of runs shorter than any published protocol."""
    results = _read("small")
    head = "| task | attention | test | last checkpoint | steps | steps/s | time |"
    lines = (
        f"| {result['task']} | {result['attention']} | {_scores(result)} | "
        f"{_pace(result)} |"
        for result in results
    )
    note = (
        f"Measured on {_machines(results)}, one core per run, while the other did "
        "other work. "
        "`results/small/` has the command, commit and versions of each run."
    )
    return _table(head, lines, note)


def suite_runs() -> str:
    """The markdown tables of mechanisms by tests, one for each suite."""
    results = _read("suites")
    tables = []
    for suite, tasks in suites().items():
        names = {task.name for task in tasks}
        found = [result for result in results if result["task"] in names]
        tables += [_suite_table(suite, found)] if found else []
    hours = sum(result["seconds"] for result in results) / 3600
    steps = _one({result["steps"] for result in results})
    note = (
        f"Preset `quick`, {steps} steps, one seed. Percent correct on the test split, "
        "for the checkpoint and learning rate with the best validation accuracy; for "
        "state tracking, scaled so that 0 is chance; for the needle, the mean over "
        "128, 256, 1,024 and 4,096 tokens. Measured on "
        f"{_machines(results)}, alongside other work. State: numbers kept by all "
        "layers; for softmax, at the longest sequence of the test where it keeps most. "
        f"The {len(results)} runs took {hours:.1f} hours in all. "
        "`results/suites/` has the command, commit and versions of each run."
    )
    return "\n".join([*tables, note])


def _suite_table(suite: str, results: Sequence[dict[str, Any]]) -> str:
    """The table of one suite, with the learning rates that were tried."""
    tests = list(dict.fromkeys(result["task"] for result in results))
    best = best_of_tests(results)
    rows = sorted(best.items(), key=lambda row: _mean_score(row[1]), reverse=True)
    lines = (
        f"| {name} | "
        + " | ".join(_suite_score(row.get(test)) for test in tests)
        + f" | {_state(row)} |"
        for name, row in rows
    )
    rates: dict[str, list[str]] = {}
    for test in tests:
        rates.setdefault(_rates(results, test), []).append(f"`{test}`")
    tried = "; ".join(f"{rate} ({', '.join(own)})" for rate, own in rates.items())
    columns = " | ".join(test.removeprefix(f"{suite}-") for test in tests)
    note = f"Suite `{suite}`, learning rates tried: {tried}.\n"
    return _table(f"| mechanism | {columns} | state |", lines, note)


def best_of_tests(
    results: Sequence[dict[str, Any]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each mechanism and test, the result with the best validation accuracy."""
    best: dict[str, dict[str, dict[str, Any]]] = {}
    for result in sorted(results, key=lambda one: one["valid_accuracy_best"]):
        best.setdefault(named(result), {})[result["task"]] = result
    return best


def recall_by_state() -> str:
    """The markdown table of recall against heads, and so against the state's size."""
    results = _read("recall_state")
    heads = sorted({_heads(result) for result in results})
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        rows.setdefault(named(result), {})[_heads(result)] = result
    lines = (
        f"| {name} | "
        + " | ".join(_recalled(row.get(number)) for number in heads)
        + " |"
        for name, row in sorted(
            rows.items(), key=lambda item: -most_pairs(item[1][max(item[1])])
        )
    )
    note = (
        "Percent of correct answers with the most pairs, 16, and in brackets the "
        "numbers that both layers keep; preset quick, rate 0.01, one seed, on "
        f"{_machines(results)}. `results/recall_state/` has the command of each run."
    )
    names = ("1 head" if n == 1 else f"{n} heads" for n in heads)
    return _table(f"| mechanism | {' | '.join(names)} |", lines, note)


def most_pairs(result: dict[str, Any]) -> float:
    """Accuracy in percent of `mqar` with the most pairs; parts are LENGTH/PAIRS."""
    parts = result["test_accuracy_by_length"]
    return parts[max(parts, key=lambda part: int(part.rpartition("/")[2]))]


def _heads(result: dict[str, Any]) -> int:
    """The preset has two."""
    return int(flag(result, "model.num_heads") or 2)


def _recalled(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    return f"{most_pairs(result):.1f} ({result['state_size']:,})"


def bare_recall() -> str:
    """The markdown table of recall with and without the short convolution."""
    without = {one["attention"]: one for one in _read("recall_bare")}
    suite = [one for one in _read("suites") if one["task"] == "mqar"]
    rate = "train.learning_rate"
    same = {named(one): one for one in suite if float(flag(one, rate)) == 0.01}
    lines = (
        f"| {name} | {same[name]['test_accuracy_best']:.1f} | "
        f"{one['test_accuracy_best']:.1f} |"
        for name, one in sorted(
            without.items(), key=lambda item: -item[1]["test_accuracy_best"]
        )
    )
    note = (
        "Percent of correct answers of `mqar`, preset quick, rate 0.01, one seed, on "
        f"{_machines(list(without.values()))}. `results/recall_bare/` has the command "
        "of each run without it."
    )
    return _table("| mechanism | with convolution | without |", lines, note)


def seeds() -> str:
    """The markdown table of how much single runs of selective copying differ."""
    results = _read("suites_seeds")
    runs: dict[str, list[float]] = {}
    for one in results:
        runs.setdefault(named(one), []).append(one["test_accuracy_best"])
    lines = (
        f"| {name} | {', '.join(f'{x:.1f}' for x in found)} | "
        f"{statistics.fmean(found):.1f} | {statistics.stdev(found):.1f} |"
        for name, found in sorted(
            runs.items(), key=lambda item: -statistics.fmean(item[1])
        )
    )
    note = (
        "Percent of correct answers of `mad-selective-copy`, preset quick, on one core "
        f"of {_machines(results)}; the standard deviation is that over the seeds. "
        "`results/suites_seeds/` has the command of each run."
    )
    tried = ", ".join(map(str, sorted({one["seed"] for one in results})))
    return _table(f"| mechanism | seeds {tried} | mean | deviation |", lines, note)


def wide_recall() -> str:
    """The markdown table of MAD's recall with more keys in longer sequences."""
    note = (
        "Percent of correct answers (`--data.vocab_size=64 --data.length=256 "
        "--model.max_length=256`), preset quick, rate 0.005, one seed, on "
        "{machines}. `results/recall_wide/` has the command of each run."
    )
    return _one_test("recall_wide", "recall, 32 keys", note)


def official_memorise() -> str:
    """The markdown table of MAD's memorisation in its published form."""
    note = (
        "Percent of correct answers, preset official, one rate of three (0.001) and "
        "one weight decay of two (0), one seed, on {machines}. `results/official/` has "
        "the command of each run."
    )
    return _one_test("official", "memorise, basic setting", note)


def _one_test(folder: str, name: str, note: str) -> str:
    """A table of mechanisms for the runs of one test, best first."""
    results = sorted(_read(folder), key=lambda one: -one["test_accuracy_best"])
    lines = (
        f"| {named(one)} | {one['test_accuracy_best']:.1f} | "
        f"{one['best_step']:,} of {one['steps']:,} | {one['parameters']:,} |"
        for one in results
    )
    head = f"| mechanism | {name} | best step | parameters |"
    return _table(head, lines, note.format(machines=_machines(results)))


def _suite_score(result: dict[str, Any] | None) -> str:
    return "-" if result is None else f"{score(result):.1f}"


def score(result: dict[str, Any]) -> float:
    """Percent; for state tracking above chance, for the needle over all lengths."""
    if result["task"] in {task.name for task in suites()["state"]}:
        return 100 * result["test_scaled_accuracy"]
    return get_task(result["task"]).accuracy_of(result)


def _mean_score(row: dict[str, dict[str, Any]]) -> tuple[int, float]:
    """Rows with more tests come first, then the higher mean."""
    scores = [score(result) for result in row.values()]
    return len(scores), sum(scores) / len(scores)


def _state(row: dict[str, dict[str, Any]]) -> str:
    sizes = [result["state_size"] for result in row.values() if result["state_size"]]
    return f"{max(sizes):,}" if sizes else "-"


def _rates(results: Sequence[dict[str, Any]], test: str) -> str:
    rates = {
        flag(result, "train.learning_rate")
        for result in results
        if result["task"] == test
    }
    return " and ".join(sorted(rates, key=float))


def named(result: dict[str, Any]) -> str:
    """The mechanism, its options, and what the command changes in its block."""
    options = flag(result, "model.attention_options")
    plain = flag(result, "model.short_conv") == "0"
    parts = (result["attention"], options, "no convolution" if plain else "")
    return ", ".join(filter(None, parts))


def flag(result: dict[str, Any], name: str) -> str:
    """The value of a flag of the command; empty if it was not given."""
    for word in result["command"].split():
        given, _, value = word.partition("=")
        if given.removeprefix("--").replace("-", "_") == name:
            return value
    return ""


def causal_forms() -> str:
    """The markdown tables of `benchmarks/causal.py`, one for each allocator."""
    report = json.loads((ROOT / "results" / "causal.json").read_text())
    lengths = sorted({row["length"] for row in report["times"]})
    forms = {
        name: form["title"] for name, form in report["forms"].items() if "error" in form
    }
    times = {
        (row["allocator"], row["form"], row["length"], row["pass"]): row
        for row in report["times"]
    }

    def cell(allocator: str, form: str, length: int, figure: str) -> str:
        found = [
            times.get((allocator, form, length, name), {}).get(figure)
            for name in ("forward", "forward+backward")
        ]
        return " / ".join("-" if x is None else _rounded(x) for x in found)

    head = "| " + " | ".join(["", *(f"{length:,}" for length in lengths)]) + " |"
    tables = []
    for allocator, title in (
        ("default", "With the default allocator"),
        ("tuned", "With the allocator as `lra_jax.runtime` sets it"),
    ):
        rows = [
            [f"{forms['linear']}, ms"]
            + [cell(allocator, "linear", length, "median_ms") for length in lengths]
        ]
        rows += [
            [name, *(cell(allocator, form, length, "ratio") for length in lengths)]
            for form, name in forms.items()
            if form != "linear"
        ]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        rule = "|---" * (len(lengths) + 1) + "|"
        tables += [f"{title}:", "", head, rule, *lines, ""]
    note = f"`{report['command']}`, {_machines([report])}."
    return "\n".join([*tables, note])


TABLES = {
    ("README.md", "results"): full_runs,
    ("docs/tasks.md", "results"): small_runs,
    ("docs/suites.md", "results"): suite_runs,
    ("docs/suites.md", "recall by state"): recall_by_state,
    ("docs/suites.md", "bare recall"): bare_recall,
    ("docs/suites.md", "seeds"): seeds,
    ("docs/suites.md", "wide recall"): wide_recall,
    ("docs/suites.md", "official memorise"): official_memorise,
    ("docs/learning.md", "results"): learning_runs,
    ("docs/learning.md", "parts"): part_runs,
    ("docs/learning.md", "pathfinder"): pathfinder_runs,
    ("docs/performance.md", "results"): causal_forms,
}
"""The tables, by page and by the name in the markers around each."""


def filled(page: str, name: str) -> str:
    """Returns the text of a page, with one of its tables made from the results."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return between((ROOT / page).read_text(), start, TABLES[page, name](), end)


def _read(folder: str) -> list[dict[str, Any]]:
    files = sorted((ROOT / "results" / folder).glob("*.json"))
    results = [json.loads(file.read_text()) for file in files]
    return sorted(
        results,
        key=lambda r: (r["task"], _place(r["attention"]), r["steps"], r["seed"]),
    )


def _place(attention: str) -> tuple[int, str]:
    """The place of a mechanism in a table; others follow by name."""
    known = attention in ORDER
    return (ORDER.index(attention) if known else len(ORDER), attention)


def _scores(result: dict[str, Any]) -> str:
    best, last = result["test_accuracy_best"], result["test_accuracy_last"]
    return f"{best:.2f} % | {last:.2f} %"


def _pace(result: dict[str, Any]) -> str:
    minutes, seconds = divmod(round(result["seconds"]), 60)
    speed = f"{result['steps_per_second']:.2f}"
    return f"{result['steps']:,} | {speed} | {minutes} min {seconds} s"


def _rounded(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _machines(results: list[dict[str, Any]]) -> str:
    devices = {f"{r['device']}, jax {r['versions']['jax']}" for r in results}
    return ", or ".join(sorted(devices))


def main() -> None:
    """The command line."""
    for page, name in TABLES:
        (ROOT / page).write_text(filled(page, name))


if __name__ == "__main__":
    main()
