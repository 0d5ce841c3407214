"""Fine-tuning in small: which module of Python's library are these lines from?

    python benchmarks/fine_tuning.py --seeds=2 --out=results/language/finetuning.json

Mechanisms of cosFormer's Table 3 and Linformer's Table 2 learn masked bytes of Python's
standard library, and then to name the one of its ten longest modules from which eight
lines are; and the same without the first part. Pretraining sees the lines of the test
split, too, but no labels. The learning rate is the best of ``--rates`` for seed 0 on
the validation split. Runs go to --workdir, and finished ones are not repeated.
"""

import statistics
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import flags, origin, write
from papers_in_small import curve, train, workdir_of

from lra_jax import cli, runs, runtime

PROG = "python benchmarks/fine_tuning.py"
ATTENTIONS = (
    *("softmax", "performer", "reformer", "linear", "longformer", "cosformer"),
    "linformer",
)
MODEL = (
    *("--model.num_layers=2", "--model.embed_dim=64", "--model.num_heads=2"),
    *("--model.mlp_dim=256", "--model.short_conv=4", "--train.warmup=50"),
)
BYTES = ("--train.steps=2000", "--train.eval_every=500", "--train.learning_rate=0.004")
LABELS = ("--train.steps=300", "--train.eval_every=100")
LINES = 8
"""Of an example."""


def write_table(path: Path) -> None:
    """Writes the examples as a table with the columns text and label."""
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(library.glob("*.py"), key=lambda file: -file.stat().st_size)[:10]
    rows = ["text\tlabel"]
    for module in modules:
        lines = [" ".join(line.split()) for line in module.read_text().splitlines()]
        lines = [line for line in lines if line]
        for start in range(0, len(lines) - LINES + 1, LINES):
            rows.append(f"{' '.join(lines[start : start + LINES])}\t{module.stem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def main() -> None:
    """The command line."""
    runtime.tune_allocator()
    parser = flags(__doc__, rates=(0.002, 0.006), seeds=1, workdir="runs/finetuning")
    options = parser.parse_args()
    folder = Path(options.workdir)
    table = folder / "modules.tsv"
    write_table(table)

    def run(jobs: Mapping[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
        plan = []
        for name, job in jobs.items():
            args = [*job, *MODEL, f"--workdir={folder}"]
            parsed = cli.parse_config(PROG, "See the script.", args, runs.Seeds)
            plan += runs.make_plan(parsed, name)
        return train(plan)

    with cli.user_errors():
        pretrained = run(
            {x: ["--task=mlm", f"--attention={x}", *BYTES] for x in ATTENTIONS}
        )
        starts = {
            f"{x}, {start}": [
                *("--task=finetune", f"--attention={x}", f"--data.path={table}"),
                *(*LABELS, *checkpoint),
            ]
            for x in ATTENTIONS
            for start, checkpoint in (
                ("pretrained", [f"--data.checkpoint={workdir_of(pretrained[x][0])}"]),
                ("labels alone", []),
            )
        }
        tried = run(
            {
                f"{name}; {rate:g}": [*job, f"--train.learning_rate={rate}"]
                for name, job in starts.items()
                for rate in options.rates
            }
        )
        best = {
            name: max(
                options.rates,
                key=lambda r: tried[f"{name}; {r:g}"][0]["valid_accuracy_best"],
            )
            for name in starts
        }
        more = [f"--seeds={options.seeds}", "--seed=0"]
        final = run(
            {
                name: [*job, f"--train.learning_rate={best[name]}", *more]
                for name, job in starts.items()
            }
        )
    rows = {name: describe(best[name], results) for name, results in final.items()}
    for name, row in rows.items():
        print(name, row["scores"], row["learning_rate"])
    report = {"rows": rows, "runs": pretrained | final, "lines": LINES}
    write(options.out, report | origin())


def describe(rate: float, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The test accuracies of a model at its rate, in percent, one for each seed."""
    scores = [result["test_accuracy_best"] for result in results]
    return {
        "learning_rate": rate,
        "score": statistics.fmean(scores),
        "scores": scores,
        "test_examples": results[0]["test_examples"],
        "curve": curve(workdir_of(results[0])),
    }


if __name__ == "__main__":
    main()
