"""A suite in a report: best settings, chance, published rows, the heat map's data."""

import json
from typing import Any

import pytest

from lra_jax import report
from lra_jax.configs import get_preset
from lra_jax.reports.choice import settings_table
from lra_jax.reports.suites import (
    best_groups,
    chart_of_parts,
    find_tests,
    heat_map,
    model_name,
    score,
    suite_table,
)
from lra_jax.tasks import get_task
from reports.made_runs import change, groups_in, make_suite_run


@pytest.fixture
def folder(tmp_path):
    runs = tmp_path / "runs"
    reflect = {"model": {"attention_options": "beta_range=2"}}
    fast = {"train": {"learning_rate": 0.05}}
    make_suite_run(runs / "a", "parity", "delta", 51.0, 53.0)
    make_suite_run(runs / "b", "parity", "delta", 60.0, 52.0, **fast)
    make_suite_run(runs / "c", "parity", "delta", 100.0, 100.0, **reflect)
    make_suite_run(runs / "d", "modular", "delta", 36.0, 30.0)
    bare = {"model": {"short_conv": 0}}
    make_suite_run(runs / "e", "parity", "linear", 50.0, 50.0, **bare)
    return runs


def suite_tests(folder, *tasks):
    """The tests of these tasks among the runs of a folder."""
    return find_tests(list(map(get_task, tasks)), groups_in(folder))


def test_the_setting_of_best_validation_counts(folder):
    best = best_groups(suite_tests(folder, "parity", "modular"))
    assert set(best) == {"delta", "delta beta_range=2", "linear short_conv=0"}
    assert next(iter(best)) == "delta beta_range=2"  # By the mean.
    parity = best["delta"]["parity"]
    assert parity.config.train.learning_rate == get_preset("parity").train.learning_rate
    assert score(parity) == pytest.approx(2.0)  # Of 50 % above chance.
    assert score(best["delta"]["modular"]) == pytest.approx(20.0)
    assert model_name(best["linear short_conv=0"]["parity"]) == "linear short_conv=0"


def test_other_models_and_trainings_have_rows_of_their_own(tmp_path):
    deep = {"model": {"num_layers": 4}}
    taught = {"pretrain": {"steps": 2}, "train": {"steps": 400}}
    make_suite_run(tmp_path / "a", "parity", "linear", 50.0, 50.0)
    make_suite_run(tmp_path / "b", "parity", "linear", 60.0, 99.0, **deep)
    make_suite_run(tmp_path / "c", "parity", "linear", 70.0, 98.0, **taught)
    assert set(best_groups(suite_tests(tmp_path, "parity"))) == {
        "linear",
        "linear num_layers=4",
        "linear steps=400 pretrain.steps=2",
    }


def test_a_checkpoint_to_start_from_is_named_where_there_are_others(tmp_path):
    for number, name in enumerate(("linear", "softmax")):
        start = {"data": {"checkpoint": f"runs/mlm-{name}"}}
        make_suite_run(tmp_path / name / "a", "mlm", name, 50.0, 50.0, "m", "tiny")
        make_suite_run(
            tmp_path / name / "b", "finetune", name, 90.0, 98.0, "f", "tiny", **start
        )
        best = best_groups(suite_tests(tmp_path, "mlm", "finetune"))
        assert len(best) == number + 1
        assert all(set(row) == {"mlm", "finetune"} for row in best.values())
    make_suite_run(tmp_path / "scratch", "finetune", "linear", 60.0, 99.0, "f", "tiny")
    assert set(best_groups(suite_tests(tmp_path, "finetune"))) == {
        "linear encoder, checkpoint=None",
        "linear encoder, checkpoint=runs/mlm-linear",
        "softmax encoder",
    }


def test_settings_that_change_no_training_do_not_separate_rows(tmp_path):
    quiet = {"train": {"log_every": 21, "learning_rate": 2e-3}}
    here, there = ({"data": {"path": path}} for path in ("/a.txt", "/b.txt"))
    make_suite_run(tmp_path / "a", "lm", "linear", 60.0, 60.0, preset="tiny", **here)
    make_suite_run(
        tmp_path / "b", "lm", "linear", 70.0, 70.0, preset="tiny", **there, **quiet
    )
    (row,) = best_groups(suite_tests(tmp_path, "lm")).values()
    assert score(row["lm"]) == 70.0


