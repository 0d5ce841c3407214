"""The same seed on the same machine gives the same bits, in any process."""

import json
import os

import helpers
import pytest
from test_runs import VARYING, without_times

from lra_jax.training.session import Session

pytestmark = pytest.mark.slow


def test_another_process_and_hash_seed(finished, tmp_path):
    """Data, parameters, optimiser, metrics and scores; all are made anew."""
    # Other than that of this process, which is random unless it was set.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    config = helpers.tiny(tmp_path / "data", tmp_path / "run")
    command = ("-m", "lra_jax.train", *helpers.flags(config))
    ended = helpers.run(*command, PYTHONHASHSEED=seed)
    assert ended.returncode == 0, ended.stderr
    assert without_times(tmp_path / "run") == without_times(finished.workdir)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for name, value in finished.result.items():
        if name not in VARYING:
            assert result[name] == value, name
    with Session(config, quiet=True) as session:
        session.trainer.restore()
    helpers.assert_equal_trees(session.trainer.state, finished.trainer.state)
