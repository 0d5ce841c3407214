"""benchmarks/soak.py in small: one kill."""

import os
import random

import helpers
import pytest
import soak

pytestmark = pytest.mark.slow


def test_a_killed_run_ends_like_one_left_alone(tmp_path, monkeypatch):
    """SIGKILL while a checkpoint is written."""
    environment = helpers.environment(soak.ENVIRONMENT | {"LRA_JAX_CPU_DEVICES": "2"})
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if os.environ["JAX_COMPILATION_CACHE_DIR"]:
        (tmp_path / "cache").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    few = [flag.replace("000", "00") for flag in soak.FLAGS]
    monkeypatch.setattr(soak, "FLAGS", (*few, "--train.batch_size=8"))
    monkeypatch.setattr(soak, "make_plan", lambda *_: [("SIGKILL", "checkpoint")])
    report = soak.soak(tmp_path, 1, 0, random.Random(1))
    assert report["kills"] == report["runs"] == report["runs_equal"] == 1, report


def test_the_phases_are_all_planned():
    planned = soak.make_plan(14, 14, random.Random(0))
    assert {phase for what, phase in planned if what == "SIGKILL"} == set(soak.PHASES)
    assert {phase for what, phase in planned if what != "SIGKILL"} == set(soak.PHASES)
