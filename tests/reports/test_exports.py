"""The rows of a report for other programs."""

import json
from pathlib import Path

import pytest

from lra_jax import report
from lra_jax.configs import get_preset
from lra_jax.reports import exports, results
from reports.made_runs import change, compact, groups_in, make_run


def test_formats_for_other_programs(runs: Path, tmp_path: Path) -> None:
    other = compact(train={"batch_size": 16})
    make_run(runs / "d", 100.0, other, last=50.0, official_data=False)
    out = tmp_path / "out"
    report.main([str(runs), f"--out={out}", "--format=csv,json,latex"])
    names = {"report.csv", "report.json", "report.tex"}
    names |= {"report-settings.csv", "report-settings.json"}
    assert {file.name for file in out.iterdir()} == names
    rows = json.loads((out / "report.json").read_text())
    by_name = {(r["attention"], r["official_data"]): r for r in rows}
    assert by_name["cosformer", True]["test_accuracy"] == 38
    assert by_name["cosformer", True]["deviation_over_seeds"] == pytest.approx(2)
    # Of 2,000 right answers it is not 0: Wilson's interval ends at 1 / (1 + 1 / n).
    error = by_name["cosformer", False]["standard_error_of_examples"]
    assert error == pytest.approx(100 * (1 - 1 / (1 + 1 / 2000)) / 2)
    head, *lines = (out / "report.csv").read_text().splitlines()
    assert head.split(",") == list(rows[0]) and len(lines) == 3
    latex = (out / "report.tex").read_text()
    assert latex.count(r"\begin{table}") == 2 and r"\mathbf{38.00} \pm 2.00" in latex
    assert r"listops, not the LRA's data settings" in latex


@pytest.mark.parametrize(("task", "preset"), [("lm", "tiny"), ("mqar", "quick")])
def test_several_answers_of_an_example_have_no_standard_error(
    tmp_path: Path, task: str, preset: str
) -> None:
    make_run(tmp_path / "a", 40.0, get_preset(task, preset, "linear"))
    groups = groups_in(tmp_path)
    (row,) = exports.rows(groups)
    assert row["standard_error_of_examples"] is None
    assert "(se " not in exports.to_latex(groups)


def test_latex_has_a_table_for_each_score(tmp_path: Path) -> None:
    """F1 and R2 are no accuracies, and not to be compared with them."""
    for name, metric in (("a", "accuracy"), ("b", "f1"), ("c", "r2")):
        config = get_preset("finetune", "tiny", "linear").replace(
            data={"path": f"{name}.csv"}
        )
        make_run(tmp_path / name, 40.0, config, metric=metric, data_fingerprint=name)
    latex = exports.to_latex(groups_in(tmp_path))
    for name, metric in (("", "accuracy"), (", f1", "f1"), (", r2", "r2")):
        assert rf"\caption{{finetune{name}, not the suite's protocol}}" in latex
        assert rf"model & test {metric}, \% & seeds" in latex


def test_latex_has_the_scores_of_language_models(tmp_path: Path) -> None:
    for seed, bits in enumerate((1.5, 1.7)):
        config = get_preset("lm", "tiny", "linear").replace(seed=seed)
        scores = {"test_bits_per_byte_best": bits, "test_perplexity_best": 2**bits}
        make_run(tmp_path / f"lm{seed}", 40.0, config, **scores)
    masked = get_preset("mlm", "tiny", "linear")
    make_run(tmp_path / "mlm", 40.0, masked, test_perplexity_best=9.0)
    latex = exports.to_latex(groups_in(tmp_path))
    assert "test accuracy" not in latex and "40.00" not in latex
    assert r"model & bits per byte & perplexity & seeds & parameters" in latex
    assert r"linear, tiny & $1.600 \pm 0.141$ & $3.039 " in latex
    assert r"linear, tiny & $9.000$ & 1 & " in latex


def test_exports_have_the_memory_of_the_page(runs: Path) -> None:
    """The highest peak of the seeds, and what it covers."""
    change(runs / "a1" / "result.json", peak_memory_bytes=900 << 20)
    groups = groups_in(runs)
    row = exports.rows(groups)[0]
    assert row["peak_memory_bytes"] == 900 << 20
    assert row["peak_memory_kind"] == "process peak RSS"
    shown = results.task_table("listops", groups).rows[0]
    assert shown[5] == "900 MiB (process peak RSS)"


def test_every_device_and_commit_of_the_seeds_is_named(runs: Path) -> None:
    """Their speed is a mean over all of them."""
    change(runs / "a1" / "result.json", device="1 x NVIDIA H200", commit="fedc")
    change(runs / "a2" / "result.json", device=None)
    groups = groups_in(runs)
    row = exports.rows(groups)[0]
    assert row["device"] == "2 CPU cores and 1 x NVIDIA H200"
    assert row["commit"] == "0123456789abcdef and fedc"
    shown = results.task_table("listops", groups).rows[0]
    assert "2,000 test examples; 2 CPU cores and 1 x NVIDIA H200" in shown[7]


def test_exports_say_which_speed_and_error_they_give(runs: Path) -> None:
    change(runs / "a1" / "result.json", steps_per_second_kind="cold")
    groups = groups_in(runs)
    kinds = [row["steps_per_second_kind"] for row in exports.rows(groups)]
    assert kinds == ["cold", "warm"]
    latex = exports.to_latex(groups)
    assert r"$\mathbf{38.00} \pm 2.00$ & 3 & 123,456 & 4.00 (cold) \\" in latex
    # The standard error of 30 % in 2,000 examples.
    assert r"$30.00$ (se $1.02$) & 1 & 123,456 & 4.00 (warm) \\" in latex
    change(runs / "a1" / "result.json", steps_per_second_kind="warm")
    groups = groups_in(runs)
    assert "4.00 (warm)" in exports.to_latex(groups)
    rows = exports.rows(groups)
    assert ",warm," in exports.to_csv(rows).splitlines()[1]
    assert json.loads(exports.to_json(rows))[0]["steps_per_second_kind"] == "warm"
