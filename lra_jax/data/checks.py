"""Finds, reads and names the user's files."""

import functools
import hashlib
import importlib.util
import io
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lra_jax.errors import expected, reason
from lra_jax.files import expand_home, read_bytes, read_lines


def existing_path(path: str | os.PathLike) -> pathlib.Path:
    """The absolute path; raises ValueError if it is empty or does not exist."""
    place = expand_home(path, "--data.path").absolute()
    if not place.exists():
        got = f"{place}, which does not exist"
        raise expected("--data.path", "a file or a folder", got)
    return place


def find_installed(package: str, *parts: str, needed: str) -> pathlib.Path:
    """A file or folder of another package, which is not imported.

    Raises:
      ValueError: the package is not installed; ``needed`` says what to do.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (place := pathlib.Path(folder, *parts)).exists():
            return place
    raise expected("--data.path", needed, None)


def read_npz(file: pathlib.Path, kind: str = "an .npz file") -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file.

    Raises:
      ValueError: it is not ``kind``.
      OSError: it cannot be read.
    """
    content = io.BytesIO(read_bytes(file))
    try:
        with np.load(content, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # A damaged header raises whatever its parser meets.
        raise expected(str(file), kind, reason(error)) from error


def take(
    arrays: Mapping[str, np.ndarray],
    name: str,
    needed: str,
    kinds: str,
    shape: Sequence[int | None],
) -> np.ndarray:
    """The array of this name in a file.

    Args:
      arrays: those of the file.
      name: of the array, and of the errors.
      needed: what is expected, for errors.
      kinds: NumPy's letters of the dtypes that are allowed.
      shape: the shape; None is any size from 1.

    Raises:
      ValueError: the array is missing, or has another dtype or shape.
    """
    array = arrays.get(name, np.array(None))
    sizes = zip(array.shape, shape, strict=False)
    fits = all(size == one if one is not None else size > 0 for size, one in sizes)
    if not fits or array.ndim != len(shape) or array.dtype.kind not in kinds:
        got = f"{array.dtype}{list(array.shape)}" if name in arrays else "none"
        raise expected(name, needed, got)
    return array


def digest(files: Iterable[pathlib.Path]) -> str:
    """A short name for files in their current state: paths, sizes and change times."""
    resolved = functools.cache(pathlib.Path.resolve)  # Many files share a few folders.

    def place(file: pathlib.Path) -> str:
        linked = file.is_symlink()
        return str(file.resolve() if linked else resolved(file.parent) / file.name)

    stats = [(place(file), file.stat()) for file in files]
    identity = [(name, s.st_size, s.st_mtime_ns) for name, s in sorted(stats)]
    return hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()


def line_count(file: pathlib.Path) -> int:
    """Number of lines in a file; the last one may lack a line end.

    Raises:
      ValueError: there are none.
    """
    count = sum(1 for _ in read_lines(file))
    if not count:
        raise expected(str(file), "lines", "an empty file")
    return count


def shorten(value: object) -> str:
    """``repr`` of a value from a file, shortened to fit into a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