def test_a_preset_that_is_gone(tmp_path):
    make_suite_run(tmp_path / "a", "parity", "linear", 60.0, 60.0)
    change(tmp_path / "a" / "config.json", preset="old")
    assert set(best_groups(suite_tests(tmp_path, "parity"))) == {"linear"}


def test_all_that_a_protocol_tunes_is_said(tmp_path):
    decay = {"train": {"weight_decay": 0.1, "learning_rate": 1e-3}}
    make_suite_run(tmp_path / "a", "mad-recall", "gla", 60.0, 60.0, preset="official")
    make_suite_run(
        tmp_path / "b", "mad-recall", "gla", 70.0, 70.0, preset="official", **decay
    )
    (test,) = suite_tests(tmp_path, "mad-recall")
    assert suite_table(best_groups([test]), [test]).rows[0][0] == "gla"
    first, _ = settings_table(test.groups).rows
    words = "gla, official (learning_rate=0.001, weight_decay=0.1)"
    assert first[:3] == (words, "yes", "accuracy 70.00")


def test_lengths_that_all_seeds_were_tested_on(tmp_path):
    for seed, accuracy in enumerate((90.0, 70.0)):
        make_suite_run(tmp_path / f"{seed}", "needle", "gla", accuracy, 50.0, seed=seed)
    parts = {"20": 90.0, "40": 1.0, "128": 80.0}
    change(tmp_path / "0" / "result.json", test_accuracy_by_length=parts)
    (needle,) = suite_tests(tmp_path, "needle")
    (line,) = chart_of_parts(needle, best_groups([needle]), "a").panels[0].lines
    assert list(line.x) == [20, 128]
    assert score(needle.groups[0]) == pytest.approx(75)


def test_the_axes_of_lengths_say_what_they_are(tmp_path):
    """Scaled accuracies may be negative, and the parts of mqar are numbers of pairs."""
    make_suite_run(tmp_path / "a", "parity", "delta", 40.0, 50.0)
    make_suite_run(tmp_path / "b", "mqar", "delta", 90.0, 90.0)
    make_suite_run(tmp_path / "c", "parity", "gla", 90.0, 90.0)
    for name, parts in {"b": {"64/4": 95.0, "64/8": 85.0}, "c": {"odd": 9.0}}.items():
        change(tmp_path / name / "result.json", test_accuracy_by_length=parts)
    labels = {}
    for test in suite_tests(tmp_path, "parity", "mqar"):
        chart = chart_of_parts(test, best_groups([test]), "a")
        (axis,) = chart.draw().axes
        labels[test.name] = axis.get_xlabel(), axis.get_ylabel()
    assert labels == {
        "parity": ("length of sequences", "accuracy (scaled: 0 is chance), %"),
        "mqar": ("number of pairs", "accuracy, %"),
    }
    report.write_report(tmp_path, tmp_path / "out", ["md"])
    page = (tmp_path / "out" / "report.md").read_text()
    assert "accuracy against the length of sequences; 0 is chance" in page
    assert "accuracy against the number of pairs.\n" in page


