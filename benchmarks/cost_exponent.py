"""Measures how time and memory of the mechanisms grow from 2K to 16K positions.

    python benchmarks/cost_exponent.py --publish

Output of one attention call and its gradients with respect to query, key, value, gates
and parameters of its own, with a padding mask as in training. An exponent is the slope
of the logarithm of the fastest time (or of the temporary memory that the compiler
reports) over the logarithm of the length: 1 is linear, 2 quadratic. The lengths of a
mechanism are interleaved, so a slow spell of the machine affects them all.

Mechanisms with gates get random ones, so the compiler cannot remove any.

``--publish`` writes results/cost_exponent.json, which `results_tables.py` shows, and
lra_jax/attention/exponents.json, which ``python -m lra_jax.attention`` reads. Earlier
rows of the same sizes are kept, so you can measure some mechanisms at a time
(``--attention=``). A CPU's kernels, which ``"auto"`` takes from 4,096 positions of all
heads on, are used at every length if there are two heads; the gated units then need
more than 16 GB.
"""

from typing import Any

import numpy as np
from common import ROOT, flags, origin, read, write

from lra_jax import runtime
from lra_jax.attention import registry

RESULT = ROOT / "results" / "cost_exponent.json"
EXPONENTS = ROOT / "lra_jax" / "attention" / "exponents.json"


def main() -> None:
    """The command line."""
    runtime.tune_allocator()
    options = flags(
        __doc__,
        attention=registry.names(),
        lengths=(2048, 4096, 8192, 16384),
        heads=1,
        head_dim=32,
        repeats=3,
        publish=False,
    ).parse_args()
    runtime.configure_jax(cpu_devices=1)
    lengths, sizes = [*options.lengths], (options.heads, options.head_dim)
    report: dict[str, Any] = {"heads": sizes[0], "head_dim": sizes[1]}
    report |= {"lengths": lengths, "mechanisms": {}}
    for name in options.attention:
        row = measure(name, lengths, sizes, options.repeats)
        report["mechanisms"][name] = row
        print(name, row, flush=True)
    report |= origin()
    write(options.out, report)
    if options.publish:
        publish(report)


def measure(
    name: str, lengths: list[int], sizes: tuple[int, int], repeats: int
) -> dict[str, Any]:
    """Times, memory and exponents of one mechanism."""
    from lra_jax.benchmarking.cases import Case
    from lra_jax.benchmarking.programs import Program

    # The benchmark's own softmax is the papers', which builds its matrix.
    subject = "softmax[implementation=None]" if name == "softmax" else name
    shape = {"heads": sizes[0], "head_dim": sizes[1], "rows": "padded"}
    programs = [
        Program(Case(subject, "forward+backward", length, **shape))
        for length in lengths
    ]
    for program in programs:
        program.load(0.0)
    times = [[program.sample() for program in programs] for _ in range(repeats)]
    fastest = [min(column) for column in zip(*times, strict=True)]
    memory = [program.memory.temporary for program in programs]
    return {
        "time_exponent": round(slope(lengths, fastest), 2),
        "memory_exponent": round(slope(lengths, memory), 2),
        "fastest_ms": [round(1e3 * seconds, 2) for seconds in fastest],
        "temporary_mb": [round(size / 1e6, 2) for size in memory],
    }


def slope(lengths: list[int], costs: list[float] | list[int]) -> float:
    """The slope of log cost over log length, by least squares."""
    xs, ys = np.log(np.maximum([lengths, costs], 1e-9))
    return float(np.polyfit(xs, ys, 1)[0])


def publish(report: dict[str, Any]) -> None:
    """Adds rows to those of the same sizes, or replaces all."""
    if RESULT.exists():
        before = read(RESULT.name)
        alike = all(before[n] == report[n] for n in ("heads", "head_dim", "lengths"))
        if alike and before["mechanisms"].keys() - report["mechanisms"].keys():
            made = {name: report[name] for name in origin()}
            # Rows measured in the same place as the others say nothing of their own.
            made = {name: x for name, x in made.items() if before[name] != x}
            new = {name: row | made for name, row in report["mechanisms"].items()}
            rows = before["mechanisms"] | new
            names = [name for name in registry.names() if name in rows]
            report = before | {"mechanisms": {name: rows[name] for name in names}}
    write(RESULT, report)
    rows = report["mechanisms"].items()
    write(EXPONENTS, {name: row["time_exponent"] for name, row in rows})


if __name__ == "__main__":
    main()
