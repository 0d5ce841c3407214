"""Trains every registered mechanism briefly, on ListOps with short expressions.

    python benchmarks/short_runs.py --publish

Each mechanism runs in its own process: the trainer's compact preset with expressions of
60 to 250 tokens and few steps. This shows that the one trainer can train all of them,
and how fast; it says nothing about accuracy. Losses are means over the first and the
last tenth of the steps. With 40 steps of 16 examples that is four batches, whose means
scatter by some 0.05.

``--publish`` merges the runs into results/short_runs.json and writes the table in
docs/mechanisms.md, so you can run some mechanisms at a time (``--attention=``).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import between, origin, write

from lra_jax import runtime
from lra_jax.attention import registry

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results" / "short_runs.json"
PAGE = ROOT / "docs" / "mechanisms.md"
MARKS = ("<!-- runs -->", "<!-- end of runs -->")

DATA = {"min_length": 60, "max_length": 250, "max_depth": 6, "buckets": "none"}
DATA |= {"num_train": 4000, "num_valid": 64, "num_test": 64, "processes": 1}


def main() -> None:
    """The command line."""
    runtime.tune_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default=",".join(registry.names()))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--publish", action="store_true", help="see above")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [f"--steps={options.steps}", f"--batch-size={options.batch_size}"]
    if options.one:
        print(json.dumps(train(options.one, options.steps, options.batch_size)))
        return
    rows: dict[str, Any] = {}
    for name in options.attention.split(","):
        registry.resolve(name)
        command = [sys.executable, __file__, f"--one={name}", *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: {name} did not train:\n{done.stderr}")
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, rows[name], flush=True)
        if options.publish:
            publish({name: rows[name]}, options.steps, options.batch_size)


def train(name: str, steps: int, batch_size: int) -> dict[str, Any]:
    """One run: mean losses of its first and last tenth, and its speed."""
    runtime.configure_jax()
    from lra_jax.configs import get_preset
    from lra_jax.training.metrics import read_metrics
    from lra_jax.training.session import Session

    settings = {"steps": steps, "batch_size": batch_size, "warmup": steps // 4}
    settings |= {"eval_every": steps, "log_every": 1, "eval_batch_size": 32}
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        config = get_preset("listops", "compact", name).replace(
            workdir=str(workdir),
            train=settings,
            model={"max_length": DATA["max_length"]},
            data=DATA | {"dir": str(Path(tempfile.gettempdir()) / "short_runs")},
        )
        with Session(config, quiet=True) as session:
            result = session.run()
        lines = [x for x in read_metrics(workdir) if x["split"] == "train"]
    losses = [line["loss"] for line in lines]
    tenth = max(1, len(losses) // 10)
    paces = [line["steps_per_second"] for line in lines[1:]]
    return {
        "first_loss": round(statistics.fmean(losses[:tenth]), 3),
        "last_loss": round(statistics.fmean(losses[-tenth:]), 3),
        "steps_per_second": round(statistics.median(paces or [0.0]), 2),
        "parameters": result["parameters"],
    }


def publish(rows: dict[str, Any], steps: int, batch_size: int) -> None:
    """Merges rows into the results and writes the table.

    Rows of other sizes, and of names that are no longer registered, are dropped.
    """
    report: dict[str, Any] = {"mechanisms": {}}
    if RESULT.exists():
        report = json.loads(RESULT.read_text())
    sizes = {"steps": steps, "batch_size": batch_size, "data": DATA}
    kept = report["mechanisms"] if {n: report.get(n) for n in sizes} == sizes else {}
    merged = kept | rows
    report = sizes | {
        "mechanisms": {n: merged[n] for n in registry.names() if n in merged},
        **origin(),
    }
    write(RESULT, report)
    PAGE.write_text(between(PAGE.read_text(), MARKS[0], table(report), MARKS[1]))


def table(report: dict[str, Any]) -> str:
    """The markdown table of a report."""
    lines = [
        "| attention | first loss | last loss | steps/s | parameters |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['first_loss']:.3f} | {row['last_loss']:.3f} | "
        f"{row['steps_per_second']:.1f} | {row['parameters']:,} |"
        for name, row in report["mechanisms"].items()
    ]
    data = report["data"]
    note = (
        f"{report['steps']} steps of {report['batch_size']} expressions of "
        f"{data['min_length']} to {data['max_length']} tokens, compact preset, "
        f"{report['device']}, jax {report['versions']['jax']}; "
        "first and last tenth of the steps; "
        f"`{report['command']}`, results/short_runs.json."
    )
    return "\n".join([*lines, "", note])


if __name__ == "__main__":
    main()