def test_other_examples_are_another_test(tmp_path):
    """An easier test does not stand for a harder one, nor one text for another."""
    runs = tmp_path / "runs"
    hard = {"data": {"train": "32/8:99", "test": "32/8:400"}}
    make_suite_run(runs / "a", "mqar", "softmax", 99.0, 99.0)
    make_suite_run(runs / "b", "mqar", "softmax", 90.0, 90.0, "cd", **hard)
    make_suite_run(runs / "c", "mqar", "linear", 20.0, 20.0, "cd", **hard)
    # The same examples in other batches, and other examples of the same settings.
    buckets = {"data": {"buckets": "none"}}
    for name, data, changes in (("d", "ef", {}), ("e", "ef", buckets), ("f", "gh", {})):
        make_suite_run(runs / name, "parity", "delta", 60.0, 50.0, data, **changes)
    tests = suite_tests(runs, "mqar", "parity")
    easy: Any = get_preset("mqar").data
    assert {test.name: test.words for test in tests} == {
        "mqar 1": "data.train=32/8:99, data.test=32/8:400",
        "mqar 2": f"data.train={easy.train}, data.test={easy.test}",
        "parity 1": "data ef",
        "parity 2": "data gh",
    }
    best = best_groups(tests)
    scores = {name: score(group) for name, group in best["softmax"].items()}
    assert scores == {"mqar 1": 90.0, "mqar 2": 99.0}
    assert set(best["linear"]) == {"mqar 1"} and len(tests[2].groups) == 2
    report.write_report(runs, tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "- mqar 1: data.train=32/8:99, data.test=32/8:400\n" in page
    changed = page.partition("These examples are NOT the preset's:")[2]
    changed = changed.partition("![")[0]
    assert "- mqar 1: train=32/8:99, test=32/8:400\n" in changed
    assert "- mqar 2" not in changed and "- parity" not in changed
    assert "(lengths-parity-2-state-quick.png)" in page


def test_published_rows_are_for_the_published_examples(tmp_path):
    short = {"data": {"length": 64}}
    make_suite_run(tmp_path / "a", "mad-recall", "delta", 90.0, 90.0)
    make_suite_run(tmp_path / "b", "mad-recall", "delta", 95.0, 95.0, "cd", **short)
    tests = suite_tests(tmp_path, "mad-recall")
    table = suite_table(best_groups(tests), tests)
    scores = {row[0]: row[1:3] for row in table.rows}
    assert [test.words for test in tests] == ["data.length=128", "data.length=64"]
    assert scores["delta"] == ("90.0", "95.0")
    assert scores["published: Transformer"] == ("94.1", "-")
    make_suite_run(tmp_path / "c", "images", "flow", 96.0, 96.0, preset="small")
    tests = suite_tests(tmp_path, "images")
    names = [row[0] for row in suite_table(best_groups(tests), tests).rows]
    assert names == ["flow encoder"]  # No chance; the digits are not ImageNet.


def test_the_page_of_a_suite(folder, tmp_path):
    out = tmp_path / "report"
    assert report.write_report(folder, out) == []
    page = (out / "report.md").read_text()
    lines = {
        line.split("|")[1].strip(): line for line in page.splitlines() if "|" in line
    }
    assert "Suite state, preset quick" in page and "All tasks" not in page
    assert "Test examples: parity" in page and "NOT the preset's" not in page
    cells = [x.strip() for x in lines["delta"].split("|")[2:]]
    assert cells[:6] == ["2.0", "20.0", "11.0", "4,096", "1,234", "1"]
    chance = [x.strip() for x in lines["chance"].split("|")[2:4]]
    assert [float(x) for x in chance] == [0.0, 0.0]
    row = lines["published: DeltaNet, eigenvalues in [-1, 1]"]
    assert [x.strip() for x in row.split("|")[2:4]] == ["100.0", "97.1"]
    data = json.loads((out / "suite-state-quick.json").read_text())["data"]
    assert data["delta beta_range=2"] == {"parity": pytest.approx(100.0)}
    for name in ("suite-state-quick", "lengths-parity-state-quick"):
        assert (out / f"{name}.png").stat().st_size > 5_000
        assert f"({name}.png)" in page


def test_a_model_with_many_changed_settings_has_a_picture(tmp_path):
    """Its long name leaves room for the cells; matplotlib would warn otherwise."""
    changed = {"num_layers": 1, "embed_dim": 16, "qkv_dim": 16, "mlp_dim": 48}
    make_suite_run(tmp_path / "a", "parity", "gla", 51.0, 53.0, model=changed)
    (test,) = suite_tests(tmp_path, "parity")
    (name,) = best_groups([test])
    assert len(name) > 40
    heat_map("a", {name: {test.name: 51.0}}, [test], "").png()


def write_language_run(folder, rate, loss, accuracy):
    """A run of ``lm``, whose checkpoints are chosen by the loss."""
    fast = {"train": {"learning_rate": rate}}
    make_suite_run(folder, "lm", "delta", accuracy, accuracy, preset="tiny", **fast)
    losses = {"test_loss_best": loss, "valid_loss_best": loss}
    scores = {"test_bits_per_byte_best": 2 * loss, "test_accuracy_by_length": {}}
    change(folder / "result.json", **losses, **scores)


def test_language_models_are_compared_by_their_loss(tmp_path):
    """As by a sweep, and with their own scores: accuracies say little of them."""
    runs = tmp_path / "runs"
    write_language_run(runs / "a", 0.001, loss=1.5, accuracy=40.0)
    write_language_run(runs / "b", 0.002, loss=1.25, accuracy=39.0)
    (lm,) = suite_tests(runs, "lm")
    assert best_groups([lm])["delta"]["lm"].config.train.learning_rate == 0.002
    report.write_report(runs, tmp_path / "out", ["md"])
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| model | lm, bits per byte |" in page
    assert "| delta |             2.500 |" in page
    assert "Published rows" not in page
