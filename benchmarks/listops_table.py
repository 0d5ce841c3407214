"""Writes the table of ListOps results into the README.

    python benchmarks/listops_table.py

Rows come from results/listops/*.json, which are `result.json` of finished runs, copied
as they are. A test checks that the README holds what this prints.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START, END = "<!-- results -->", "<!-- end of results -->"
ORDER = ("cosformer", "flow", "linear", "linformer", "softmax")


def table() -> str:
    """The markdown table of all stored runs."""
    files = sorted((ROOT / "results" / "listops").glob("*.json"))
    results = [json.loads(file.read_text()) for file in files]
    results.sort(key=lambda r: (ORDER.index(r["attention"]), r["steps"], r["seed"]))
    lines = [
        "| attention | test accuracy | last checkpoint | steps | steps/s | time |",
        "|---|---|---|---|---|---|",
        *(_row(result) for result in results),
    ]
    devices = sorted({f"{r['device']}, jax {r['versions']['jax']}" for r in results})
    note = (
        f"Preset compact on {'; '.join(devices)}; best checkpoint on validation, 2,000 "
        "test examples (standard error 1.1), evaluations included in the time. Floors: "
        "majority 17.05, root operator alone 36.6. `results/listops/` holds each run's "
        "command, commit and versions."
    )
    return "\n".join([*lines, "", note])


def _row(result: dict[str, Any]) -> str:
    minutes, seconds = divmod(round(result["seconds"]), 60)
    return (
        f"| {result['attention']} | {result['test_accuracy_best']:.2f} % | "
        f"{result['test_accuracy_last']:.2f} % | {result['steps']:,} | "
        f"{result['steps_per_second']:.2f} | {minutes} min {seconds} s |"
    )


def main() -> None:
    """The command line."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(START)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{START}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
