"""Measures which expressions within ListOps trees a model evaluates, by their height.

    python benchmarks/listops_heights.py --workdir=RUN --out=FILE.json

RUN is a run with ``--pretrain.target=values`` whose last checkpoint is from its first
part, because the head that learns values is not trained afterwards; or one with
``--pretrain.target=notes``, of which the first note at each bracket is scored. The
height of an operator is 1 if all of its arguments are digits, else one more than the
greatest height of its arguments. Its value is read at its opening bracket and at its
closing one.

The accuracies, in percent, come with the share of the most frequent value for each kind
of operator and height, the best that a reader of the operator alone can do, and with
the accuracy at the closing brackets of each kind.
"""

import argparse
import collections
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import origin, write

from lra_jax.data.listops_language import CLOSE, MIN, TOKENS
from lra_jax.data.listops_values import values
from lra_jax.training.restore import load_run

BATCH = 20


class Operator(NamedTuple):
    """An operator of an expression: its kind, brackets and height."""

    kind: int
    start: int
    end: int
    height: int


def operators(tokens: np.ndarray) -> list[Operator]:
    """The operators of one complete expression; padding may follow."""
    found, opened = [], []
    for place, token in enumerate(tokens.tolist()):
        if MIN <= token < CLOSE:
            opened.append((token, place, []))
        elif token == CLOSE:
            kind, start, below = opened.pop()
            height = 1 + max(below, default=0)
            found.append(Operator(kind, start, place, height))
            if opened:
                opened[-1][2].append(height)
    return found


def measured(workdir: str, examples: int) -> dict[str, Any]:
    """Accuracies by height over the first examples of the validation split."""
    run = load_run(workdir, checkpoint="last")
    readings = run.config.model.readings
    if readings == 1 and run.step > run.config.pretrain.steps:
        raise SystemExit(f"error: step {run.step} is beyond --pretrain.steps")
    batch = run.examples(range(examples), "valid")
    tokens, lengths = batch["tokens"], batch["lengths"]

    @jax.jit
    def read(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        reconstructed = run.model.reconstructed
        if readings == 1:
            return reconstructed(tokens, lengths, None).argmax(-1)
        notes = first = jnp.zeros(tokens.shape, jnp.int32)
        for _ in range(readings - 1):
            notes = reconstructed(tokens, lengths, None, notes=notes).argmax(-1)
            first = jnp.where(first == 0, notes, first)
        return first

    parts = range(0, examples, BATCH)
    guesses = [read(tokens[i : i + BATCH], lengths[i : i + BATCH]) for i in parts]
    right = {"opening": [], "closing": []}
    seen = []
    for row, guess in zip(tokens, np.concatenate(guesses), strict=True):
        wanted = values(row)
        for operator in operators(row):
            value = wanted[operator.start]
            seen.append((operator.height, operator.kind, int(value)))
            right["opening"].append(guess[operator.start] == value)
            right["closing"].append(guess[operator.end] == value)
    heights = np.array([height for height, _, _ in seen])
    kinds = np.array([kind for _, kind, _ in seen])
    rows = []
    for height in np.unique(heights).tolist():
        own = heights == height
        counts = collections.Counter(x[1:] for x in seen if x[0] == height)
        best = collections.defaultdict(int)
        for (kind, _), count in counts.items():
            best[kind] = max(best[kind], count)
        accuracies = {
            name: round(100 * float(np.mean(np.array(flags)[own])), 2)
            for name, flags in right.items()
        }
        prior = round(100 * sum(best.values()) / int(own.sum()), 2)
        shown = {"height": height, "operators": int(own.sum()), **accuracies}
        closing = np.array(right["closing"])
        by_kind = {
            TOKENS[kind - 1].removeprefix("["): round(
                100 * float(np.mean(closing[own & (kinds == kind)])), 2
            )
            for kind in sorted(best)
        }
        rows.append({**shown, "operator alone": prior, **by_kind})
    model = {
        "attention": run.config.mixers,
        "num_layers": run.config.model.num_layers,
        "readings": readings,
    }
    return {**model, "step": run.step, "examples": examples, "rows": rows}


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description="Accuracy of operators by height.")
    parser.add_argument("--workdir", required=True, help="the run")
    parser.add_argument("--examples", type=int, default=400, help="validation examples")
    parser.add_argument("--out", help="file to write")
    args = parser.parse_args()
    report = measured(args.workdir, args.examples)
    for row in report["rows"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.out is not None:
        words = [word for word in sys.argv[1:] if not word.startswith("--workdir")]
        sys.argv[1:] = ["--workdir=RUN", *words]
        write(args.out, origin() | report)


if __name__ == "__main__":
    main()
