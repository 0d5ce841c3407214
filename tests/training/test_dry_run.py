"""A dry run says what a run will cost."""

import re

import helpers
import pytest

from lra_jax import train
from lra_jax.training import dry_run
from lra_jax.training.session import Session


def _seconds(facts: dict[str, str]) -> list[float]:
    """Of a step, of the first ones and of all."""
    return [
        float(x) for x in re.findall(r"([\d.e-]+) s on average over", facts["a step"])
    ]


def test_a_dry_run_says_all_and_leaves_nothing(data_dir, tmp_path, capsys) -> None:
    config = helpers.tiny(data_dir, tmp_path / "run")
    train.main([*helpers.flags(config), "--dry-run=True"])
    said = capsys.readouterr().out
    assert re.search(r"compiling for batches of 8 x (32|60) \.\.\.\n", said)
    assert re.search(r"timed step 1 of 12: [\d.e-]+ s\n", said)
    for part in ("--train.steps ", "parameters", "a step", "arithmetic", "total"):
        assert part in said
    assert not (tmp_path / "run").exists()


def test_time_goes_with_the_tokens_of_a_step(data_dir, dataset, tmp_path) -> None:
    """The first steps show an eighth of each sequence, half of the steps all."""
    settings = {"length_warmup": "5:0.5", "steps": 200, "warmup": 5}
    config = helpers.tiny(data_dir, tmp_path, train=settings)
    with Session(config, quiet=True, dry=True) as session:
        first, mean = _seconds(dry_run.estimate(session.trainer))
    longer = float(dataset.lengths("train").mean()) / 5
    assert mean / first == pytest.approx((1 + longer) / 2, rel=0.01)


def test_the_arithmetic_is_that_of_the_longest_batch(
    data_dir, dataset, tmp_path, monkeypatch
) -> None:
    config = helpers.tiny(data_dir, tmp_path, data={"buckets": "20,30,40,60"})
    seen: dict[str, list[int]] = {"timed": [], "counted": []}

    def timed(trainer, batch):
        seen["timed"].append(batch["tokens"].shape[1])
        return 1.0

    def flops(trainer, batch):
        seen["counted"].append(batch["tokens"].shape[1])
        return ""

    monkeypatch.setattr(dry_run, "_timed", timed)
    monkeypatch.setattr(dry_run, "_flops", flops)
    with Session(config, quiet=True, dry=True) as session:
        dry_run.estimate(session.trainer)
    assert seen["counted"] == [max(seen["timed"])]
    assert seen["timed"][0] < max(seen["timed"])
