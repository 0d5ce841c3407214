"""Compares time and memory of causal linear attention with every installable peer.

    python benchmarks/causal.py --quick --out=results/causal.json
    python benchmarks/causal.py --lengths=1024,4096 --repeats=3 --peers=attnax

``--quick`` (1K, 4K, 16K and 64K tokens, at most 7 runs of a case) takes about 10
minutes on 2 cores, all seven lengths most of an hour.

Batch 1, 8 heads of 64, float32, on the CPU, forward and forward + backward. The runs of
all forms are interleaved, so a slow spell of the machine affects them all, and every
round begins with a different form. A run of less than 0.1 s is timed after an untimed
one. A ratio is a form's time divided by that of our linear attention in the same round;
the median over the rounds is reported. Everything is timed twice: with the C library's
allocator unchanged, and with the settings of `lra_jax.runtime`. Memory is the growth of
the process's resident peak during one run, beyond its inputs.

First, output and gradients of every form are compared with the dense weights of its
mechanism. Absent forms are listed with the reason; slow ones stop at shorter lengths.
Peers: pip install attnax torch einops, without their dependencies
fla-core, flash-linear-attention, linear-attention-transformer with what it imports, and
pytorch-fast-transformers, which compiles C++ (--no-build-isolation; no nvcc on PATH).

jax and torch run in a process each, so the idle threads of one never spin during the
work of the other. A peer takes its arrays in the layout that it prefers, so no
transposition is counted against it.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from common import flags, milliseconds, origin, rotate, write

import lra_jax
from lra_jax import errors, runtime

HEADS, HEAD_DIM, EPS = 8, 64, 1e-6
# The passes that are timed, and whether with gradients.
PASSES = {"forward": False, "forward+backward": True}
TOLERANCE = 1e-4
# A case is repeated --repeats times, or until its runs have taken this long together.
BUDGET_SECONDS = 1.0
# A run shorter than this is timed after an untimed one.
WARM_SECONDS = 0.1
_TUNED = ":".join(f"glibc.malloc.{k}={v}" for k, v in runtime.tunables().items())
ALLOCATORS = {"default": {}, "tuned": {"GLIBC_TUNABLES": _TUNED}}
# Large buffers come from the system and return to it, so that the peak is the demand.
MEASURING = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}

Function = Callable[[Any, Any, Any], Any]
Row = dict[str, Any]


class Form(NamedTuple):
    """One implementation of a causal mechanism.

    Attributes:
      title: as shown.
      make: imports it, and returns the function of query, key and value.
      package: the distribution that it comes from.
      computes: the mechanism, by its name in `lra_jax.attention`.
      library: "jax" or "torch".
      heads_first: takes `[B, N, T, H]`, not `[B, T, N, H]`.
      longest: the last length of each pass; more would take seconds or gigabytes.
      exact: computes the causal mechanism; if not, ``title`` says what it leaves out.
    """

    title: str
    make: Callable[[], Function]
    package: str = "lra-jax"
    computes: str = "linear"
    library: str = "jax"
    heads_first: bool = False
    longest: tuple[int, int] = (65_536, 65_536)
    exact: bool = True


def _ours(name: str, **options: Any) -> Callable[[], Function]:
    def make() -> Function:
        from lra_jax.attention import registry

        attention = registry.resolve(name).attention
        return functools.partial(attention, is_causal=True, **options)

    return make


def _dense(name: str) -> Callable[[], Function]:
    """The reference: the matrix of weights times the values."""

    def make() -> Function:
        import jax.numpy as jnp

        from lra_jax.attention import registry

        weights = registry.resolve(name).weights

        def function(query, key, value):
            matrix = weights(query, key, is_causal=True)
            return jnp.einsum("bnts,bsnv->btnv", matrix, value)

        return function

    return make


def _attnax() -> Function:
    from attnax.kernels.attention import linear_attention

    return linear_attention


def _prefix_sum() -> Function:
    import jax
    import jax.numpy as jnp

    def function(query, key, value):
        query, key = jax.nn.elu(query) + 1, jax.nn.elu(key) + 1
        sums = jnp.cumsum(key[..., :, None] * value[..., None, :], axis=1)
        total = jnp.cumsum(key, axis=1)
        numerator = jnp.einsum("btnm,btnmv->btnv", query, sums)
        return numerator / (jnp.einsum("btnm,btnm->btn", query, total)[..., None] + EPS)

    return function


def _jax_softmax() -> Function:
    import jax

    return functools.partial(jax.nn.dot_product_attention, is_causal=True)


def _torch_softmax() -> Function:
    from torch.nn.functional import scaled_dot_product_attention

    return functools.partial(scaled_dot_product_attention, is_causal=True)


def _fast_transformers() -> Function:
    import torch
    from fast_transformers.causal_product import causal_dot_product
    from torch.nn.functional import elu

    def function(query, key, value):
        query, key = elu(query) + 1, elu(key) + 1
        total = torch.einsum("bntm,bntm->bnt", query, key.cumsum(2)) + EPS
        return causal_dot_product(query, key, value) / total[..., None]

    return function


def _fla() -> Function:
    """From its file: the package itself needs Triton, which this form does not."""
    from torch.nn.functional import elu

    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'fla'")
    file = Path(package.origin).parent / "ops" / "linear_attn" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_linear_attn_naive", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def function(query, key, value):
        features = elu(query) + 1, elu(key) + 1
        return module.naive_chunk_linear_attn(
            *features, value, scale=1.0, normalize=True
        )

    return function


def _buckets() -> Function:
    from linear_attention_transformer import linear_attention_transformer as module

    return functools.partial(module.causal_linear_attn, bucket_size=64)


_TITLES = {"linear": "linear", "cosformer": "cosFormer", "flow": "Flow"}
_TORCH = {"library": "torch", "heads_first": True}
_FTF = "pytorch-fast-transformers"
_LAT = "linear-attention-transformer"
_FLA = "flash-linear-attention"
FORMS = {
    name: Form(f"{title} (ours)", _ours(name), computes=name)
    for name, title in _TITLES.items()
}
FORMS |= {
    f"{name}_xla": Form(
        f"{title}, compiled by XLA (ours)",
        _ours(name, implementation="xla"),
        computes=name,
    )
    for name, title in _TITLES.items()
}
FORMS |= {
    "softmax": Form(
        "softmax, in blocks (ours)",
        _ours("softmax"),
        computes="softmax",
        longest=(4096, 4096),
    ),
    "attnax": Form("attnax", _attnax, "attnax", heads_first=True),
    "fast_transformers": Form(
        "fast-transformers, C++", _fast_transformers, _FTF, **_TORCH
    ),
    "fla": Form(f"{_FLA}, torch chunks", _fla, _FLA, library="torch"),
    "buckets": Form(
        "lucidrains buckets (not exact: earlier buckets only)",
        _buckets,
        _LAT,
        exact=False,
        **_TORCH,
    ),
    "prefix_sum": Form(
        "prefix sum, jax.numpy", _prefix_sum, "jax", longest=(4096, 1024)
    ),
    "jax_softmax": Form(
        "softmax, jax.nn", _jax_softmax, "jax", "softmax", longest=(4096, 1024)
    ),
    "torch_softmax": Form(
        "softmax, torch SDPA",
        _torch_softmax,
        "torch",
        "softmax",
        longest=(16_384, 4096),
        **_TORCH,
    ),
}
EVERY = FORMS | {
    f"dense {name}": Form("weights times values", _dense(name), computes=name)
    for name in (*_TITLES, "softmax")
}
"""Those that are measured, and the references."""


def choose(peers: str) -> list[str]:
    """Our forms, and the peers named: "all", "none" or names between commas.

    Raises:
      ValueError: a name is not known.
    """
    known = [name for name, form in FORMS.items() if form.package != "lra-jax"]
    names = {"all": known, "none": []}.get(peers, peers.split(","))
    for name in names:
        if name not in known:
            choices = f"'all', 'none' or some of {','.join(known)}"
            raise errors.expected("--peers", choices, f"{name!r}")
    return [name for name in FORMS if name not in known or name in names]


# What follows, up to `workers`, runs in the process of a library.


@functools.cache
def _function(name: str) -> Function:
    return EVERY[name].make()


@functools.cache
def _arrays(library: str, length: int, heads_first: bool) -> list[Any]:
    """Query, key, value and the output's cotangent, `[1, T, N, H]`."""
    rng = np.random.default_rng(0)
    shape = 1, length, HEADS, HEAD_DIM
    arrays = [rng.standard_normal(shape, np.float32) for _ in range(4)]
    if heads_first:
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    return (_jax_arrays if library == "jax" else _torch_arrays)(arrays)


