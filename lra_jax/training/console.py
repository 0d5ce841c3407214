"""The output of a run: a progress bar on a terminal, plain lines anywhere else."""

import collections
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from lra_jax import progress

Item = TypeVar("Item")

# Number of reports over which the speed is measured that gives the time left.
_REPORTS = 10


def format_seconds(seconds: float) -> str:
    """``3725`` to ``1:02:05``, ``65`` to ``1:05``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"


class _Console(Console):
    """A console that notes when nobody reads it; further output is lost."""

    broken = False

    def on_broken_pipe(self) -> None:
        """Stops printing, instead of ending the process."""
        self.quiet = self.broken = True


class _FiguresColumn(TimeElapsedColumn):
    """The training figures, or else the elapsed time: an 80-column terminal has room
    for only one of them."""

    def render(self, task: Task) -> Text:
        if task.description == "training" and task.fields["figures"]:
            return Text(task.fields["figures"])
        return super().render(task)


class RunConsole:
    """Prints the progress of one run.

    Args:
      steps: last step.
      quiet: print nothing.

    Attributes:
      start: the step from which this process resumes; set it before entering.
      work: total cost of all steps before a given one, in any unit, from which the time
        left is estimated. By default all steps cost the same.
    """

    def __init__(self, steps: int, quiet: bool = False):
        self._console = _Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._steps = steps
        self.start = 0
        self.work: Callable[[int], float] = float
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _FiguresColumn(Column(no_wrap=True)),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._cold = False
        self._row = self._bar.add_task("training", total=steps, figures="")
        self._marks: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=_REPORTS + 1
        )

    @property
    def broken(self) -> bool:
        """Whether nobody reads the output any more."""
        return self._console.broken

    def __enter__(self) -> Self:
        self._marks.append((self.start, time.perf_counter()))
        self._bar.update(self._row, completed=self.start)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def line(self, text: str = "") -> None:
        """Prints one line, above the bar if there is one."""
        self._console.print(text, markup=False)
        if not self.broken:
            sys.stdout.flush()

    def doing(self, what: str, quiet: bool = False) -> None:
        """Reports what is happening instead of training: in the bar, else on a line.

        Args:
          what: as in ``evaluating``.
          quiet: print no line.
        """
        self._bar.update(self._row, description=what)
        if self._bar.disable and not quiet:
            self.line(f"{what} ...")

    def track(self, batches: Iterable[Item], total: int) -> Iterable[Item]:
        """Yields the batches of an evaluation, and reports how many are done."""
        if self._console.quiet:
            yield from batches
        elif not self._bar.live.is_started:
            yield from progress.told(batches, "evaluation batches", total)
        else:
            for done, batch in enumerate(batches):
                share = f"evaluating, {done} of {total} batches"
                self._bar.update(self._row, description=share)
                yield batch

    def compiled(self) -> None:
        """The step just done compiled, so its time says nothing about later ones."""
        self._bar.update(self._row, description="training")
        self._cold = True

    def facts(self, facts: Mapping[str, str]) -> None:
        """Prints facts about the run, one per line."""
        width = max(map(len, facts))
        for name, value in facts.items():
            self.line(f"{name:<{width}}  {value}")

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(self._row, completed=step)

    def training(self, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Reports training metrics."""
        if self._cold:  # The time since the last mark includes a compilation.
            self._marks.clear()
            self._cold = False
        self._marks.append((step, time.perf_counter()))
        (first, begun), (_, now) = self._marks[0], self._marks[-1]
        done = self.work(step) - self.work(first)
        rest = self.work(self._steps) - self.work(step)
        left = (now - begun) / done * rest if done else (self._steps - step) / speed
        rate = f"{speed:.2f} steps/s  {format_seconds(left)} left"
        short = f"loss {loss:.2f}  accuracy {100 * accuracy:.1f} %  {rate}"
        self._bar.update(self._row, completed=step, figures=short)
        if self._bar.disable:
            self.line(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  "
                f"accuracy {100 * accuracy:5.2f} %  {rate}"
            )

    def validation(
        self,
        step: int,
        means: Mapping[str, float],
        scores: Mapping[str, float],
        is_best: bool,
    ) -> None:
        """Reports validation metrics, and the task's own scores."""
        more = "".join(f"  {name} {value:.3f}" for name, value in scores.items())
        self.line(
            f"step {step}  validation loss {means['loss']:.4f}  accuracy "
            f"{100 * means['accuracy']:.2f} %{more}"
            + ("  (best so far)" if is_best else "")
        )

    def table(self, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Prints rows of name, number and note under a title."""
        if self._console.is_terminal:
            table = Table("", "test accuracy", "", title=title, title_justify="left")
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        self.line(title)
        width = max(len(name) for name, _, _ in rows)
        for name, number, remark in rows:
            self.line(f"  {name:<{width}}  {number:>7}  {remark}".rstrip())
