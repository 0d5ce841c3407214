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

    def time_step(trainer, step, batch):
        seen["timed"].append(batch["tokens"].shape[1])
        return 1.0

    def flops(trainer, batch):
        seen["counted"].append(batch["tokens"].shape[1])
        return ""

    monkeypatch.setattr(dry_run, "_time_step", time_step)
    monkeypatch.setattr(dry_run, "_flops", flops)
    with Session(config, quiet=True, dry=True) as session:
        dry_run.estimate(session.trainer)
    assert seen["counted"] == [max(seen["timed"])]
    assert seen["timed"][0] < max(seen["timed"])


def test_each_part_of_a_run_has_its_own_price(data_dir, dataset, tmp_path) -> None:
    """Three steps of pretraining, and five with labels."""
    config = helpers.tiny(
        data_dir,
        tmp_path,
        train={"steps": 8, "warmup": 1, "length_warmup": ""},
        pretrain={"steps": 3},
        data={"buckets": "60"},
    )
    with Session(config, quiet=True, dry=True) as session:
        said: list[str] = []
        facts = dry_run.estimate(session.trainer, said.append)
    assert "(2 programs)" in facts["compiling"]
    timed = [line.partition(":")[0] for line in said if line.startswith("timed")]
    assert timed == [f"timed step {n} of 8" for n in range(1, 9)] * 2
    times = re.findall(r"([\d.e-]+) s(?: of (\w+),?)? ", facts["a step"])
    (*parts, (mean, _)) = times
    assert [name for _, name in parts] == ["pretraining", "training"]
    seconds = [float(one) for one, _ in parts]
    assert min(seconds) * 0.5 < float(mean) < max(seconds) * 2
