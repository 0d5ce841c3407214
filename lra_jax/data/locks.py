"""One process of this machine at a time."""

import contextlib
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def locked(file: pathlib.Path) -> Iterator[None]:
    """Waits for, and holds, the lock of a file. It ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows: the renames at the end still decide.
        yield
        return
    with file.open("a") as lock:
        # Some network file systems have no locks; there, too, the renames decide.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
