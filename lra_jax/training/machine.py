"""Facts for a result, besides its settings: devices, commit, versions and memory."""

import importlib.metadata
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import lra_jax
from lra_jax.data.workers import available_cpus


def peak_memory() -> dict[str, Any]:
    """The most memory that this process has used, and what it covers.

    The peak memory of one device if its runtime reports it; else the resident memory of
    the whole process, data and compiler included. For a resumed run, it is that of the
    last process.
    """
    reported = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in reported:
        peak, kind = reported["peak_bytes_in_use"], "device peak"
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        kind = "process peak RSS"
    return {"peak_memory_bytes": int(peak), "peak_memory_kind": kind}


def describe_devices() -> str:
    """Kind and number of the devices, as in ``2 CPU cores (AMD EPYC)``."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        cores = available_cpus()
        return f"{cores} CPU core{'s' * (cores > 1)} ({_processor()})"
    return f"{len(devices)} x {devices[0].device_kind}"


def _processor() -> str:
    """Model of the processor, or its architecture if the system does not report it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout that contains this package, ending in ``-dirty`` if
    the package was changed since; None outside of a checkout."""
    folder = Path(lra_jax.__file__).parent
    git = ["git", "-C", str(folder)]
    # An environment may be within the checkout of another project.
    ours = [*git, "ls-files", "--error-unmatch", "__init__.py"]
    try:
        subprocess.run(ours, capture_output=True, check=True)
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if same.returncode == 1 else "")


def versions() -> dict[str, str]:
    """Versions of Python, this package and the packages that affect its results."""
    packages = ("jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")
    return {
        "python": platform.python_version(),
        "lra_jax": lra_jax.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
    }
