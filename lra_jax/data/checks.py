"""Checks of what a user can get wrong, and names for what a user gave."""

import hashlib
import operator
import os
import pathlib
from collections.abc import Iterable


def check_integer(name: str, value: int, least: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `least`."""
    try:
        operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def existing(path: str | os.PathLike) -> pathlib.Path:
    """The path, absolute; raises ValueError where nothing lies there."""
    found = pathlib.Path(path).expanduser().absolute()
    if not found.exists():
        raise ValueError(f"--data.path={path} does not exist")
    return found


def digest(files: Iterable[pathlib.Path]) -> str:
    """A short name for files as they are now: places, sizes and times of change."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    identity = [(name, s.st_size, s.st_mtime_ns) for name, s in sorted(stats)]
    return hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()


def line_count(file: pathlib.Path) -> int:
    """Lines of a file; a last one need not end."""
    count, last = 0, b"\n"
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")
