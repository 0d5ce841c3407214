"""benchmarks/soak.py in small: one kill."""

import json
import random
import subprocess
import sys

import helpers
import pytest
import soak

pytestmark = pytest.mark.slow


def test_killed_runs_end_like_one_left_alone(tmp_path):
    command = [sys.executable, soak.__file__, "--kills=1", "--stops=0"]
    out = tmp_path / "soak.json"
    ended = subprocess.run(
        [*command, "--seed=1", f"--out={out}"],
        env=helpers.environment({}),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(out.read_text())
    assert (report["kills"], report["stops"]) == (1, 0)
    assert report["runs_equal"] == report["runs"] > 0, report


def test_the_phases_are_all_planned():
    planned = soak.make_plan(14, 14, random.Random(0))
    assert {phase for what, phase in planned if what == "SIGKILL"} == set(soak.PHASES)
    assert {phase for what, phase in planned if what != "SIGKILL"} == set(soak.PHASES)
