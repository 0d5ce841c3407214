"""benchmarks/soak.py: its plan. tests/training/test_loop.py kills and stops a run."""

import random

import soak


def test_the_phases_are_all_planned():
    planned = soak.make_plan(14, 14, random.Random(0))
    assert {phase for what, phase in planned if what == "SIGKILL"} == set(soak.PHASES)
    assert {phase for what, phase in planned if what != "SIGKILL"} == set(soak.PHASES)