@functools.cache
def _prepare(name: str, length: int, gradient: bool) -> Callable[[], Any]:
    """A compiled form; the caches keep those of one length."""
    form = EVERY[name]
    run = _jax_run if form.library == "jax" else _torch_run
    arrays = _arrays(form.library, length, form.heads_first)
    return run(_function(name), arrays, gradient)


def take_time(name: str, length: int, gradient: bool, warm: bool = False) -> float:
    """Seconds of one run, after an untimed one if ``warm``.

    The untimed run refills the caches, which another process has used meanwhile, and
    outlasts that process's threads, which keep spinning for a while.
    """
    run = _prepare(name, length, gradient)
    if warm:
        run()
    start = time.perf_counter()
    results = run()
    seconds = time.perf_counter() - start
    del results
    return seconds


def drop() -> None:
    """Frees the compiled forms and the arrays."""
    _prepare.cache_clear()
    _arrays.cache_clear()
    gc.collect()


def take_memory(name: str, length: int, gradient: bool) -> Row:
    """The growth of the resident peak during one run, in megabytes, with and without
    the results; None where the system does not say."""
    run = _prepare(name, length, gradient)
    gc.collect()
    before = _reset_peak()
    results = run()
    peak = _status("VmHWM")
    size = sum(x.nbytes for x in results)
    del run, results
    drop()
    growth = extra = None
    if before is not None and peak is not None:
        growth, extra = (round((peak - before - x) / 1e6, 1) for x in (0, size))
    return {"growth_mb": growth, "extra_mb": extra}


