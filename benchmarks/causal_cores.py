"""Times causal attention on one CPU device and with its heads on one device per core.

    python benchmarks/causal_cores.py --out=results/causal_cores.json

Batch 1, 8 heads of 64, float32, forward and forward + backward, with the allocator of
`lra_jax.runtime`. The arrays of a "split" run lie on all devices, an equal number of
heads on each, and nothing else changes: jax compiles the same function for them. All
runs are interleaved, and every round begins with a different one. A ratio is a time
divided by that of plain linear attention on one device in the same round; the median
over the rounds is reported. Outputs and gradients of both placements are compared.

For attnax: pip install attnax --no-deps.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lra_jax import runtime

if __name__ == "__main__":
    runtime.tune_allocator()

import jax
import jax.numpy as jnp
import numpy as np
from causal_forms import FORMS, Form
from common import PASSES, origin, turned, write
from jax.sharding import NamedSharding, PartitionSpec

HEADS, HEAD_DIM = 8, 64
NAMES = ("linear", "cosformer", "flow", "attnax")
Run = Callable[[], Any]


def arrays(length: int, form: Form, mesh: jax.sharding.Mesh | None) -> list[jax.Array]:
    """Query, key, value and a cotangent, in the form's layout and placement."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(4):
        x = rng.normal(size=(1, length, HEADS, HEAD_DIM)).astype(np.float32)
        spec = PartitionSpec(None, None, "heads")
        if form.heads_first:
            x, spec = np.swapaxes(x, 1, 2), PartitionSpec(None, "heads")
        made.append(
            jnp.asarray(x)
            if mesh is None
            else jax.device_put(x, NamedSharding(mesh, spec))
        )
    return made


def runs(length: int, form: Form, mesh: jax.sharding.Mesh | None) -> dict[str, Run]:
    """One call of each pass."""
    function = form.make()
    query, key, value, cotangent = arrays(length, form, mesh)

    def both(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(function, query, key, value)
        return out, pull(cotangent)

    forward, backward = jax.jit(function), jax.jit(both)
    return {
        "forward": lambda: jax.block_until_ready(forward(query, key, value)),
        "forward+backward": lambda: jax.block_until_ready(
            backward(query, key, value, cotangent)
        ),
    }


def check_equal(name: str, one: Any, split: Any) -> None:
    """Compares what both placements give."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        error = np.abs(x - y).max() / np.abs(x).max()
        if not error < 1e-5:
            raise ValueError(f"{name}: expected equal results, got error {error}")


def measure(length: int, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """The rows of one length."""
    mesh = jax.make_mesh((jax.device_count(),), ("heads",))
    cases = {}
    for name in names:
        one, split = (runs(length, FORMS[name], m) for m in (None, mesh))
        for which in PASSES:
            check_equal(f"{name}, {which}", one[which](), split[which]())
            cases[name, "one", which] = one[which]
            cases[name, "split", which] = split[which]
    seconds: dict[tuple[str, str, str], list[float]] = {case: [] for case in cases}
    for number in range(repeats):
        for case in turned(list(cases), number):
            before = time.perf_counter()
            cases[case]()
            seconds[case].append(time.perf_counter() - before)
    rows = []
    for case, found in seconds.items():
        name, placement, which = case
        ours = seconds["linear", "one", which]
        ratios = [x / y for x, y in zip(found, ours, strict=True)]
        rows.append(
            {
                "form": name,
                "length": length,
                "devices": 1 if placement == "one" else jax.device_count(),
                "pass": which,
                "ms": round(1e3 * statistics.median(found), 2),
                "ratio": round(statistics.median(ratios), 3),
            }
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="1024,4096,16384,65536")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runtime.configure_jax()
    there = importlib.util.find_spec("attnax") is not None
    names = [name for name in NAMES if there or name != "attnax"]
    rows = []
    for length in map(int, options.lengths.split(",")):
        for row in measure(length, names, options.repeats):
            print(*row.values(), flush=True)
            rows.append(row)
    packages = ("attnax",) if there else ()
    settings = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    report = origin(*packages) | settings | {"repeats": options.repeats, "rows": rows}
    write(options.out, report)


if __name__ == "__main__":
    main()
