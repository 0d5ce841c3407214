"""Strict dtypes and ranks for every test, two CPU devices, and a cache of programs."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.interpreters import mlir

from lra_jax import runtime

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 2)
# Nearly all of the tests' time is compilation, and their programs are too small to gain
# from optimised machine code; subprocesses are told by the environment.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# Fusions by XLA's older emitter, each program in one piece: a third less time for a run
# without kept programs. XLA stops at a flag that it does not know, and later versions
# have no older emitter. Once: workers and subprocesses have them from the environment,
# and kept programs are found again only under the same flags.
if jax.__version_info__[:2] == (0, 10):
    flags = os.environ.get("XLA_FLAGS", "").split()
    for flag in (
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ):
        if flag not in flags:
            flags.append(flag)
    os.environ["XLA_FLAGS"] = " ".join(flags)

# What a script starts in the background ignores Ctrl-C, and so would what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Command lines started by tests do not restart themselves.
os.environ["LRA_JAX_ALLOCATOR"] = "system"


def _share_contexts() -> None:
    """A thread keeps a context of the compiler for ten programs, as later versions do.

    Making one for each program takes a tenth of the tests' time.
    """
    make, kept = mlir.make_ir_context, threading.local()

    def make_ir_context() -> Any:
        kept.uses = getattr(kept, "uses", 0) + 1
        if kept.uses % 10 == 1:
            kept.context = make()
        return kept.context

    mlir.make_ir_context = make_ir_context


if jax.__version_info__[:2] == (0, 10):
    _share_contexts()


def _keep_programs() -> None:
    """Programs of any size are kept for the next time, also those of subprocesses.

    In the folder that JAX_COMPILATION_CACHE_DIR names, or else in the user's cache; an
    empty name keeps nothing.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    usual = home / "lra_jax" / "tests" / f"jax-{jax.__version__}"
    folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(usual))
    settings = {
        "jax_compilation_cache_dir": folder or None,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = "" if value is None else str(value)


_keep_programs()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the trainer come first.

    They are the longest, and at the end would leave one of two workers idle; and as one
    worker has all of them, the runs that they share are trained once.
    """
    items.sort(key=lambda item: "training" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Spares the garbage collector what stays until the end.

    Tracing makes many short-lived objects, and each full collection would visit all
    modules and tests again: a tenth of the test time, and most of that of tests that
    collect.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def _drop_programs() -> Iterator[None]:
    """Programs leave memory before there are too many.

    Each maps up to three pieces of memory, and Linux lets a process have 65,530: beyond
    that, after some two thirds of all tests, it dies of a segmentation fault.
    """
    yield
    maps, sizes = Path("/proc/self/maps"), Path("/proc/self/statm")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    page = os.sysconf("SC_PAGE_SIZE")
    # Half of the machine, but a container may have less than the machine.
    most = min(5e9, os.sysconf("SC_PHYS_PAGES") * page / (2 * workers))
    if (
        not maps.exists()
        or maps.read_bytes().count(b"\n") > 55_000
        or int(sizes.read_text().split()[1]) * page > most
    ):
        jax.clear_caches()
        # Programs hang together in circles, and what is freed is kept for reuse: a
        # process once at the limit would drop its programs after every file.
        gc.collect()
        runtime.release_memory()
