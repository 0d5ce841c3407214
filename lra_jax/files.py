"""Files that are either complete or absent, and locks between processes.

All text is UTF-8, whatever the locale. Nothing here writes through a symbolic link,
which somebody else may have put there.
"""

import contextlib
import errno
import json
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(file: pathlib.Path, wait: bool = True) -> Iterator[None]:
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
    lock = filelock.FileLock(file, blocking=wait, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new empty file that replaces ``path`` at the end.

    After an error ``path`` is unchanged. A device or a pipe, such as /dev/stdout, is
    not replaced but refused.

    Raises:
      OSError: the file cannot be written.
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
    """Makes the folder of a file, before the work whose result is written there.

    Raises:
      OSError: the file cannot be written.
    """
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


def walked(
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


def unfollowed(path: str, flags: int) -> int:
    """For ``open(..., opener=unfollowed)``: refuses a symbolic link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
