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

import time
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
    calls = [_Call(name, length, *sizes) for length in lengths]
    times = [[call.time() for call in calls] for _ in range(repeats)]
    fastest = [min(column) for column in zip(*times, strict=True)]
    memory = [call.temporary_bytes for call in calls]
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


class _Call:
    """One mechanism at one length, compiled, with its inputs."""

    def __init__(self, name: str, length: int, heads: int, head_dim: int):
        import jax
        import jax.numpy as jnp

        from lra_jax.benchmarking.cases import Case
        from lra_jax.benchmarking.works import extra_arrays, pull_back

        mechanism = registry.resolve(name)
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (1, length, heads, head_dim)
        self.arrays = [jax.random.normal(key, shape) for key in keys]
        mask = jnp.arange(length)[None] < length - 7
        case = Case(name, "forward+backward", length, heads=heads, head_dim=head_dim)
        extra = extra_arrays(case, mechanism, {})
        masks = {"mask": mask, "query_mask": mask}
        taken = registry.accepted_keywords(mechanism.attention) or frozenset()
        extra |= {name: x for name, x in masks.items() if name in taken}
        sizes = {"max_length": length} if "max_length" in taken else {}

        @jax.jit
        def both(arrays, extra):
            def run(extra, *arrays):
                return mechanism.attention(*arrays, **sizes, **extra)

            out, pullback = pull_back(mechanism, run, extra, arrays)
            return out, pullback(out)

        self.extra = extra
        self._call = both.lower(self.arrays, extra).compile()
        memory: Any = self._call.memory_analysis()
        self.temporary_bytes = memory.temp_size_in_bytes

    def time(self) -> float:
        """Seconds of one call."""
        import jax

        start = time.perf_counter()
        jax.block_until_ready(self._call(self.arrays, self.extra))
        return time.perf_counter() - start


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
