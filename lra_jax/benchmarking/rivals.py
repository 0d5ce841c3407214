"""The kernels of flash-linear-attention (torch and Triton), timed like ours.

Only if ``torch`` and ``fla`` are installed, and torch has a GPU. They are causal, take
``[B, T, N, H]`` (version 0.3 or newer), and are given arrays of the same sizes.

Source: github.com/fla-org/flash-linear-attention, ``fla.ops``.
"""

import dataclasses
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from lra_jax.benchmarking import runner
from lra_jax.benchmarking.cases import Case
from lra_jax.errors import first_line

Row = dict[str, Any]

NAME = "flash-linear-attention"
# For each of ours, the module and the function there.
FUNCTIONS = {
    "linear": ("fla.ops.linear_attn", "chunk_linear_attn"),
    "retention": ("fla.ops.retention", "chunk_retention"),
    "gla": ("fla.ops.gla", "chunk_gla"),
}


def missing() -> str | None:
    """Why they cannot be timed; None = they can."""
    absent = [name for name in ("torch", "fla") if not importlib.util.find_spec(name)]
    if absent:
        return f"not installed: {', '.join(absent)}"
    torch = importlib.import_module("torch")
    return None if torch.cuda.is_available() else "torch finds no GPU"


def versions() -> dict[str, str]:
    """Versions of the packages timed here."""
    found = {name: importlib.import_module(name) for name in ("torch", "fla")}
    return {name: getattr(x, "__version__", "unknown") for name, x in found.items()}


def measure(
    cases: Iterable[Case],
    repeats: int,
    max_seconds: float,
    keep: Callable[[Row], None],
    before: Iterable[Row] = (),
) -> None:
    """Times the cases that have a function there; ``keep`` gets a row for each.

    Those with a row in ``before`` are left out.
    """
    done = list(before)
    for case in cases:
        if case.name not in FUNCTIONS:
            continue
        theirs = dataclasses.replace(case, attention=f"{NAME}: {case.name}")
        if any(runner.is_of(row, theirs) for row in done):
            continue
        row = theirs.to_dict()
        try:
            keep(row | _time(case, repeats, max_seconds))
        except Exception as error:  # From torch, from Triton, or a changed signature.
            keep(row | {"status": "failed", "reason": first_line(error)})


def _time(case: Case, repeats: int, max_seconds: float) -> Row:
    torch = importlib.import_module("torch")
    module, name = FUNCTIONS[case.name]
    function = getattr(importlib.import_module(module), name)
    backward = case.work == "forward+backward"
    shape = (case.batch_size, case.length, case.heads, case.head_dim)
    placed = {"device": "cuda", "dtype": getattr(torch, case.dtype)}
    arrays = {
        name: torch.randn(shape, **placed, requires_grad=backward) for name in "qkv"
    }
    gates = {}
    if case.name == "gla":
        gate = torch.nn.functional.logsigmoid(torch.randn(shape, **placed)) / 16
        gates["g"] = gate.requires_grad_(backward)
    cotangent = torch.randn(shape, **placed)

    def call() -> None:
        out = function(**arrays, **gates)[0]
        if backward:
            torch.autograd.grad(out, [*arrays.values(), *gates.values()], cotangent)

    def sample(calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / calls

    sample(2)  # Compiles and tunes.
    calls = max(1, min(1000, round(0.02 / sample(1))))
    samples = [sample(calls)]
    while len(samples) < repeats and sum(samples) * calls < max_seconds:
        samples.append(sample(calls))
    return {
        "status": "measured",
        "median_ms": 1e3 * statistics.median(samples),
        "fastest_ms": 1e3 * min(samples),
        "slowest_ms": 1e3 * max(samples),
        "samples": len(samples),
    }
