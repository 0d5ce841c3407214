"""Compiles the C++ kernels with the machine's compiler, once, and gives them to XLA.

The library is kept in the user's cache folder (``$XDG_CACHE_HOME/lra_jax/kernels``, or
below ``~/.cache``), under a name that depends on the sources, compiler, processor and
version of jaxlib. It contains code for this machine's own processor.

Environment variables:
  CXX               the compiler, a command; by default c++, g++ or clang++.
  LRA_JAX_NATIVE=0  does not compile; ``implementation="auto"`` is then the XLA form.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jaxlib.version

from lra_jax import files
from lra_jax.errors import expected, first_line

SWITCH = "LRA_JAX_NATIVE"
_KINDS = ("causal", "whole", "packed", "whole_flow", "packed_flow")
_KINDS += ("gated", "delta", "unit", "scan")
CALLS = (
    "lra_causal_flow_terms",
    "lra_causal_flow_backward",
    *(f"lra_{kind}_{way}" for kind in _KINDS for way in ("forward", "backward")),
)
"""The functions of the library, which are also the names of XLA's calls."""

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-w")
# GCC computes addresses in a product's innermost loop, which takes a tenth of its time.
_FLAGS += ("-fno-ivopts", "-funroll-loops")


def problem() -> str | None:
    """Why this process cannot use the kernels; None = it can.

    The first call compiles and loads them. If that fails although there is a compiler,
    it warns, once.

    Raises:
      ValueError: the environment variable has another value.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise expected(SWITCH, "0 or 1", f"{switch!r}")
    return f"{SWITCH}=0 is in the environment" if switch == "0" else _load()


@functools.cache
def _load() -> str | None:
    try:
        if not _compiler():
            return "there is no C++ compiler (CXX, c++, g++ or clang++)"
        library = _library()
        for name in CALLS:
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    # Whatever is wrong with compiler or folders, the XLA form works.
    except (
        OSError,
        AttributeError,
        RuntimeError,
        ValueError,
        subprocess.SubprocessError,
    ) as error:
        reason = f"its kernels cannot be compiled: {_complaint(error)}"
        warnings.warn(
            f"attention takes its slower form on this CPU, because {reason} "
            f"({SWITCH}=0 hides this warning)",
            stacklevel=1,
        )
        return reason
    return None


def lanes() -> int:
    """Floats of a register: columns of the sums are a multiple of it."""
    return _library().lra_lanes()


@functools.cache
def _library() -> ctypes.CDLL:
    file = _compile()
    try:
        return ctypes.CDLL(str(file))
    except OSError:
        # Cut off by a crash, or made on a system that has changed since.
        file.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compile()))


def _complaint(error: Exception) -> str:
    """The most informative line of a compiler's output."""
    written = getattr(error, "stderr", None) or ""
    lines = [line for line in written.splitlines() if "error" in line]
    return lines[0] if lines else first_line(error)


def _compiler() -> list[str]:
    """The command of the compiler; empty if there is none."""
    command = shlex.split(os.environ.get("CXX", ""))
    return command or [*filter(shutil.which, ("c++", "g++", "clang++"))][:1]


def _compile() -> Path:
    """The library's file, which is made if it does not exist."""
    compiler = _compiler()
    sources = sorted(_SOURCES.glob("*.h")) + sorted(_SOURCES.glob("*.cc"))
    flags = [*_FLAGS, _own_processor(), f"-I{jax.ffi.include_dir()}"]
    run = functools.partial(
        subprocess.run,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    version = run([*compiler, "--version"]).stdout
    parts = [*compiler, version, *_FLAGS, jaxlib.version.__version__, _processor()]
    parts += [source.read_text("utf-8") for source in sources]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lra_jax" / "kernels"
    library = folder / f"{name}.so"
    if library.exists():  # Works even where nothing can be written.
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder / f"{name}.lock"):
        if not library.exists():
            with files.replacing(library) as partial:
                # A silence of half a minute looks like a hang.
                print(
                    "compiling attention's kernels for this CPU, once "
                    f"({SWITCH}=0 takes the slower XLA form instead) ...",
                    file=sys.stderr,
                    flush=True,
                )
                code = [str(x) for x in sources if x.suffix == ".cc"]
                run([*compiler, *flags, *code, "-o", str(partial)])
    return library


def _own_processor() -> str:
    """The flag that permits all instructions of this machine."""
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    return "-march=native" if x86 else "-mcpu=native"


def _processor() -> str:
    """Tells processors with other instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
