"""Files that are either complete or absent, bounded reading, and locks.

All text is UTF-8, whatever the locale. Nothing here writes through a symbolic link,
which somebody else may have put there.

Files that somebody else may have written are read by `read_bytes`, `read_lines` and
`read_json`. They refuse pipes and devices, which may never end, and bound what comes
into memory; every error names the file.
"""

import codecs
import contextlib
import errno
import io
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import Any

from lra_jax.errors import expected, reason

MOST_BYTES = 2 << 30
"""The largest file that is read as a whole."""

_BLOCK = 1 << 20
_LONGEST_LINE = 16 << 20
_DEEPEST_JSON = 100
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a file to read its bytes; a pipe, which may hang, is an `OSError`."""

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    stream = open(path, "rb", opener=without_waiting)  # noqa: SIM115
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises `OSError` unless `open_regular` opens the file."""
    open_regular(path).close()


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a regular file; one of more than `most` bytes is an `OSError`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"more than {most:,} bytes", os.fspath(path))
        # Files of /proc have no size.
        return stream.read(max(size, min(_BLOCK, most)))


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields each line of a regular file, without the mark that some editors put at its
    start; a line longer than any reader expects is a ``ValueError``."""
    number = 0
    with open_regular(path) as stream:
        while line := stream.readline(_LONGEST_LINE):
            number += 1
            if len(line) == _LONGEST_LINE:
                needed = f"fewer than {_LONGEST_LINE:,} bytes"
                raise expected(f"{path}, line {number}", needed, "more")
            yield line if number > 1 else line.removeprefix(codecs.BOM_UTF8)


def read_json(path: str | os.PathLike[str], needed: str = "JSON") -> Any:
    """The values of a JSON file; errors are those of `read_bytes` and `parse_json`.

    ``needed`` is the content that the error says is expected, in words.
    """
    content = read_bytes(path)
    try:
        return parse_json(content)
    except ValueError as error:
        raise expected(str(path), needed, reason(error)) from error


def parse_json(text: str | bytes) -> Any:
    """The values of a JSON text.

    Raises:
      ValueError: it is not JSON, or is nested more deeply than code that walks through
        it could follow.
    """
    too_deep = f"values nested more than {_DEEPEST_JSON} deep"
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [values]
    for _ in range(_DEEPEST_JSON):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(too_deep)
    # Half a character of UTF-16, which could be neither shown nor written.
    json.dumps(values, ensure_ascii=False).encode()
    return values


def expand_home(path: str | os.PathLike[str], name: str) -> pathlib.Path:
    """The path with ``~`` replaced.

    Args:
      path: as it was given.
      name: of the flag or argument.

    Raises:
      ValueError: it is empty, or there is no such user.
    """
    if not os.fspath(path):  # Would be the current folder.
        raise expected(name, "a path", "''")
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        got = f"{os.fspath(path)!r}: no such user"
        raise expected(name, "a path in a home folder that exists", got) from error


@contextlib.contextmanager
def lock(file: pathlib.Path, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a file; it is released when the process ends, however it ends.

    On a file system without locks, nothing is locked. Data are safe even there, because
    they appear by a rename.

    Args:
      file: created if missing, and never removed.
      wait: whether to wait for another process; otherwise a held lock is an error.

    Raises:
      TimeoutError: another process holds the lock.
      OSError: the file cannot be opened, or is a symbolic link.
    """
    import filelock  # Not needed for --help.

    # A soft lock, the fallback, would outlast a killed process on another machine.
    held = filelock.FileLock(file, blocking=wait, fallback_to_soft=False)
    try:
        held.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new empty file that replaces ``path`` at the end.

    After an error ``path`` is unchanged. A device or a pipe, such as /dev/stdout, is
    not replaced but refused.
    """
    if path.exists() and not path.is_file():
        code = errno.EISDIR if path.is_dir() else errno.EINVAL
        reason = os.strerror(code) if path.is_dir() else "not a regular file"
        raise OSError(code, reason, str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.touch(exist_ok=False)
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def make_room(file: pathlib.Path) -> None:
    """Makes the folder of a file, before the work whose result is written there; an
    `OSError` if it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(_Unwritten), replacing(file):
        raise _Unwritten


class _Unwritten(Exception):
    """Ends a test of writing, and leaves the file as it was."""


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes text so that readers see either all of it or none."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")


def write_json(path: pathlib.Path, values: Any) -> None:
    """Writes JSON so that readers see either all of it or none."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def walk_links(
    root: pathlib.Path, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[pathlib.Path, list[str], list[str]]]:
    """``os.walk`` through links to folders, too; no folder comes twice.

    The order does not depend on the file system.
    """
    seen = set()
    for folder, inside, names in os.walk(root, onerror=onerror, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inside.clear()
            continue
        seen.add(real)
        inside.sort()
        yield pathlib.Path(folder), inside, sorted(names)


def refuse_links(path: str, flags: int) -> int:
    """For ``open(..., opener=refuse_links)``: refuses a symbolic link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
