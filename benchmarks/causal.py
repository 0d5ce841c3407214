"""Compares time and memory of causal linear attention with every installable peer.

    python benchmarks/causal.py --out=results/causal.json
    python benchmarks/causal.py --quick --out=results/causal.json
    python benchmarks/causal.py --lengths=1024,4096 --repeats=3 --peers=attnax

All lengths take most of an hour. ``--quick`` (1K, 4K, 16K and 64K tokens, at most 7
runs of a case) takes an estimated 10 minutes on 2 cores.

Batch 1, 8 heads of 64, float32, on the CPU, forward and forward + backward. The runs of
all forms are interleaved, so a slow spell of the machine affects them all, and every
round begins with a different form. A run of less than 0.1 s is timed after an untimed
one. A ratio is a form's time divided by that of our linear attention in the same round;
the median over the rounds is reported. Everything is timed twice: with the C library's
allocator unchanged, and with the settings of `lra_jax.runtime`.

Memory is the growth of the process's resident peak during one run, beyond its inputs,
with and without the results. For this the allocator returns freed memory at once.

First, output and gradients of every form are compared with the dense weights of its
mechanism. Absent forms, and the lengths at which a form was not run, are listed with
the reason. Peers: pip install attnax torch einops, without their dependencies
fla-core, flash-linear-attention, linear-attention-transformer with what it imports, and
pytorch-fast-transformers, which compiles C++ (--no-build-isolation; no nvcc on PATH).
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from causal_forms import Form, chosen
from common import PASSES, origin, turned, write

import lra_jax

TOLERANCE = 1e-4
# A case is skipped if one run would take this long and 10 times our own, or this much
# memory.
MAX_SECONDS, MAX_BYTES = 4.0, 8e9
# A case is repeated --repeats times, or until its runs have taken this long together.
BUDGET_SECONDS = 1.0
# A run shorter than this is timed after an untimed one.
WARM_SECONDS = 0.1
ALLOCATORS = {
    "default": {"LRA_JAX_ALLOCATOR": "system"},
    "tuned": {},
}
# Large buffers come from the system and return to it, so that the peak is the demand.
MEASURING = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}

Case = tuple[str, str, int]  # form, pass, length


class Workers:
    """One process for each library, all with the same environment."""

    def __init__(self, environment: dict[str, str], cache: str):
        self.environment = {
            **{k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"},
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **environment,
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def ask(self, library: str, do: str, **request: Any) -> dict[str, Any]:
        """Sends a request; the answer has "error" if it failed."""
        process = self.processes.get(library) or self._start(library)
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps({"do": do, **request}), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            self.processes.pop(library)
            return {"error": f"the process ended with {process.wait()}"}
        return json.loads(line)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.communicate()

    def _start(self, library: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = self.processes[library] = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("causal_worker.py"), library],
            env=self.environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        return process


def find(forms: list[Form], cache: str) -> tuple[list[Form], dict[str, str]]:
    """The forms that can be imported, and why the others cannot."""
    absent = {}
    with Workers({}, cache) as workers:
        for form in forms:
            answer = workers.ask(form.library, "open", form=form.name)
            if "error" in answer:
                absent[form.name] = answer["error"]
                print(f"absent: {form.title}: {answer['error']}")
    return [form for form in forms if form.name not in absent], absent


def errors(forms: list[Form], length: int, cache: str) -> dict[str, float]:
    """Each form's largest error, of output and gradients, relative to their maxima."""
    found = {}
    with Workers({}, cache) as workers, tempfile.TemporaryDirectory() as folder:
        wanted = {}
        for form in forms:
            file = str(Path(folder, "reference.npz"))
            where = {"length": length, "file": file}
            if form.computes not in wanted:
                request = {"computes": form.computes, **where}
                _checked(workers.ask("jax", "save_reference", **request))
                wanted[form.computes] = _arrays(file)
            _checked(workers.ask(form.library, "open", form=form.name))
            _checked(workers.ask(form.library, "save", form=form.name, **where))
            found[form.name] = max(
                float(np.abs(got - want).max() / np.abs(want).max())
                for got, want in zip(_arrays(file), wanted[form.computes], strict=True)
            )
            print(f"{form.title}: error {found[form.name]:.1e} at {length}")
    return found