def take_outputs(name: str, length: int) -> list[np.ndarray]:
    """Output and gradients, `[1, T, N, H]`."""
    arrays = [np.asarray(x) for x in _prepare(name, length, True)()]
    drop()
    return [x.swapaxes(1, 2) for x in arrays] if EVERY[name].heads_first else arrays


def _jax_arrays(arrays: list[np.ndarray]) -> list[Any]:
    """Waits: a copy still going on would count as memory of the first run."""
    import jax

    return jax.block_until_ready(jax.device_put(arrays))


def _jax_run(function: Function, arrays: list[Any], gradient: bool) -> Any:
    """A call that returns the output and, with ``gradient``, the three gradients; the
    last of four arrays is the output's cotangent. Compiled ahead of time."""
    import jax

    def both(query, key, value, cotangent):
        out, pullback = jax.vjp(function, query, key, value)
        return out, *pullback(cotangent)

    def forward(query, key, value):
        return (function(query, key, value),)

    inputs = arrays if gradient else arrays[:3]
    compiled = jax.jit(both if gradient else forward).lower(*inputs).compile()
    return lambda: jax.block_until_ready(compiled(*inputs))


def _torch_arrays(arrays: list[np.ndarray]) -> list[Any]:
    import torch

    return [torch.from_numpy(x) for x in arrays]


def _torch_run(function: Function, arrays: list[Any], gradient: bool) -> Any:
    """The same, eager."""
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
    entry = re.search(rf"{name}:\s+(\d+) kB", file.read_text()) if file.exists() else ""
    return 1024 * int(entry[1]) if entry else None


@contextlib.contextmanager
def workers(environment: dict[str, str], cache: str) -> Iterator[Callable[..., Any]]:
    """A function that calls another one, of a form, in a process for each library, all
    with the same environment."""
    pools: dict[str, ProcessPoolExecutor] = {}
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **environment,
    }

    def run(function: Callable[..., Any], name: str, *args: Any) -> Any:
        library = EVERY[name].library
        if library not in pools:
            context = multiprocessing.get_context("spawn")
            pools[library] = ProcessPoolExecutor(1, context)
        return pools[library].submit(function, name, *args).result()

    with mock.patch.dict(os.environ, settings):
        if "GLIBC_TUNABLES" not in environment:
            os.environ.pop("GLIBC_TUNABLES", None)
        yield run
    for pool in pools.values():
        pool.shutdown()


