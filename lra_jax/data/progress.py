"""Progress on stderr: a bar on a terminal, otherwise a line for each tenth."""

import sys
from typing import Self


class Progress:
    """Use as a context; call ``advance`` with the number of bytes done.

    Args:
      name: the activity.
      total: total number of bytes.
      done: bytes already done.
    """

    def __init__(self, name: str, total: int, done: int = 0):
        from rich import console, progress

        self._name, self._total, self._done = name, max(total, 1), done
        self._tenths = 10 * done // self._total
        self._bar = progress.Progress(
            *progress.Progress.get_default_columns(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            console=console.Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._row = self._bar.add_task(name, total=self._total, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        self._line()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, size: int) -> None:
        """Adds to the bytes done."""
        self._done += size
        self._bar.update(self._row, advance=size)
        if 10 * self._done // self._total > self._tenths:
            self._tenths = 10 * self._done // self._total
            self._line()

    def _line(self) -> None:
        if self._bar.disable:
            done, total = self._done / 1e6, self._total / 1e6
            print(f"{self._name}: {done:.1f} of {total:.1f} MB", file=sys.stderr)
