"""Weights & Biases, by a module in its place that writes down its calls.

With what it needs the package itself weighs 100 MB.
"""

import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import helpers
import pytest

from lra_jax import train
from lra_jax.training.loop import Interrupted
from lra_jax.training.metrics import read_metrics
from lra_jax.training.session import Session
from lra_jax.training.tracking import Tracker

STAND_IN = '''
import json
from pathlib import Path


class Error(Exception):
    """As of the package."""


def Settings(**settings):
    return settings


def init(**settings):
    if settings["project"] == "closed":
        raise Error("no API key\\nlog in")
    return Run(settings)


class Run:
    def __init__(self, settings):
        self._file = Path(settings["dir"]) / "calls.jsonl"
        self.summary = self
        names = "project", "id", "resume", "name"
        self._note("init", {name: settings[name] for name in names})

    def _note(self, *call):
        with self._file.open("a") as file:
            file.write(json.dumps(call) + "\\n")

    def define_metric(self, name, step_metric):
        self._note("define_metric", [name, step_metric])

    def log(self, values):
        self._note("log", values)

    def update(self, values):
        self._note("summary", values)

    def finish(self, exit_code):
        self._note("finish", exit_code)
'''


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Reads the calls that sessions in ``tmp_path / "run"`` have made since."""
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "run" / "calls.jsonl"

    def read():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        return records

    yield read
    sys.modules.pop("wandb", None)


def events_in(folder: Path) -> list[Any]:
    """The events of TensorBoard in a folder, in the order of its files' names."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    records = []
    for file in sorted(folder.iterdir()):
        content = io.BytesIO(file.read_bytes())
        while header := content.read(12):
            (length,) = struct.unpack("<Q4x", header)
            records.append(event_pb2.Event.FromString(content.read(length)))
            assert len(content.read(4)) == 4
    return records


def _values(events: list[Any]) -> list[tuple[Any, Any]]:
    return [(event, value) for event in events for value in event.summary.value]


def test_a_run_is_one_run_there_through_all_sessions(data_dir, tmp_path, calls):
    workdir = tmp_path / "run"
    train_settings = {"steps": 12, "eval_every": 4, "length_warmup": ""}
    config = helpers.tiny(data_dir, workdir, train=train_settings)
    with Session(config.replace(wandb="mine"), quiet=True) as session:
        session.console = helpers.Closed(12, quiet=True)
        with pytest.raises(Interrupted):
            session.run()
    first = calls()
    assert first[0][0] == "init" and first[1] == ["define_metric", ["*", "step"]]
    begun = first[0][1]
    assert begun == {
        **{"project": "mine", "resume": "allow", "name": "run"},
        "id": (workdir / "wandb" / "id").read_text(),
    }
    with Session(config.replace(wandb="mine"), quiet=True) as session:
        result = session.run()
    second = calls()
    assert second[0] == ["init", begun]
    assert second[-2:] == [["summary", result.to_dict()], ["finish", 0]]
    sent = [values for name, values in first + second if name == "log"]
    written = []
    for line in read_metrics(workdir):
        step, split = line.pop("step"), line.pop("split")
        written.append({"step": step, **{f"{split}/{n}": v for n, v in line.items()}})
    assert sent == written
    events = events_in(workdir / "events")
    assert [event.step for event in events if event.HasField("session_log")] == [1, 8]
    shown = [(event.step, x.tag, x.simple_value) for event, x in _values(events)]
    expected = [(x["step"], tag, x[tag]) for x in written for tag in x if tag != "step"]
    assert shown == [(*place, pytest.approx(float(x))) for *place, x in expected]
    # What has ended begins no run there, with or without the flag.
    assert train.run(config, quiet=True) == result.to_dict()
    assert train.run(config.replace(wandb="mine"), quiet=True) == result.to_dict()
    assert not (workdir / "calls.jsonl").exists()


def test_a_run_that_fails_is_marked_there(data_dir, tmp_path, calls):
    config = helpers.tiny(data_dir, tmp_path / "run", wandb="mine")
    (tmp_path / "run").mkdir()
    with pytest.raises(RuntimeError), Tracker(config, tmp_path / "run"):
        raise RuntimeError
    assert calls()[-1] == ["finish", 1]


def test_training_goes_on_without_a_service_that_dies(data_dir, tmp_path, calls):
    config = helpers.tiny(data_dir, tmp_path / "run", wandb="mine")

    def closed(values):
        raise BrokenPipeError

    (tmp_path / "run").mkdir()
    with Tracker(config, tmp_path / "run") as tracker:
        tracker._run.log = closed
        with pytest.warns(UserWarning, match=r"^--wandb: no longer reported to, after"):
            tracker.write(1, {"loss": 2.0})
        tracker.write(2, {"loss": 1.0})
    assert calls()[-1][0] == "define_metric"


@pytest.mark.parametrize(
    ("project", "package", "got"),
    [
        ("closed", STAND_IN, "a project"),
        ("mine", None, "the package wandb, from: python -m pip install wandb"),
    ],
    ids=["no login", "no package"],
)
def test_what_cannot_begin_there(
    data_dir, tmp_path, calls, capsys, monkeypatch, project, package, got
):
    if package is None:
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        (tmp_path / "wandb.py").write_text(package)
    config = helpers.tiny(data_dir, tmp_path / "run", wandb=project)
    with pytest.raises(SystemExit) as stop:
        train.main(helpers.flags(config))
    part = f"--wandb: expected {got}"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)
