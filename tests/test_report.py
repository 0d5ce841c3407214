"""The report: what it reads, what it computes, and that its page shows all of it."""

import json
import math

import helpers
import pytest

from lra_jax import report
from lra_jax.configs import get_preset
from lra_jax.reports import charts, curves, exports, results
from lra_jax.reports.comparison import differing_settings
from lra_jax.reports.runs import group_runs, read_runs, repeated, unfinished

LENGTHS = "test_accuracy_by_length"


def make_run(folder, accuracies, *, config=None, finished=True, **changes):
    """A run directory as the trainer leaves it."""
    config = config or get_preset(preset="compact", attention="cosformer")
    best, last = accuracies
    folder.mkdir(parents=True)
    values = config.to_dict() | {"data_fingerprint": "ab"}
    (folder / "config.json").write_text(json.dumps(values))
    lines = [
        {"step": step, "split": split, "accuracy": step / 10_000, "loss": 1.0}
        for step in (1000, 2000)
        for split in ("train", "valid")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    text += helpers.reports(config, 5000) * finished
    (folder / "metrics.jsonl").write_text(text)
    result = {
        "task": config.task,
        "attention": config.attention,
        "preset": config.preset,
        "seed": config.seed,
        "test_accuracy_best": best,
        "test_accuracy_last": last,
        "test_examples": 2000,
        "best_step": 2000,
        "steps": 5000,
        "steps_per_second": 4.0,
        "seconds": 100.0,
        "parameters": 123_456,
        "peak_memory_bytes": 300 << 20,
        "peak_memory_kind": "process peak RSS",
        "steps_per_second_kind": "warm",
        "valid_accuracy_best": 20.0,
        "valid_loss_best": 1.0,
        "official_data": True,
        "data_fingerprint": "ab",
        "device": "2 CPU cores",
        "versions": {"jax": "0.10.2"},
        "commit": "0123456789abcdef",
        "command": "python -m lra_jax.train --task=listops",
    }
    if finished:
        (folder / "result.json").write_text(json.dumps(result | changes))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Three seeds of one mechanism, one of another, and an unfinished one."""
    folder = tmp_path / "runs"
    for seed, accuracy in enumerate([36.0, 38.0, 40.0]):
        config = get_preset(preset="compact", attention="cosformer").replace(seed=seed)
        make_run(folder / f"a{seed}", (accuracy, accuracy - 1), config=config)
    flow = get_preset(preset="compact", attention="flow")
    make_run(folder / "deep" / "b", (30.0, 29.0), config=flow)
    make_run(folder / "c", (0, 0), config=flow.replace(seed=5), finished=False)
    return folder


def test_groups_have_mean_and_deviation_over_seeds(runs):
    found, problems = read_runs(runs)
    groups = group_runs(found)
    assert not problems and len(found) == 5
    assert [len(group.runs) for group in groups] == [3, 1]
    best = groups[0]
    assert best.mean("test_accuracy_best") == 38
    assert best.deviation("test_accuracy_best") == pytest.approx(2.0)  # Sample sd.
    assert groups[1].deviation("test_accuracy_best") is None
    assert unfinished(found) == [f"{runs / 'c'}: 2,000 of 5,000 steps"]


def test_other_settings_or_data_are_other_groups(runs):
    config = get_preset(preset="compact", attention="cosformer").replace(
        train={"batch_size": 16}
    )
    make_run(runs / "d", (50.0, 50.0), config=config)
    make_run(runs / "e", (51.0, 50.0), data_fingerprint="cd")
    groups = group_runs(read_runs(runs)[0])
    assert sorted(len(group.runs) for group in groups) == [1, 1, 1, 3]


def test_a_changed_attention_is_another_setting(tmp_path):
    """As after the advice to train changed code in another folder."""
    runs = tmp_path / "runs"
    config = get_preset("listops", "compact", "own:attention")
    texts = {"a": "x = 1", "b": "x = 2", "c": "x = 1  # the same", "d": "x = 2"}
    for name, text in texts.items():
        seed = 1 if name == "c" else 0
        accuracy = 10.0 if "1" in text else 30.0
        own = config.replace(seed=seed)
        folder = make_run(runs / name, (accuracy, accuracy), config=own)
        (folder / "code").mkdir()
        (folder / "code" / "own.py").write_text(text)
    found = read_runs(runs)[0]
    groups = group_runs(found)
    assert [[run.folder.name for run in group.runs] for group in groups] == [
        *(["b"], ["a", "c"])
    ]
    assert [differing_settings(group, groups) for group in groups] == [
        *(f"code of {runs / name}" for name in "ba")
    ]
    averages = [row[:2] for row in results.other_averages_table(groups).rows]
    assert averages == [
        (f"own:attention, compact, code of {runs / 'b'}", "30.00"),
        (f"own:attention, compact, code of {runs / 'a'}", "10.00"),
    ]
    # Nothing is left out without a word.
    line = f"{runs / 'd'}: the same settings and seed as {runs / 'b'}"
    assert repeated(found) == [line]
    report.write_report(runs, tmp_path / "out", ["html"])
    assert f"left out: {line}" in (tmp_path / "out" / "report.html").read_text()


def test_a_run_on_a_target_that_is_gone_is_named(runs, tmp_path):
    config = get_preset(preset="compact", attention="flow")
    make_run(runs / "gone", (30.0, 29.0), config=config)
    file = runs / "gone" / "config.json"
    stored = json.loads(file.read_text())
    stored["pretrain"]["target"] = "notes"
    file.write_text(json.dumps(stored))
    (problem,) = report.write_report(runs, tmp_path / "out", ["html"])
    wanted = "pretrain.target='tokens', the only value in this version, got 'notes'"
    assert wanted in problem


def test_several_folders_count_each_run_once(tmp_path):
    for seed, name in enumerate("abc"):
        config = get_preset(preset="compact", attention="cosformer").replace(seed=seed)
        make_run(tmp_path / name / "run", (10 * seed, 0), config=config)
    own = [tmp_path / "b", tmp_path / "a"]
    assert [run.folder.parent for run in read_runs(*own)[0]] == own
    everything = [*own, tmp_path, tmp_path / "b" / ".." / "c"]
    assert len(read_runs(*everything)[0]) == 3
    report.write_report(list(map(str, own)), str(tmp_path / "out"), ["json"])
    (row,) = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (row["seeds"], row["test_accuracy"]) == (2, 5)


def test_settings_of_the_same_last_word_are_told_apart(tmp_path):
    """Steps of pretraining are not steps of training, nor data's length the model's."""
    config = get_preset("listops", "compact", "softmax")
    changes = [
        {"pretrain": {"steps": 1000}, "train": {"learning_rate": 0.5}},
        {"model": {"max_length": 3000}},
    ]
    for number, change in enumerate(changes):
        make_run(tmp_path / f"{number}", (40, 40), config=config.replace(**change))
    rate, length = config.train.learning_rate, config.model.max_length
    groups = group_runs(read_runs(tmp_path)[0])
    assert sorted(differing_settings(group, groups) for group in groups) == [
        f"learning_rate={rate}, pretrain.steps=0, model.max_length=3000",
        f"learning_rate=0.5, pretrain.steps=1000, model.max_length={length}",
    ]


def test_the_table_of_a_task(runs):
    groups = group_runs(read_runs(runs)[0])
    table = results.task_table("listops", groups)
    assert all(len(row) == len(table.head) for row in table.rows)
    assert table.ours == 2
    first, second = table.rows[:2]
    assert first[:4] == (
        "cosformer, compact",
        "38.00 ± 2.00 (sd, 3 seeds)",
        "37.00 ± 2.00 (sd, 3 seeds)",
        "0, 1, 2",
    )
    # The standard error of 30 % in 2000 examples.
    assert second[1] == "30.00 (1 seed; se 1.02)"
    assert first[4:7] == ("4.00", "300 MiB (process peak RSS)", "123,456")
    assert (
        "generated, seed 0, at most 2,000 long, own validation split, best by loss, "
        "2,000 test examples" in first[7]
    )
    assert [row[0] for row in table.rows[2:]] == [
        "baseline: majority class",
        "baseline: root operator alone, best possible",
    ]


def test_a_published_row_is_shown_beside_a_run_of_its_own_protocol(runs):
    config = get_preset("listops", "official", "linformer")
    make_run(runs / "d", (35.0, 35.0), config=config)
    other = config.replace(attention="softmax", train={"steps": 6000})
    make_run(runs / "e", (36.0, 36.0), config=other)
    groups = group_runs(read_runs(runs)[0])
    rows = results.task_table("listops", groups).rows
    (row,) = (row for row in rows if row[0].startswith("published: "))
    assert row[:2] == ("published: Linformer", "35.70")
    assert "arXiv:2011.04006" in row[7]


def test_other_data_are_not_put_beside_published_rows(tmp_path):
    make_run(tmp_path / "runs" / "a", (90.0, 90.0), official_data=False)
    groups = group_runs(read_runs(tmp_path / "runs")[0])
    table = results.task_table("listops", groups)
    assert len(table.rows) == 1 and "NOT LRA's data settings" in table.rows[0][7]
    averages = results.averages_table(groups)
    assert not averages.ours


def test_a_best_checkpoint_that_saw_the_test_does_not_count(tmp_path):
    config = get_preset("text").replace(data={"validation": "test"})
    make_run(tmp_path / "runs" / "a", (90.0, 60.0), config=config)
    (group,) = group_runs(read_runs(tmp_path / "runs")[0])
    row = results.task_table("text", [group]).rows[0]
    assert row[1] == "(saw the test)" and row[2].startswith("60.00")
    assert "validation = test" in row[7]
    assert group.mean(group.accuracy) == 60


def test_averages_say_which_they_are(runs):
    groups = group_runs(read_runs(runs)[0])
    table = results.averages_table(groups)
    assert table.head[7:9] == ("avg5", "avg6")
    # A single task has no average, and the preset compact is not LRA's protocol.
    other = results.other_averages_table(groups)
    assert other.head == table.head and other.ours == len(other.rows) == 2
    assert other.rows[0][1] == "38.00" and other.rows[0][7:9] == ("-", "-")
    assert not table.ours
    published = {row[0]: row for row in table.rows}
    assert published["published: Transformer"][6:9] == ("failed", "54.39", "53.66")
    assert published["published: S5"][7:9] == ("85.24", "87.46")


def test_of_several_settings_validation_chooses(tmp_path):
    """And not the test split, where the other one is better."""
    config = get_preset("listops", "compact", "flow")
    for name, rate, test, valid in (("a", 1e-3, 38.0, 35.0), ("b", 2e-3, 37.0, 36.0)):
        own = config.replace(train={"learning_rate": rate, "best_by": "accuracy"})
        valid = {"valid_accuracy_best": valid}
        make_run(tmp_path / "runs" / name, (test, test), config=own, **valid)
    groups = group_runs(read_runs(tmp_path / "runs")[0])
    assert len(groups) == 2
    (row,) = results.other_averages_table(groups).rows
    assert row[1] == "37.00" and row[-1].endswith("the best by validation")


def tried(folder, rate, test, valid, loss=1.0, seed=0, **changes):
    """A run of Flow at a learning rate, chosen by accuracy."""
    config = get_preset("listops", "compact", "flow").replace(
        seed=seed, train={"learning_rate": rate, "best_by": "accuracy"}, **changes
    )
    scores = {"valid_accuracy_best": valid, "valid_loss_best": loss}
    make_run(folder, (test, test), config=config, **scores)


def average(folder):
    (row,) = results.other_averages_table(group_runs(read_runs(folder)[0])).rows
    return row[1]


def test_the_test_split_does_not_break_ties(tmp_path):
    tried(tmp_path / "a", 1e-3, 39.0, 36.0, loss=0.9)
    tried(tmp_path / "b", 2e-3, 37.0, 36.0, loss=0.8)
    assert average(tmp_path) == "37.00"
    # Not the highest of the test here either, but the preset's own setting.
    own = get_preset("listops", "compact", "flow").train.learning_rate
    for name, rate, test in (("c", 9e-3, 39.0), ("d", own, 36.0), ("e", 8e-3, 38.0)):
        tried(tmp_path / "ties" / name, rate, test, 36.0)
    assert average(tmp_path / "ties") == "36.00"


def test_settings_without_some_of_the_seeds_are_not_compared(tmp_path):
    for seed in range(3):
        tried(tmp_path / f"a{seed}", 1e-3, 30.0, 35.0, seed=seed)
    tried(tmp_path / "b", 2e-3, 90.0, 90.0)
    assert average(tmp_path) == "30.00"


def test_what_was_chosen_on_the_test_split_is_not_chosen_again(tmp_path):
    for name, rate, test in (("a", 1e-3, 66.0), ("b", 2e-3, 60.0)):
        config = get_preset("text", "official", "softmax").replace(
            train={"learning_rate": rate}
        )
        make_run(tmp_path / name, (99.0, test), config=config)
    (row,) = results.other_averages_table(group_runs(read_runs(tmp_path)[0])).rows
    assert row[2] == "-"


def test_the_same_files_elsewhere_are_the_same_setting(tmp_path):
    for seed, path in enumerate(("/a", "b", "./b")):
        tried(tmp_path / str(seed), 1e-3, 30.0, 35.0, seed=seed, data={"path": path})
    (group,) = group_runs(read_runs(tmp_path)[0])
    assert len(group.runs) == 3
    tried(tmp_path / "other", 2e-3, 30.0, 35.0, data={"path": "/c"})
    groups = group_runs(read_runs(tmp_path)[0])
    words = {differing_settings(group, groups) for group in groups}
    assert words == {"learning_rate=0.001", "learning_rate=0.002"}


@pytest.mark.parametrize(
    ("task", "data"),
    [
        ("text", {"max_length": 100}),
        ("retrieval", {"max_length": 50}),
        ("listops", {"permute": True}),
        ("pathfinder", {"levels": "easy:0.5"}),
    ],
)
def test_published_rows_are_for_examples_shown_in_the_same_way(task, data, tmp_path):
    config = get_preset(task, "official", "softmax")
    for name, own in (("a", config), ("b", config.replace(data=data))):
        make_run(tmp_path / name, (30.0, 30.0), config=own, data_fingerprint=name)
    groups = {g.runs[0].folder.name: g for g in group_runs(read_runs(tmp_path)[0])}
    assert groups["a"].by_protocol and not groups["b"].by_protocol


def test_the_page_shows_all(runs, tmp_path, capsys):
    out = tmp_path / "deep" / "report"
    report.main([str(runs), f"--out={out}"])
    assert "4 runs in" in capsys.readouterr().out
    names = {file.name for file in out.iterdir()}
    assert names == {"report.html", "report.md", "curves-listops.png"}
    parts = ("avg5", "avg6", "Checkpoint rule", "38.00 ± 2.00", "not finished")
    for name in ("report.html", "report.md"):
        text = (out / name).read_text(encoding="utf-8")
        for part in (*parts, "python -m lra_jax.train --task=listops"):
            assert part in text
        assert text.count("curves-listops.png") == (name == "report.md")


def test_differing_versions_are_said(tmp_path):
    config = get_preset(preset="compact", attention="cosformer")
    for seed, jax in enumerate(["0.10.2", "0.10.2", "0.12.0"]):
        versions = {"jax": jax, "numpy": "2.0"}
        own = config.replace(seed=seed)
        make_run(tmp_path / str(seed), (36, 35), config=own, versions=versions)
    groups = group_runs(read_runs(tmp_path)[0])
    assert results.differing_versions(groups) == ["jax 0.10.2 (2), 0.12.0 (1)"]
    report.write_report(tmp_path, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "The runs differ in versions: jax 0.10.2 (2), 0.12.0 (1)." in text


def test_markdown_has_the_same_tables(runs, tmp_path):
    report.write_report(runs, tmp_path / "report")
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count(" | ") for line in rows} == {7, 9}
    assert any("38.00 ± 2.00 (sd, 3 seeds)" in line for line in rows)
    assert not list((tmp_path / "report").glob("*.partial"))


def test_names_are_escaped(tmp_path):
    config = get_preset(preset="compact").replace(attention="<b>:f|g")
    make_run(tmp_path / "runs" / "a", (30.0, 30.0), config=config)
    groups = group_runs(read_runs(tmp_path / "runs")[0])
    with charts.style():
        page = results.make_page(groups, ["<script>"], tmp_path)
    for text in (page.html(), page.markdown()):
        assert "<b>" not in text and "<script>" not in text
        assert "&lt;b&gt;:f" in text
    assert "f\\|g" in page.markdown()


def test_curves(runs):
    """Of several seeds the mean, at the steps that all have, and each seed."""
    metrics = runs / "a1" / "metrics.jsonl"
    more = {"step": 3000, "split": "valid", "accuracy": 0.3}
    metrics.write_text(metrics.read_text() + json.dumps(more) + "\n")
    changed = runs / "a2" / "metrics.jsonl"
    changed.write_text(changed.read_text().replace("0.1,", "0.4,"))
    first, second = curves.learning_curves(group_runs(read_runs(runs)[0]))
    assert first.label == "cosformer, compact" and list(first.x) == [1000, 2000]
    assert first.y == pytest.approx([20, 20])
    assert [len(x) for x, _ in first.faint] == [2, 3, 2]
    assert list(second.y) == pytest.approx([10, 20]) and not second.faint


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda f: (f / "result.json").write_text("{"), "result.json: expected"),
        (lambda f: (f / "result.json").write_text("[]"), "result.json: expected"),
        (lambda f: (f / "result.json").write_text("{}"), "a finite number, got None"),
        (lambda f: (f / "config.json").write_text("nul"), "config.json: expected JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "config: expected the fields"),
        (
            lambda f: change(f / "result.json", steps_per_second=math.nan),
            "result.json: steps_per_second: expected a finite number, got nan",
        ),
        *(
            (
                lambda f, n=name, v=value: change(f / "result.json", **{n: v}),
                "result.json: expected" if name == "seal" else f"result.json: {name}",
            )
            for name, value in (
                *(("test_examples", 0), ("test_examples", -3), ("steps", 10**400)),
                *(("versions", "x"), ("versions", [1]), ("versions", {"jax": 1.0})),
                *(("peak_memory_bytes", "x"), ("peak_memory_bytes", math.nan)),
                *(("data_fingerprint", [1]), ("official_data", "yes")),
                *(("test_accuracy_best", 150), ("test_accuracy_last", True)),
                *(("test_accuracy_best", -5), ("parameters", math.inf)),
                ("steps_per_second_kind", ["cold"]),
                *(("valid_accuracy_best", "99"), ("valid_accuracy_best", 101.0)),
                *((LENGTHS, [1]), (LENGTHS, {"20": "x"}), (LENGTHS, {"20": 101})),
                *((LENGTHS, {"a": 1.0}), ("seal", "0" * 64)),
                *(("state_size", "x"), ("test_perplexity_best", [1])),
                *(("test_bits_per_byte_best", math.inf), ("chance", {})),
            )
        ),
        (lambda f: change(f / "config.json", task="../x"), "got '../x'"),
        (lambda f: change(f / "config.json", task=["listops"]), "a1: "),
        (lambda f: change(f / "config.json", model="deep", train=3), "a1: "),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "a1: "),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), "a1: "),
        (
            lambda f: (f / "metrics.jsonl").write_text("{a}\n"),
            "a1: metrics.jsonl, line 1: expected metrics",
        ),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(
    runs, tmp_path, capsys, spoil, part
):
    spoil(runs / "a1")
    report.main([str(runs), f"--out={tmp_path / 'report'}"])
    out, err = capsys.readouterr()
    assert "3 runs in" in out
    assert len(err.splitlines()) == 1 and err.startswith("warning: ")
    assert str(runs / "a1") in err and part in err
    assert part in (tmp_path / "report" / "report.md").read_text()


def test_one_line_where_there_is_nothing_to_report(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "file"
    file.touch()
    make_run(tmp_path / "only" / "a", (0, 0), finished=False)
    make_run(tmp_path / "broken" / "a", (0, 0))
    (tmp_path / "broken" / "a" / "config.json").write_text("{")
    cases = {
        str(empty): "expected run directories",
        str(tmp_path / "none"): "does not exist",
        str(file): "a file",
        str(tmp_path / "only"): "expected finished runs",
        str(tmp_path / "broken"): "config.json: expected JSON",
        "--out=x": "RUNS: expected at least one folder of runs, got none",
        "nope nope": "RUNS: expected a folder of runs, got nope, which does not",
        f"{empty} --ouf=x": "--ouf: expected a flag, got an unknown one; did you",
        f"{empty} --out": "--out: expected a value",
    }
    for line, part in cases.items():
        with pytest.raises(SystemExit) as stop:
            report.main(line.split())
        out, err = capsys.readouterr()
        helpers.assert_one_error(stop.value.code, err, 2, part)
        assert out == ""


def test_a_damaged_run_does_not_hide_the_others(tmp_path, capsys) -> None:
    """Also if it is the only one in a folder that was named."""
    for name in ("a", "b", "c"):
        make_run(tmp_path / name, (30.0, 30.0))
    (tmp_path / "b" / "result.json").write_text("{}")
    (tmp_path / "c" / "metrics.jsonl").write_text("[]\n")
    report.main([*(str(tmp_path / x) for x in "abc"), f"--out={tmp_path / 'report'}"])
    out, err = capsys.readouterr()
    assert out.startswith("1 run in ")
    assert "b: result.json: test_accuracy_best: expected a finite number" in err
    assert "line 1: expected metrics with a step, a split and numbers, got '[]'" in err


def test_formats_for_other_programs(runs, tmp_path):
    other = get_preset(preset="compact", attention="cosformer").replace(
        train={"batch_size": 16}
    )
    make_run(runs / "d", (100.0, 50.0), config=other, official_data=False)
    out = tmp_path / "out"
    report.main([str(runs), f"--out={out}", "--format=csv,json,latex"])
    assert sorted(f.name for f in out.iterdir()) == [
        *("report.csv", "report.json", "report.tex")
    ]
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
    assert latex.count(r"\begin{table}") == 2 and r"$38.00 \pm 2.00$" in latex
    assert r"listops, not the LRA's data settings" in latex


@pytest.mark.parametrize("task", ["lm", "mqar"])
def test_several_answers_of_an_example_have_no_standard_error(tmp_path, task):
    preset = "tiny" if task == "lm" else "quick"
    config = get_preset(task, preset, "linear")
    make_run(tmp_path / "a", (40.0, 40.0), config=config)
    (row,) = exports.rows(group_runs(read_runs(tmp_path)[0]))
    assert row["standard_error_of_examples"] is None
    assert "(se " not in exports.to_latex([row])


def test_latex_has_the_scores_of_language_models(tmp_path):
    for seed, bits in enumerate((1.5, 1.7)):
        config = get_preset("lm", "tiny", "linear").replace(seed=seed)
        scores = {"test_bits_per_byte_best": bits, "test_perplexity_best": 2**bits}
        make_run(tmp_path / f"lm{seed}", (40.0, 40.0), config=config, **scores)
    masked = get_preset("mlm", "tiny", "linear")
    make_run(tmp_path / "mlm", (40.0, 40.0), config=masked, test_perplexity_best=9.0)
    latex = exports.to_latex(exports.rows(group_runs(read_runs(tmp_path)[0])))
    assert "test accuracy" not in latex and "40.00" not in latex
    assert r"model & bits per byte & perplexity & seeds & parameters" in latex
    assert r"linear, tiny & $1.600 \pm 0.141$ (sd) & $3.039 " in latex
    assert r"linear, tiny & $9.000$ & 1 & " in latex


def test_the_home_folder_of_every_format(runs, tmp_path, monkeypatch, capsys):
    """A shell leaves the tilde of --out=~/report as it is."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    report.main([str(runs), "--out=~/report", "--format=md,csv"])
    written = {f.name for f in (tmp_path / "home" / "report").iterdir()}
    assert {"report.md", "report.csv"} <= written
    assert not (tmp_path / "~").exists()
    assert str(tmp_path / "home" / "report" / "report.csv") in capsys.readouterr().out


def test_linked_run_directories_are_read(runs, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "elsewhere").symlink_to(runs)
    (linked / "once").symlink_to(runs / "a1")
    (linked / "round").symlink_to(linked)
    assert len(read_runs(linked)[0]) == len(read_runs(runs)[0])


def test_runs_that_are_not_shown_are_counted(runs, tmp_path, capsys):
    """A table has no room for a list of them."""
    flow = get_preset(preset="compact", attention="flow")
    make_run(runs / "again", (31.0, 29.0), config=flow)
    report.main([str(runs), f"--out={tmp_path / 'out'}", "--format=csv"])
    end = "report.csv; not shown: 1 not finished, 1 repeated\n"
    assert capsys.readouterr().out.endswith(end)


@pytest.mark.parametrize("name", ["html", "csv"])
def test_one_line_for_a_folder_that_cannot_be_made(runs, tmp_path, capsys, name):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        report.main([str(runs), f"--out={tmp_path / 'file'}", f"--format={name}"])
    err = capsys.readouterr().err
    part = "--out: expected a folder that can be written, got"
    helpers.assert_one_error(stop.value.code, err, 2, part)


def test_exports_have_the_memory_of_the_page(runs):
    """The highest peak of the seeds, and what it covers."""
    change(runs / "a1" / "result.json", peak_memory_bytes=900 << 20)
    groups = group_runs(read_runs(runs)[0])
    row = exports.rows(groups)[0]
    assert row["peak_memory_bytes"] == 900 << 20
    assert row["peak_memory_kind"] == "process peak RSS"
    shown = results.task_table("listops", groups).rows[0]
    assert shown[5] == "900 MiB (process peak RSS)"


def test_every_device_and_commit_of_the_seeds_is_named(runs):
    """Their speed is a mean over all of them."""
    change(runs / "a1" / "result.json", device="1 x NVIDIA H200", commit="fedc")
    change(runs / "a2" / "result.json", device=None)
    groups = group_runs(read_runs(runs)[0])
    row = exports.rows(groups)[0]
    assert row["device"] == "2 CPU cores and 1 x NVIDIA H200"
    assert row["commit"] == "0123456789abcdef and fedc"
    shown = results.task_table("listops", groups).rows[0]
    assert "2,000 test examples; 2 CPU cores and 1 x NVIDIA H200" in shown[7]


def test_other_data_have_a_table_of_their_own(runs):
    other = get_preset(preset="compact", attention="cosformer").replace(
        train={"batch_size": 16}
    )
    make_run(runs / "d", (90.0, 90.0), config=other, official_data=False)
    page = results.make_page(group_runs(read_runs(runs)[0]), [], runs / "out")
    others = "Runs whose data, model or training differ from LRA's"
    first, second = page.markdown().split(others)
    assert "90.00" not in first and "90.00" in second.split("## ")[0]


TAUGHT = {"pretrain": {"steps": 1000}}


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("modern-quick", {}),
        ("official", TAUGHT),
        ("official", {"train": {"steps": 6000}}),
        ("official", {"data": {"permute": True}}),
    ],
)
def test_another_protocol_is_not_among_published_rows(tmp_path, preset, changes):
    official = get_preset("listops", "official", "softmax")
    make_run(tmp_path / "runs" / "a", (36.5, 36.5), config=official)
    # Its row was not published, but its run is by the protocol.
    unpublished = get_preset("listops", "official", "cosformer")
    make_run(tmp_path / "runs" / "b", (37.5, 37.5), config=unpublished)
    other = get_preset("listops", preset, "softmax").replace(**changes)
    make_run(tmp_path / "runs" / "c", (95.25, 95.25), config=other)
    groups = group_runs(read_runs(tmp_path / "runs")[0])
    assert [group.by_protocol for group in groups] == [False, True, True]

    page = results.make_page(groups, [], tmp_path / "out")
    for text in (page.markdown(), page.html()):
        task, averages = text.split("All tasks")
        first, second = task.split("Runs whose data, model or training differ from LRA")
        assert "published: Transformer" in first and "36.50" in first
        assert "37.50" in first and "95.25" not in first
        assert "95.25" in second and "published: " not in second
        assert "protocol, do not compare with published rows" in second
        first, second = averages.split("The same averages of runs on LRA")
        assert "36.50" in first and "95.25" not in first
        assert "95.25" in second and "published: " not in second

    latex = exports.to_latex(exports.rows(groups))
    first, second = latex.split(r"\caption{listops, not the LRA's protocol}")
    assert r"\caption{listops}" in first and "36.50" in first and "95.25" in second
    assert "95.25" not in first and "36.50" not in second
    rows = exports.rows(groups)
    assert [row["official_protocol"] for row in rows] == [False, True, True]