def _describe(error: Exception) -> str:
    """The first line of an error, without paths of this machine."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r"(?:/[^/\s]+)+/", "", first)


def check(names: list[str], length: int, cache: str) -> dict[str, Row]:
    """Each form's largest error, of output and gradients, relative to their maxima; or
    why it is absent."""
    rows: dict[str, Row] = {}
    with workers({}, cache) as run:
        exact = {
            name: run(take_outputs, f"dense {name}", length)
            for name in dict.fromkeys(FORMS[name].computes for name in names)
        }
        for name in names:
            form = FORMS[name]
            row = rows[name] = {"title": form.title, "exact": form.exact}
            try:
                arrays = run(take_outputs, name, length)
            except ImportError as error:
                row["absent"] = _describe(error)
            else:
                pairs = zip(arrays, exact[form.computes], strict=True)
                error = max(float(abs(x - y).max() / abs(y).max()) for x, y in pairs)
                ours = form.package == "lra-jax"
                version = importlib.metadata.version
                row["package"] = form.package
                row["version"] = lra_jax.__version__ if ours else version(form.package)
                row["error"] = float(f"{error:.1e}")
            print(*row.values())
    return rows


def measure_memory(names: list[str], lengths: list[int], cache: str) -> list[Row]:
    """Runs each case once, in a process for each form; the peak."""
    rows: list[Row] = []
    for name in names:
        form = FORMS[name]
        with workers(MEASURING, cache) as run:
            for (which, gradient), longest in zip(
                PASSES.items(), form.longest, strict=True
            ):
                run(take_memory, name, 256, gradient)  # Also loads code.
                for length in lengths:
                    if length <= longest:
                        row = {"pass": which, "length": length, "form": name}
                        rows.append(row | run(take_memory, name, length, gradient))
        print(f"{form.title}: memory measured")
    return rows


def measure_times(
    cases: list[tuple[str, str]], length: int, repeats: int, run: Callable[..., Any]
) -> dict[tuple[str, str], list[float]]:
    """The seconds of every run of the cases of one length, in rounds."""
    first = {
        (name, which): run(take_time, name, length, PASSES[which])
        for name, which in cases
    }
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for number in range(repeats):
        for (name, which), runs in rotate(list(times.items()), number):
            # At least two; the first run shows how long one takes.
            if number < 2 or number * first[name, which] <= BUDGET_SECONDS:
                warm = first[name, which] < WARM_SECONDS
                runs.append(run(take_time, name, length, PASSES[which], warm))
    return times


def ratio(runs: list[float], ours: list[float]) -> float:
    """Median over the rounds in which both took part."""
    return statistics.median(a / b for a, b in zip(runs, ours, strict=False))


def time_all(memory: list[Row], repeats: int, cache: str) -> Iterator[Row]:
    """The rows of all cases, with both allocators."""
    cases: dict[int, list[tuple[str, str]]] = {}
    for row in memory:
        cases.setdefault(row["length"], []).append((row["form"], row["pass"]))
    for allocator, environment in ALLOCATORS.items():
        for length, members in sorted(cases.items()):
            with workers(environment, cache) as run:
                times = measure_times(members, length, repeats, run)
            for (name, which), seconds in times.items():
                row = {
                    "allocator": allocator,
                    "pass": which,
                    "length": length,
                    "form": name,
                    **milliseconds(seconds, 2),
                    "runs": len(seconds),
                    "ratio": round(ratio(seconds, times["linear", which]), 3),
                }
                print(*row.values(), flush=True)
                yield row


def draw(report: Row) -> Any:
    """Time and extra memory per token: linear cost is a horizontal line, which ends at
    the last length at which its form ran."""
    from lra_jax.reports import charts

    def panel(rows: Any, which: str, title: str, key: str, ylabel: str) -> charts.Panel:
        lines = []
        for index, (name, form) in enumerate(report["forms"].items()):
            members = [x for x in rows if x["form"] == name and x["pass"] == which]
            members = [row for row in members if (row.get(key) or 0) > 0]
            if members:
                xs = [row["length"] for row in members]
                ys = [1e3 * row[key] / row["length"] for row in members]
                lines.append(charts.Line(form["title"], xs, ys, style=index))
        settings = {"title": f"{which}, {title}", "ylabel": ylabel}
        settings |= {"xlabel": "length, tokens"} if PASSES[which] else {}
        return charts.Panel(lines, is_log=True, lengths=lengths, settings=settings)

    lengths = [x["length"] for x in report["times"]]
    panels = []
    for which in PASSES:
        for name in ALLOCATORS:
            times = [x for x in report["times"] if x["allocator"] == name]
            title, label = f"{name} allocator", "time per token, µs"
            panels.append(panel(times, which, title, "fastest_ms", label))
        label = "extra memory per token, kB"
        memory = report["memory"]
        panels.append(panel(memory, which, "extra memory", "extra_mb", label))
    return charts.Chart(
        "causal",
        panels,
        columns=3,
        size=(4.6, 4.2),
        layout={"sharex": True, "sharey": "col"},
        title=f"Causal attention, batch 1, 8 heads of 64, float32, {report['device']}",
    )


def main() -> None:
    """The command line."""
    about = (__doc__ or "").partition("\n")[0]
    parser = flags(about, lengths=None, repeats=0, quick=False, peers="all")
    options = parser.parse_args()
    lengths = [1024 << power for power in range(0, 7, 2 if options.quick else 1)]
    if options.lengths:
        lengths = sorted(map(int, options.lengths.split(",")))
    repeats = options.repeats or (7 if options.quick else 15)
    load = os.getloadavg()[0]
    try:
        names = choose(options.peers)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as cache:
        forms = check(names, min(1024, lengths[0]), cache)
        present = [name for name, row in forms.items() if "error" in row]
        memory = measure_memory(present, lengths, cache)
        times = list(time_all(memory, repeats, cache))
    if options.out:
        report = {
            **origin(),
            # Load of the last minute: other work on the cores.
            "load_average_before": round(load, 2),
            "settings": {"batch": 1, "heads": 8, "head_dim": 64, "dtype": "float32"},
            "forms": forms,
            "times": times,
            "memory": memory,
        }
        write(options.out, report)
        draw(report).save(options.out.with_suffix(".png"))
    for name in present:
        if FORMS[name].exact and forms[name]["error"] > TOLERANCE:
            sys.exit(f"{FORMS[name].title}: wrong by {forms[name]['error']:.1e}")


if __name__ == "__main__":
    main()
