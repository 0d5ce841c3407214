"""The memory of a compiled case."""

import platform

import helpers
import pytest

from benchmarking.small import case
from lra_jax.benchmarking.programs import Program, available_bytes


def test_memory_is_that_of_the_arrays() -> None:
    """Query, key, value and output at least; softmax's matrix beyond."""
    sizes = {"length": 64, "batch_size": 1, "heads": 1}
    linear, naive = (Program(case(x, **sizes)).memory for x in ("linear", "softmax"))
    array = 4 * 64 * 4
    assert linear.arguments == naive.arguments == 3 * array
    assert linear.results == array
    assert naive.peak >= 4 * array + 4 * 64 * 64 > linear.peak
    free = available_bytes()
    assert free is None or free > 1e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    script = """
import ctypes, os, pathlib
from lra_jax import runtime
def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before, size = resident(), 100 << 20
buffer = libc.malloc(size)
ctypes.memset(buffer, 1, size)
libc.free(buffer)
kept = resident() - before
runtime.release_memory()
print(kept > size // 2, resident() - before < size // 2)
"""
    names = "mmap_threshold", "trim_threshold"
    tunables = ":".join(f"glibc.malloc.{name}=34359738368" for name in names)
    end = helpers.run("-c", script, GLIBC_TUNABLES=tunables)
    assert end.stdout.split() == ["True", "True"], end.stderr