def test_exports_say_which_speed_and_error_they_give(runs):
    for name, kind in (("a0", "warm"), ("a1", "cold"), ("a2", "warm")):
        change(runs / name / "result.json", steps_per_second_kind=kind)
    kinds = ["cold", "warm"]

    def exported():
        return exports.rows(group_runs(read_runs(runs)[0]))

    assert [row["steps_per_second_kind"] for row in exported()] == kinds
    latex = exports.to_latex(exported())
    assert r"$38.00 \pm 2.00$ (sd) & 3 & 123,456 & 4.00 (cold) \\" in latex
    # The standard error of 30 % in 2,000 examples.
    assert r"$30.00$ (se $1.02$) & 1 & 123,456 & 4.00 (warm) \\" in latex
    change(runs / "a1" / "result.json", steps_per_second_kind="warm")
    assert "4.00 (warm)" in exports.to_latex(exported())
    assert ",warm," in exports.to_csv(exported()).splitlines()[1]
    assert json.loads(exports.to_json(exported()))[0]["steps_per_second_kind"] == "warm"


def test_runs_of_other_lengths_are_not_on_one_axis():
    lines = [
        charts.Line(str(last), [last // 2, last], [1.0, 2.0])
        for last in (4000, 100, 1000, 200)
    ]
    panels = curves.by_length(lines)
    assert [[line.label for line in panel] for panel in panels] == [
        ["100", "200"],
        ["4000", "1000"],
    ]
    assert panels[1][0].style == 0


def test_rows_of_a_sweep_are_told_apart(runs):
    base = get_preset(preset="compact", attention="cosformer")
    for name, rate in (("d", 0.01), ("e", 0.02)):
        config = base.replace(train={"learning_rate": rate})
        make_run(runs / name, (30.0, 30.0), config=config)
    groups = group_runs(read_runs(runs)[0])
    names = [row[0] for row in results.task_table("listops", groups).rows]
    assert (
        "cosformer, compact (learning_rate=0.02)" in names and "flow, compact" in names
    )
    shown = {row["settings"] for row in exports.rows(groups)}
    assert {"learning_rate=0.01", "learning_rate=0.02", ""} < shown