def _arrays(file: str) -> list[np.ndarray]:
    with np.load(file) as arrays:
        return [arrays[name] for name in arrays]


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def expected(figure: float, length: int, longer: int, growth: int) -> float:
    """Extrapolates a figure measured at one length to a longer one."""
    return figure * (longer / length) ** growth


def refusal(
    form: Form, length: int, last: dict[str, Any] | None, ours: float | None
) -> str | None:
    """Why a form should not run at a length; None if it should.

    Args:
      form: the form.
      length: the length.
      last: its memory case at the previous length: length, seconds, growth in bytes.
      ours: seconds of our linear attention at this length.
    """
    if last is None:
        return None
    if "stopped" in last:
        return last["stopped"]
    seconds = expected(last["seconds"], last["length"], length, form.growth)
    if seconds > MAX_SECONDS and (ours is None or seconds > 10 * ours):
        return f"from {length} tokens on: {seconds:.0f} s a run expected"
    size = expected(last["growth"] or 0, last["length"], length, form.growth)
    if size > MAX_BYTES:
        return f"from {length} tokens on: {size / 1e9:.0f} GB expected"
    return None


def measure_memory(
    forms: list[Form], lengths: list[int], cache: str
) -> dict[Case, dict[str, Any]]:
    """Runs each case once, in a process for each form; the peak, or why it stopped."""
    cases: dict[Case, dict[str, Any]] = {}
    for form in forms:
        with Workers(MEASURING, cache) as workers:
            _checked(workers.ask(form.library, "open", form=form.name))
            for name, gradient in PASSES.items():
                # A first run also loads code.
                request = {"form": form.name, "gradient": gradient}
                _checked(workers.ask(form.library, "memory", length=256, **request))
                last = None
                for length in lengths:
                    ours = cases.get(("linear", name, length), {}).get("seconds")
                    reason = refusal(form, length, last, ours)
                    if reason is None:
                        answer = workers.ask(
                            form.library, "memory", length=length, **request
                        )
                        if "error" in answer:
                            answer = {"stopped": answer["error"]}
                    else:
                        answer = {"stopped": reason}
                    last = cases[form.name, name, length] = {"length": length, **answer}
        print(f"{form.title}: memory measured")
    return cases


def measure_times(
    forms: list[Form],
    cases: dict[Case, dict[str, Any]],
    length: int,
    repeats: int,
    workers: Workers,
) -> Iterator[tuple[Case, list[float]]]:
    """The seconds of every run of the cases of one length, in rounds."""
    begun = {
        (form, name): _checked(
            workers.ask(
                form.library, "ready", form=form.name, length=length, gradient=gradient
            )
        )["seconds"]
        for name, gradient in PASSES.items()
        for form in forms
        if "stopped" not in cases[form.name, name, length]
    }
    times: dict[tuple[Form, str], list[float]] = {case: [] for case in begun}
    for number in range(repeats):
        for (form, name), runs in turned(list(times.items()), number):
            # At least two; the first run shows how long one takes.
            if number >= 2 and number * begun[form, name] > BUDGET_SECONDS:
                continue
            request: dict[str, Any] = {"form": form.name, "gradient": PASSES[name]}
            request["warm"] = begun[form, name] < WARM_SECONDS
            answer = _checked(workers.ask(form.library, "time", **request))
            runs.append(answer["seconds"])
    for library in {form.library for form in forms}:
        workers.ask(library, "drop")
    for (form, name), runs in times.items():
        yield (form.name, name, length), runs


def ratio(runs: list[float], ours: list[float]) -> float:
    """Median over the rounds in which both took part."""
    return statistics.median(a / b for a, b in zip(runs, ours, strict=False))


