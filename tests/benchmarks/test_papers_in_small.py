"""The papers in small: what is planned, chosen and shown."""

import json

import papers_in_small as SCRIPT
import pytest

from lra_jax.configs import get_preset
from lra_jax.models import EncoderConfig
from lra_jax.tasks.encoder import parse_options


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
        **{"parameters": 5, "steps_per_second": 2.0, "state_size": 7, "steps": 9},
        **{"test_bits_per_byte_best": score, "data": "text", "data_fingerprint": "ab"},
    }


def test_the_rate_of_the_lowest_validation_loss_counts(tmp_path) -> None:
    part = SCRIPT.PARTS["flow"]
    found = {
        "flow; rate 0.1": [result(tmp_path, 0.1, (3.0, 1.0), 2.5)],
        # The better score on the test is not what is chosen by.
        "flow; rate 0.2": [result(tmp_path, 0.2, (3.0, 1.5), 2.0)],
        "softmax; rate 0.1": [
            result(tmp_path, 0.1, (3.0, 1.0), 2.0),
            result(tmp_path, 0.1, (3.0, 1.0), 3.0 + 1e-9),
        ],
    }
    names, rates = ["softmax", "flow", "lost"], [0.1, 0.2]
    best = SCRIPT.best_rates(names, rates, found, {})
    assert best == {"softmax": 0.1, "flow": 0.1}
    earlier = {
        "flow": {"learning_rate": 0.05, "curve": [[0, 3.0], [1, 0.9]]},
        "softmax": {"learning_rate": 0.05, "curve": [[0, 3.0], [1, 1.1]]},
    }
    best_of_all = SCRIPT.best_rates(names, rates, found, earlier)
    assert best_of_all == {"softmax": 0.1, "flow": 0.05}
    rows = SCRIPT.described(part, best, found)
    assert rows["flow"]["learning_rate"] == 0.1 and rows["flow"]["score"] == 2.5
    assert rows["flow"]["curve"] == [(0, 3.0), (1, 1.0)]
    assert rows["softmax"]["scores"] == [2.0, 3.0 + 1e-9]
    report = SCRIPT.make_report("flow", rows, found)
    assert report["commit"] == "of rate 0.1; of rate 0.2"
    table = SCRIPT.table(report)
    assert "| softmax | 2.500 ± 0.500 | 1.000 | 0.1 | 7 |" in table
    assert (
        "of 2 seeds, or fewer where no range is given" in table
        and "fingerprint ab" in table
    )


def test_further_seeds_join_the_earlier_ones(tmp_path, monkeypatch) -> None:
    part, first = SCRIPT.PARTS["flow"], "flow; rate 0.1"
    earlier = {first: [result(tmp_path, 0.1, (3.0, 1.0), 2.0)]}
    again = {first: [result(tmp_path, 0.1, (3.0, 1.0), 4.0)]}
    new = {"softmax; rate 0.2": [result(tmp_path, 0.2, (3.0, 1.0), 1.0)]}
    runs = SCRIPT.joined(earlier, new, again)
    scores = SCRIPT.scored(part, runs[first])
    assert scores == {"score": 3.0, "scores": [2.0, 4.0]}
    assert list(runs) == [first, *new] and len(earlier[first]) == 1
    best = {"flow": 0.1, "softmax": 0.2}
    assert list(SCRIPT.described(part, best, runs, without=["flow"])) == ["softmax"]
    again[first][0]["data_fingerprint"] = "cd"
    with pytest.raises(ValueError, match=r"flow.*expected the data_fingerprint"):
        SCRIPT.joined(earlier, new, again)
    longer = result(tmp_path, 0.3, (3.0, 1.0), 1.0) | {"steps": 10}
    with pytest.raises(ValueError, match=r"flow; rate 0\.3: expected the steps"):
        SCRIPT.joined(earlier, {"flow; rate 0.3": [longer]}, {})
    monkeypatch.setattr(SCRIPT, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"--extend: expected .*flow\.json"):
        SCRIPT.published("flow")


@pytest.mark.parametrize("name", SCRIPT.PARTS)
def test_a_part_has_models_that_can_be_made(name: str) -> None:
    part = SCRIPT.PARTS[name]
    assert part.baseline in part.models
    for flags in part.models.values():
        given = dict(flag[2:].split("=", 1) for flag in flags)
        options = parse_options(given.get("model.attention_options", ""))
        causal = get_preset(part.task).model.is_causal
        mechanism = given["attention"]
        EncoderConfig(mechanism=mechanism, options=options, is_causal=causal)
    page = SCRIPT.PAGE.read_text()
    assert f"<!-- {name} -->" in page and f"<!-- end of {name} -->" in page
    file = SCRIPT.RESULTS / f"{name}.json"
    if file.exists():
        assert SCRIPT.table(json.loads(file.read_text())) in page
