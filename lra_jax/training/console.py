"""The output of a run: a progress bar on a terminal, plain lines anywhere else."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
)
from rich.table import Column

from lra_jax import progress

Item = TypeVar("Item")


def format_seconds(seconds: float) -> str:
    """``3725`` to ``1:02:05``, ``65`` to ``1:05``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"


class _Console(Console):
    """A console that notes when its output is closed or full, and then drops it."""

    broken = False

    def on_broken_pipe(self) -> None:
        """Stops printing, instead of ending the process."""
        self.quiet = self.broken = True


class RunConsole:
    """Prints the progress of a run.

    Attributes:
      start: the step from which this process resumes; set it before entering.
      work: total cost of all steps before one, in any unit, from which the time left is
        estimated. By default all steps cost the same.
      has_accuracy: False where another score takes its place.
    """

    def __init__(self, steps: int, quiet: bool = False):
        self._console = _Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._steps, self.start = steps, 0
        self.work: Callable[[int], float] = float
        self.has_accuracy = True
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._row = self._bar.add_task("training", total=steps, figures="")

    @property
    def broken(self) -> bool:
        """Whether nobody reads the output any more."""
        return self._console.broken

    def __enter__(self) -> Self:
        self._bar.update(self._row, completed=self.start)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def line(self, text: str = "") -> None:
        """Prints one line, above the bar if there is one."""
        try:
            self._console.print(text, markup=False)
            sys.stdout.flush()
        except OSError:
            self._console.on_broken_pipe()

    def doing(self, what: str, quiet: bool = False) -> None:
        """Reports what is happening, as in ``evaluating``, instead of training: in the
        bar, else on a line, unless ``quiet``."""
        self._bar.update(self._row, description=what)
        if self._bar.disable and not quiet:
            self.line(f"{what} ...")

    def track(self, batches: Iterable[Item], total: int) -> Iterable[Item]:
        """Yields the batches of an evaluation, and reports how many are done."""
        if self._console.quiet:
            yield from batches
        elif not self._bar.live.is_started:
            yield from progress.track(batches, "evaluation batches", total)
        else:
            for done, batch in enumerate(batches):
                share = f"evaluating, {done} of {total} batches"
                self._bar.update(self._row, description=share)
                yield batch

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
        each = (self.work(step) - self.work(step - 1)) * speed  # Work in a second.
        left = (self.work(self._steps) - self.work(step)) / each
        rate = f"{speed:.2f} steps/s  {format_seconds(left)} left"
        short = f"loss {loss:.2f}{self._percent(accuracy, 1)}  {rate}"
        self._bar.update(self._row, completed=step, figures=short)
        if self._bar.disable:
            self.line(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}"
                f"{self._percent(accuracy, 2)}  {rate}"
            )

    def _percent(self, accuracy: float, digits: int) -> str:
        if not self.has_accuracy:
            return ""
        return f"  accuracy {100 * accuracy:{digits + 3}.{digits}f} %"

    def validation(self, step: int, means: Mapping[str, float], is_best: bool) -> None:
        """Reports validation metrics, and the task's own scores."""
        more = "".join(
            f"  {name} {value:.3f}"
            for name, value in means.items()
            if name not in ("loss", "accuracy")
        )
        self.line(
            f"step {step}  validation loss {means['loss']:.4f}"
            f"{self._percent(means['accuracy'], 2)}{more}"
            + ("  (best so far)" if is_best else "")
        )

    def table(self, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Prints rows of name, number and note under a title."""
        self.line(title)
        width = max(len(name) for name, _, _ in rows)
        for name, number, remark in rows:
            self.line(f"  {name:<{width}}  {number:>7}  {remark}".rstrip())
