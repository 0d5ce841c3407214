"""A folder of runs."""

from pathlib import Path

import pytest

from reports.made_runs import compact, make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds of one mechanism, one of another, and an unfinished one."""
    folder = tmp_path / "runs"
    for seed, accuracy in enumerate([36.0, 38.0, 40.0]):
        config = compact(seed=seed)
        make_run(folder / f"a{seed}", accuracy, config, last=accuracy - 1)
    make_run(folder / "deep" / "b", 30.0, compact("flow"), last=29.0)
    make_run(folder / "c", config=compact("flow", seed=5), finished=False)
    return folder