def time_all(
    forms: list[Form], cases: dict[Case, dict[str, Any]], repeats: int, cache: str
) -> list[dict[str, Any]]:
    """The rows of all cases that were not stopped, with both allocators."""
    rows = []
    lengths = sorted({length for _, _, length in cases})
    for allocator, environment in ALLOCATORS.items():
        with Workers(environment, cache) as workers:
            for form in forms:
                _checked(workers.ask(form.library, "open", form=form.name))
            for length in lengths:
                runs = dict(measure_times(forms, cases, length, repeats, workers))
                for (form, name, _), seconds in runs.items():
                    ours = runs["linear", name, length]
                    rows.append(
                        {
                            "allocator": allocator,
                            "pass": name,
                            "length": length,
                            "form": form,
                            "fastest_ms": round(1e3 * min(seconds), 2),
                            "median_ms": round(1e3 * statistics.median(seconds), 2),
                            "runs": len(seconds),
                            "ratio": round(ratio(seconds, ours), 3),
                        }
                    )
                    print(*rows[-1].values())
    return rows


def memory_rows(cases: dict[Case, dict[str, Any]]) -> list[dict[str, Any]]:
    """Peaks in megabytes, or the reason why there is none."""
    rows = []
    for (form, name, length), case in cases.items():
        row = {"pass": name, "length": length, "form": form}
        if "stopped" in case:
            row["stopped"] = case["stopped"]
        elif case["growth"] is None:
            row["growth_mb"] = row["extra_mb"] = None
        else:
            row["growth_mb"] = round(case["growth"] / 1e6, 1)
            row["extra_mb"] = round((case["growth"] - case["results"]) / 1e6, 1)
        rows.append(row)
    return rows


def describe(forms: list[Form], absent: dict[str, str], wrong: dict[str, float]):
    """The forms that ran, and those that did not."""
    described = {}
    for form in forms:
        row: dict[str, Any] = {"title": form.title, "exact": form.exact}
        if form.name in absent:
            row["absent"] = absent[form.name]
        else:
            row["package"] = form.package
            row["version"] = (
                lra_jax.__version__
                if form.package == "lra-jax"
                else importlib.metadata.version(form.package)
            )
            row["error"] = float(f"{wrong[form.name]:.1e}")
        described[form.name] = row
    return described


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    powers = ",".join(str(1024 << power) for power in range(7))
    parser.add_argument("--lengths", help=f"comma-separated; default {powers}")
    parser.add_argument("--repeats", type=int, help="runs of a case; default 15")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and runs")
    parser.add_argument("--peers", default="all", help="'all', 'none' or names")
    parser.add_argument("--out", help="JSON file to write, with the picture next to it")
    options = parser.parse_args()
    if options.quick:
        powers = ",".join(str(1024 << power) for power in range(0, 7, 2))
    repeats = options.repeats or (7 if options.quick else 15)
    lengths = sorted(int(length) for length in (options.lengths or powers).split(","))
    load = os.getloadavg()[0]
    try:
        asked = chosen(options.peers)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as cache:
        forms, absent = find(asked, cache)
        wrong = errors(forms, min(1024, lengths[0]), cache)
        described = describe(asked, absent, wrong)
        cases = measure_memory(forms, lengths, cache)
        times = time_all(forms, cases, repeats, cache)
    if options.out:
        report = {
            **origin(),
            # Load of the last minute: other work on the cores.
            "load_average_before": round(load, 2),
            "settings": {"batch": 1, "heads": 8, "head_dim": 64, "dtype": "float32"},
            "forms": described,
            "times": times,
            "memory": memory_rows(cases),
        }
        out = Path(options.out)
        write(out, report)
        import causal_figure

        causal_figure.draw(report, out.with_suffix(".png"))
    for form in forms:
        if form.exact and wrong[form.name] > TOLERANCE:
            sys.exit(f"{form.title}: wrong by {wrong[form.name]:.1e}")


if __name__ == "__main__":
    main()
