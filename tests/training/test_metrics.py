"""``metrics.jsonl``: what is missing or has changed is named."""

import json
import re
import shutil

import helpers
import pytest
from run_helpers import LATEST, STEPS

from lra_jax import seals, train
from lra_jax.report import write_report
from lra_jax.training import metrics
from lra_jax.training.metrics import missing_reports, read_metrics


@pytest.mark.parametrize(
    ("kept", "steps", "words"),
    [
        ([5, 10, 15], 15, ""),
        ([5, 10], 14, ""),
        ([5, 15], 15, "1 fewer, the first of step 10"),
        ([5, 10], 15, "1 fewer, the first of step 15"),
        ([], 15, "3 fewer, the first of step 5"),
    ],
)
def test_reports_that_are_missing(kept: list[int], steps: int, words: str):
    lines = [{"split": "train", "step": step} for step in kept]
    lines += [{"split": "valid", "step": step} for step in range(1, 16)]
    expected = f"expected a report every 5 steps, got {words}" if words else ""
    assert missing_reports(lines, steps, 5) == expected


def test_reports_of_pretraining_count():
    lines = [{"split": "pretrain", "step": 5}, {"split": "train", "step": 10}]
    assert missing_reports(lines, 10, 5) == ""


def test_a_cut_line_of_metrics_is_dropped(tmp_path):
    line = '{"step": 4, "split": "train"}'
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 8, "spl')
    assert read_metrics(tmp_path) == [{"step": 4, "split": "train"}]


@pytest.mark.parametrize(
    "line", ['{"step": 4, "spl', "[]", "4", '{"split": "train"}', "\xff", ""]
)
def test_damaged_metrics(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    whole = '{"step": 4, "split": "train"}\n'
    file.write_text(f"{whole}{line}\n{whole}", encoding="latin-1")
    words = rf"^{file}, line 2: expected metrics.*, got [^\n]*$"
    with pytest.raises(ValueError, match=words):
        read_metrics(tmp_path)


def test_what_a_finished_run_has_lost_is_named(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "metrics.jsonl").unlink()
    (workdir / "model.safetensors").unlink()
    train.main(helpers.flags(finished.config.replace(workdir=str(workdir))))
    out = capsys.readouterr().out
    assert "metrics.jsonl: expected a report every 4 steps, got 10 fewer" in out
    command = f"python -m lra_jax.evaluate --workdir={workdir} --save="
    assert f"model.safetensors is missing; `{command}" in out
    assert len(write_report(workdir, out=tmp_path / "report")) == 1
    page = (tmp_path / "report" / "report.md").read_text()
    assert "without some of its metrics:" in page


def test_lost_metrics_are_named_and_the_run_goes_on(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    (workdir / "metrics.jsonl").write_text("")
    train.main(helpers.flags(finished.config.replace(workdir=str(workdir))))
    out = capsys.readouterr().out
    assert "expected a report every 4 steps, got 10 fewer, the first of step 4" in out
    result = json.loads((workdir / "result.json").read_text())
    assert result["test_accuracy_best"] == finished.result.test_accuracy_best


@pytest.mark.parametrize("how", helpers.DAMAGE)
def test_metrics_that_were_changed(finished, foreign, copied, how):
    file = copied / "metrics.jsonl"
    helpers.damage(file, how, foreign.workdir / "metrics.jsonl")
    seal, _ = seals.read(copied / LATEST)
    try:
        line = metrics.changed_metrics(copied, STEPS, 4, seal)
    except ValueError as error:
        line = str(error)
    assert re.match(f"{file}(, line [0-9]+)?: expected .*, got ", line), line
    assert "\n" not in line
