"""Settings that the command lines apply before jax starts: allocator, devices, caches.

On a Linux CPU more than half of a training step can be page faults: the C library
returns every large buffer to the system and fetches it again in the next step. Settings
of glibc retain the memory (docs/performance.md has the measurements); they are read
when a process starts, so the command lines restart themselves with them.

Environment variables:
  LRA_JAX_ALLOCATOR=system  leaves the C library unchanged.
  LRA_JAX_CPU_DEVICES=n     devices into which the CPU is split, at most 1024; by
                            default one per core, which work on separate examples.
  JAX_COMPILATION_CACHE_DIR compiled programs, by default in the user's cache folder.
"""

import contextlib
import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

from lra_jax import signals
from lra_jax.errors import expected, first_line

_MALLOC = "glibc.malloc."
# Distinguishes the restarted process, and holds the tunables from before.
_MARK = "LRA_JAX_ALLOCATOR_SET"
# jax needs minutes, and all memory, for many more.
_MOST_DEVICES = 1024


def tune_allocator() -> None:
    """Restarts this process with glibc's memory settings, where that helps.

    It helps if jax will run on the CPU of a glibc Linux. Call it before anything else,
    because the command starts again. Does nothing the second time, with
    LRA_JAX_ALLOCATOR=system, or if the user has set malloc's tunables.
    """
    before = os.environ.pop(_MARK, None)
    if before is not None:
        signals.unblock()
        # Processes started by this one only make data, and do not need the settings.
        os.environ.pop("GLIBC_TUNABLES", None)
        if before:
            os.environ["GLIBC_TUNABLES"] = before
        return
    choice = os.environ.get("LRA_JAX_ALLOCATOR", "tuned")
    if choice not in ("tuned", "system"):
        raise expected("LRA_JAX_ALLOCATOR", "'tuned' or 'system'", f"{choice!r}")
    theirs = os.environ.get("GLIBC_TUNABLES", "")
    if choice == "system" or _MALLOC in theirs or not _cpu_on_glibc():
        return
    settings = [f"{_MALLOC}{name}={value}" for name, value in tunables().items()]
    joined = ":".join(filter(None, [theirs, *settings]))
    environment = {**os.environ, "GLIBC_TUNABLES": joined, _MARK: theirs}
    sys.stdout.flush()
    signals.block()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def tunables() -> dict[str, int]:
    """The settings of glibc's malloc.

    All threads share one arena, because the heaps of other threads are too small for a
    training step's buffers, which would come from the system after all. Freed memory is
    kept, the heap grows by 256 MiB, and huge pages are used. Aligning leaves a few
    bytes before a buffer: in a thread's cache they would not merge with the buffer when
    it is freed, and the next one of the same size, which needs them, would not fit into
    its place and make the heap grow. So there is no such cache; and buffers above a
    quarter of the memory (or 2 GiB) are mapped separately in any case, since one that
    did not fit could take all of it.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "arena_max": 1,
        "hugetlb": 1,
        "tcache_count": 0,
        "mmap_threshold": max(memory // 4, 1 << 31),
        "trim_threshold": 1 << 40,
        "top_pad": 1 << 28,
    }


def release_memory() -> None:
    """Returns freed memory to the system, if the C library is glibc.

    With the settings of `tune_allocator` it would keep all of it, which is right for
    steps of one size, but not after the last of them.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def configure_jax(distributed: bool = False, cpu_devices: int | None = None) -> None:
    """Sets the compilation cache and the number of CPU devices; imports jax.

    Settings that the user made, in the environment or in jax.config, are kept. Our own
    cache holds programs of any size.

    Args:
      distributed: do not touch the devices, which must not start before the processes
        of a run have connected.
      cpu_devices: how many devices a CPU is, unless LRA_JAX_CPU_DEVICES says otherwise;
        None = one for each core.

    Raises:
      ValueError: an environment variable has an invalid value.
    """
    devices = os.environ.get("LRA_JAX_CPU_DEVICES") or str(cpu_devices or _cores())
    if not devices.isdecimal() or not 1 <= int(devices) <= _MOST_DEVICES:
        needed = f"a number from 1 to {_MOST_DEVICES}"
        raise expected("LRA_JAX_CPU_DEVICES", needed, f"{devices!r}")
    import jax

    config: Any = jax.config  # Its annotations lack some of its options.
    if config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        config.update("jax_compilation_cache_dir", str(cache / "lra_jax" / "xla"))
        # A run compiles some 60 programs, most in less than a second, so that jax would
        # not keep them; together they take half of its start-up time.
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not forced and config.jax_num_cpu_devices < 0:
        with contextlib.suppress(RuntimeError):  # jax has started in this process.
            config.update("jax_num_cpu_devices", int(devices))
    if distributed:
        return
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # The latter on CUDA without GPUs.
        got = f"{config.jax_platforms!r}: {first_line(error)}"
        raise expected("JAX_PLATFORMS", "devices that can be used", got) from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _cpu_on_glibc() -> bool:
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen:
        return chosen.split(",")[0] == "cpu"
    accelerators = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
    return not any(os.path.exists(path) for path in accelerators)
