"""The process in which `causal.py` runs the forms of one library, jax or torch.

Reads one request per line and answers with one line, both JSON. Each library has its
own process, so the idle threads of one never spin during the work of the other. While
one form runs, everything else is idle.
"""

import ctypes
import gc
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from causal_forms import FORMS, Form, Function

from lra_jax import runtime

HEADS, HEAD_DIM = 8, 64


class Library(Protocol):
    """The differences between jax and torch."""

    def array(self, x: np.ndarray) -> Any: ...

    def ready(self, function: Function, arrays: list[Any], gradient: bool) -> Any:
        """Compiles; returns a function without arguments that waits for its results.

        It returns the output and, with ``gradient``, the three gradients, where the
        last of the four arrays is the output's cotangent.
        """


class Jax:
    """Compiles ahead of time, to keep tracing out of the times."""

    def array(self, x: np.ndarray) -> Any:
        import jax

        # Waits: a copy still going on would count as memory of the first run.
        return jax.block_until_ready(jax.device_put(x))

    def ready(self, function: Function, arrays: list[Any], gradient: bool) -> Any:
        import jax

        def both(query, key, value, cotangent):
            out, pullback = jax.vjp(function, query, key, value)
            return out, *pullback(cotangent)

        def forward(query, key, value):
            return (function(query, key, value),)

        inputs = arrays if gradient else arrays[:3]
        compiled = jax.jit(both if gradient else forward).lower(*inputs).compile()
        return lambda: jax.block_until_ready(compiled(*inputs))


class Torch:
    """Eager."""

    def array(self, x: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(x)

    def ready(self, function: Function, arrays: list[Any], gradient: bool) -> Any:
        import torch

        def forward():
            with torch.no_grad():
                return (function(*arrays[:3]),)

        def both():
            inputs = [x.detach().requires_grad_() for x in arrays[:3]]
            out = function(*inputs)
            out.backward(arrays[3])
            return out.detach(), *(x.grad for x in inputs)

        return both if gradient else forward


class Worker:
    """Answers requests; keeps the compiled forms and arrays of one length."""

    def __init__(self, library: Library):
        self.library = library
        self.functions: dict[str, Function] = {}
        self.arrays: dict[tuple[int, bool], list[Any]] = {}
        self.runs: dict[tuple[str, bool], Any] = {}

    def open(self, form: str) -> dict[str, Any]:
        """Imports a form."""
        self.functions[form] = FORMS[form].make()
        return {}

    def ready(self, form: str, length: int, gradient: bool) -> dict[str, Any]:
        """Compiles a form and runs it once; returns the seconds of that run."""
        self._compile(FORMS[form], length, gradient)
        return self.time(form, gradient)

    def time(self, form: str, gradient: bool, warm: bool = False) -> dict[str, Any]:
        """Seconds of one run, after an untimed one if ``warm``.

        The untimed run refills the caches, which another process has used meanwhile,
        and outlasts that process's threads, which keep spinning for a while.
        """
        run = self.runs[form, gradient]
        if warm:
            run()
        begun = time.perf_counter()
        results = run()
        seconds = time.perf_counter() - begun
        del results
        return {"seconds": seconds}

    def drop(self) -> dict[str, Any]:
        """Frees the compiled forms and the arrays."""
        self.runs.clear()
        self.arrays.clear()
        gc.collect()
        return {}

    def memory(self, form: str, length: int, gradient: bool) -> dict[str, Any]:
        """The growth of the resident peak during one run, in bytes, and its seconds.

        The growth includes the results, whose size is given too; it is None where the
        system does not report it.
        """
        run = self._compile(FORMS[form], length, gradient)
        gc.collect()
        before, begun = _reset_peak(), time.perf_counter()
        results = run()
        seconds, peak = time.perf_counter() - begun, _status("VmHWM")
        size = sum(x.nbytes for x in results)
        del run, results
        self.drop()
        growth = None if before is None or peak is None else peak - before
        return {"growth": growth, "results": size, "seconds": seconds}

    def save(self, form: str, length: int, file: str) -> dict[str, Any]:
        """Writes output and gradients, `[B, T, N, H]`."""
        results = self._compile(FORMS[form], length, True)()
        arrays = [np.asarray(x) for x in results]
        if FORMS[form].heads_first:
            arrays = [np.swapaxes(x, 1, 2) for x in arrays]
        np.savez(file, *arrays)
        self.drop()
        return {}

    def save_reference(self, computes: str, length: int, file: str) -> dict[str, Any]:
        """Writes the same for the dense matrix of weights, differentiated by jax."""
        import jax.numpy as jnp

        from lra_jax.attention import registry

        weights = registry.resolve(computes).weights

        def dense(query, key, value):
            matrix = weights(query, key, is_causal=True)
            return jnp.einsum("bnts,bsnv->btnv", matrix, value)

        arrays = [self.library.array(x) for x in _inputs(length)]
        results = self.library.ready(dense, arrays, True)()
        np.savez(file, *(np.asarray(x) for x in results))
        return {}

    def _compile(self, form: Form, length: int, gradient: bool) -> Any:
        key = length, form.heads_first
        if key not in self.arrays:
            arrays = _inputs(length)
            if form.heads_first:
                arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
            self.arrays[key] = [self.library.array(x) for x in arrays]
        function = self.functions[form.name]
        run = self.library.ready(function, self.arrays[key], gradient)
        self.runs[form.name, gradient] = run
        return run


def _inputs(length: int) -> list[np.ndarray]:
    """Query, key, value and the output's cotangent, `[1, T, N, H]`."""
    rng = np.random.default_rng(0)
    shape = 1, length, HEADS, HEAD_DIM
    return [rng.standard_normal(shape, np.float32) for _ in range(4)]


def _reset_peak() -> int | None:
    """Resets the peak of the resident memory; returns the bytes resident now."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    """An entry of /proc/self/status, in bytes."""
    file = Path("/proc/self/status")
    if not file.exists():
        return None
    found = re.search(rf"{name}:\s+(\d+) kB", file.read_text())
    return None if found is None else 1024 * int(found[1])


def _reason(error: Exception) -> str:
    """The error's first line, without folders."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r"(?:/[^/\s]+)+/", "", text)


def main() -> None:
    """Serves until the end of the input."""
    runtime.tune_allocator()
    # A library's own output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker({"jax": Jax, "torch": Torch}[sys.argv[1]]())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # The parent decides what it means.
            answer = {"error": _reason(error)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
