"""The papers in small: what is planned, chosen and shown."""

import json

import papers_in_small as SCRIPT
import pytest

from lra_jax.configs import get_preset
from lra_jax.models import ModelConfig
from lra_jax.models.config import parse_options


def result(folder, rate: float, losses: tuple[float, ...], score: float) -> dict:
    """A finished run of a model at a rate, and its metrics."""
    workdir = folder / f"{rate}-{score}"
    workdir.mkdir()
    lines = [
        json.dumps({"step": step, "split": "valid", "loss": loss})
        for step, loss in enumerate(losses)
    ]
    (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "command": f"python -m lra_jax.train --workdir=first --workdir={workdir}",
        "commit": f"of rate {rate}",
        **{"parameters": 5, "state_size": 7, "test_bits_per_byte_best": score},
    }


def test_the_rate_of_the_lowest_validation_loss_counts(tmp_path) -> None:
    part = SCRIPT.PARTS["flow"]
    results = {
        "flow; rate 0.1": [result(tmp_path, 0.1, (3.0, 1.0), 2.5)],
        # The better score on the test is not what is chosen by.
        "flow; rate 0.2": [result(tmp_path, 0.2, (3.0, 1.5), 2.0)],
        "softmax; rate 0.1": [
            result(tmp_path, 0.1, (3.0, 1.0), 2.0),
            result(tmp_path, 0.1, (3.0, 1.0), 3.0),
        ],
    }
    best = SCRIPT.best_rates(["softmax", "flow", "lost"], [0.1, 0.2], results)
    assert best == {"softmax": 0.1, "flow": 0.1}
    row = SCRIPT.describe(part, 0.1, results["softmax; rate 0.1"])
    assert (row["learning_rate"], row["score"]) == (0.1, 2.5)
    assert row["scores"] == [2.0, 3.0] and row["curve"] == [(0, 3.0), (1, 1.0)]
    report = SCRIPT.make_report("flow", {"softmax": row}, results)
    assert report["commit"] == "of rate 0.1; of rate 0.2"


def test_further_seeds_run_at_the_best_rates_only() -> None:
    plan = SCRIPT.make_plan(SCRIPT.PARTS["flow"], [], [("flow", 0.1)], 1, 2)
    assert [run.config.seed for run in plan] == [1, 2]
    assert {run.series for run in plan} == {"flow; rate 0.1"}
    assert {run.config.train.learning_rate for run in plan} == {0.1}


@pytest.mark.parametrize("name", SCRIPT.PARTS)
def test_a_part_has_models_that_can_be_made(name: str) -> None:
    part = SCRIPT.PARTS[name]
    assert part.baseline in part.models
    for flags in part.models.values():
        settings = dict(flag[2:].split("=", 1) for flag in flags)
        options = parse_options(settings.get("model.attention_options", ""))
        causal = get_preset(part.task).model.is_causal
        mechanism = settings["attention"]
        ModelConfig(
            mechanism=mechanism, attention_options=options, is_causal=causal
        ).check()
