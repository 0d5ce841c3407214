"""One small dataset, and one finished run, for all tests of the trainer."""

import shutil

import helpers
import pytest

from lra_jax.data import listops
from lra_jax.training.session import Session
from lra_jax.training.trainer import Trainer


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def dataset(data_dir):
    data = {k: v for k, v in helpers.DATA.items() if k != "buckets"}
    return listops.prepare(data_dir, **data)


@pytest.fixture(scope="session")
def finished(data_dir, tmp_path_factory):
    """A run from beginning to end, never interrupted: its closed session."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    config = helpers.tiny(data_dir, workdir, data=helpers.TWO_LENGTHS)
    with Session(config, quiet=True) as session:
        session.run()
    return session


@pytest.fixture(scope="session")
def foreign(data_dir, tmp_path_factory):
    """A run of the same model with another seed, as far as that one went."""
    workdir = tmp_path_factory.mktemp("foreign") / "run"
    config = helpers.tiny(data_dir, workdir, seed=1, train={"eval_every": 40})
    with Session(config, quiet=True) as session:
        session.run()
    return session


@pytest.fixture
def copied(finished, tmp_path):
    """An unfinished copy of the run, to be damaged."""
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    return workdir


@pytest.fixture(scope="session")
def shapes(finished, dataset, tmp_path_factory):
    """A trainer that was never trained, to restore into."""
    folder = tmp_path_factory.mktemp("shapes")
    return Trainer(finished.config, finished.task, dataset, folder)
