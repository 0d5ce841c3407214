"""A run goes on where its data have been moved to another path."""

import json
import shutil
from typing import Any

import helpers
import pytest

from lra_jax import train
from lra_jax.configs.listops import ListOpsData
from lra_jax.data import listops
from lra_jax.reports.runs import read_runs
from lra_jax.training import workdir as workdirs
from lra_jax.training.loop import Interrupted
from lra_jax.training.restore import load_run
from lra_jax.training.session import Session

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    sizes = {"num_train": 60, "num_valid": 8, "num_test": 8, "processes": 1}
    lengths = {"min_length": 10, "max_length": 60}
    folder = tmp_path_factory.mktemp("table")
    dataset = listops.prepare(folder / "data", **sizes, **lengths)
    listops.write_tsv(dataset, folder / "files")
    return folder / "files"


def config_of(tmp_path, path, name="run"):
    unread = {name: getattr(ListOpsData, name) for name in ListOpsData.of_generator}
    return helpers.tiny(
        tmp_path / "prepared",
        tmp_path / name,
        train={"steps": 12, "eval_every": 4, "schedule": "constant"},
        data={**unread, "buckets": "60", "path": str(path)},
    )


def test_a_run_goes_on_with_moved_data(table, tmp_path):
    """And ends bit for bit as if they were where they had been."""
    places = [shutil.copytree(table, tmp_path / name) for name in ("one", "other")]
    with Session(config_of(tmp_path, places[0], "whole"), quiet=True) as session:
        wanted = session.run()
    unbroken = session.trainer.state
    first, moved = (config_of(tmp_path, place) for place in places)
    with Session(first, quiet=True) as session, pytest.raises(Interrupted):
        session.console = helpers.Closed(12, quiet=True)
        session.run()
    shutil.rmtree(places[0])
    with Session(moved, quiet=True) as session:
        result = session.run()
        assert session.console.start == 7
    helpers.assert_equal_trees(session.trainer.state, unbroken)
    assert result.test_loss_best == wanted.test_loss_best
    # Whatever reads the run afterwards finds the data, and its seals are whole.
    assert train.run(moved, quiet=True) == result.to_dict()
    data: Any = load_run(str(tmp_path / "run")).config.data
    assert data.path == str(places[1])
    runs, problems = read_runs(tmp_path / "run")
    assert len(runs) == 1 and not problems


def test_other_data_are_refused_wherever_they_are(table, tmp_path):
    config = config_of(tmp_path, table)
    (tmp_path / "run").mkdir()
    workdirs.open_workdir(tmp_path / "run", config, "ab")
    before = (tmp_path / "run" / "config.json").read_text()
    moved = config.replace(data={"path": "elsewhere"})
    with pytest.raises(ValueError, match="on other data, ab"):
        workdirs.open_workdir(tmp_path / "run", moved, "cd")
    generated = config.replace(data={"path": None})
    with pytest.raises(ValueError, match=r"of another config: data\.path="):
        workdirs.open_workdir(tmp_path / "run", generated, "ab")
    assert (tmp_path / "run" / "config.json").read_text() == before
    name = workdirs.identify(tmp_path / "run")
    workdirs.open_workdir(tmp_path / "run", moved, "ab")
    assert workdirs.identify(tmp_path / "run") == name
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["first_path"] == str(table)
    assert written["data"]["path"] == "elsewhere"
