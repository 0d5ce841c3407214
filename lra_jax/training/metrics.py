"""Metrics as JSON lines, as TensorBoard events if tensorboardX is installed, and for
Weights & Biases if the run asks for it."""

import importlib.util
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lra_jax import seals
from lra_jax.data.checks import shorten
from lra_jax.errors import expected
from lra_jax.files import parse_json, read_bytes, write_text
from lra_jax.training.tracking import Tracker

FILE = "metrics.jsonl"
"""The name of the file in a run directory."""


class MetricsWriter:
    """Appends to ``metrics.jsonl``; each line is ``{"step": ..., "split": ..., ...}``.

    Lines beyond ``resume_step`` are dropped, as the steps will be repeated; that of its
    validation is kept if it was ``validated``. A writer that is not ``active`` writes
    nothing, because another process does.
    """

    def __init__(
        self,
        workdir: Path,
        resume_step: int,
        validated: bool = True,
        active: bool = True,
        tracker: Tracker | None = None,
    ):
        self._file = None
        if not active:
            return
        self._path = workdir / FILE
        kept = kept_metrics(workdir, resume_step, validated)
        write_text(self._path, "".join(json.dumps(m) + "\n" for m in kept))
        # Unbuffered: a failed write is noticed at once, and not retried.
        self._file = self._path.open("ab", buffering=0)
        self._events = _open_events(workdir / "events", resume_step)
        self._tracker = tracker

    def write(self, step: int, split: str, **values: float) -> None:
        """Writes one line, and the values as ``split/name`` elsewhere."""
        if self._file is None:
            return
        line = {"step": step, "split": split, **values}
        try:
            self._file.write(f"{json.dumps(line)}\n".encode())
            named = {f"{split}/{name}": value for name, value in values.items()}
            if self._events is not None:
                _write_events(self._events, step, named)
            if self._tracker is not None:
                self._tracker.write(step, named)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
            if self._events is not None:
                self._events.close()


def _open_events(folder: Path, resume_step: int) -> Any:
    """A file for TensorBoard, if tensorboardX is installed; later steps in earlier
    files are discarded.

    Not a SummaryWriter: its thread keeps data that a full disk refuses, and reports
    that only when the process ends.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        return None
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2

    folder.mkdir(exist_ok=True)
    file = EventsWriter(f"{folder}/{time.time_ns()}")
    messages: Any = event_pb2
    begin = {"step": resume_step + 1, "session_log": {"status": "START"}}
    file.write_event(messages.Event(wall_time=time.time(), **begin))
    return file


def _write_events(file: Any, step: int, values: Mapping[str, float]) -> None:
    from tensorboardX.proto import event_pb2
    from tensorboardX.summary import scalar

    messages: Any = event_pb2
    for name, value in values.items():
        shown = scalar(name, value)
        file.write_event(
            messages.Event(wall_time=time.time(), step=step, summary=shown)
        )
    file.flush()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``; a truncated last line is left out.

    Raises:
      ValueError: another line is damaged.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    text = read_bytes(path).decode("utf-8", errors="replace")
    *lines, last = text.split("\n")
    if last.endswith("}"):
        lines.append(last)
    return [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, 1)]


# Reports of training steps; those of pretraining use no labels.
_REPORTS = ("train", "pretrain")


def kept_metrics(workdir: Path, step: int, validated: bool) -> list[dict[str, Any]]:
    """The lines that are kept when a run resumes from a step."""
    return [
        line
        for line in read_metrics(workdir)
        if line["step"] < step
        or (line["step"] == step and (validated or line["split"] != "valid"))
    ]


def missing_reports(lines: Iterable[Mapping[str, Any]], steps: int, every: int) -> str:
    """In words, how many reports of a run's steps are missing; empty if none."""
    kept = {line["step"] for line in lines if line["split"] in _REPORTS}
    lost = [done for done in range(every, steps + 1, every) if done not in kept]
    if not lost:
        return ""
    needed = f"a report every {every} steps"
    got = f"{len(lost)} fewer, the first of step {lost[0]}"
    return f"expected {needed}, got {got}"


def changed_metrics(
    workdir: Path, step: int, every: int, seal: Mapping[str, Any]
) -> str:
    """One line if a run that resumes from a step has lost reports, or if its metrics
    differ from the digest in the checkpoint's seal; otherwise empty."""
    path = workdir / FILE
    lines = kept_metrics(workdir, step, seal.get("validated", False))
    lost = missing_reports(lines, step, every)
    if lost:
        return f"{path}: {lost}; the others are kept"
    if seal.get("metrics") in (None, seals.digest(lines)):
        return ""
    return f"{path}: expected the lines as written, got others; they are kept"


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        values = parse_json(line)
        rest = [value for name, value in values.items() if name != "split"]
        of_step = isinstance(values["split"], str) and isinstance(values["step"], int)
        if of_step and all(isinstance(value, int | float) for value in rest):
            return values
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise expected(place, "metrics with a step, a split and numbers", shorten(line))
