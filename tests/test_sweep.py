"""Seeds and sweeps: what is run, what is skipped, what a failure does."""

import contextlib
import json
import signal
from pathlib import Path

import helpers
import pytest

from lra_jax import cli, report, runs, sweep, train
from lra_jax.configs import get_preset
from lra_jax.reports.runs import Group, Run


def result_of(config):
    """A result whose loss and accuracy are the lower, the lower the rate."""
    score = 100 * config.train.learning_rate
    return helpers.result(
        **{"task": config.task, "attention": config.attention, "steps": 10**6},
        **{"mixers": config.mixers, "best_by": config.train.best_by},
        **{"valid_loss_best": score, "valid_accuracy_best": score},
    )


def group_of(*results, task="listops", attention="flow", **changes):
    """A group of runs as far as comparisons by validation read it."""
    config = get_preset(task, None, attention)
    config = config.replace(train={"best_by": "accuracy"}, **changes)
    made = [helpers.result(**{"task": task} | values) for values in results]
    return Group(tuple(Run(Path(), config, result, ()) for result in made))


@pytest.fixture
def started(monkeypatch):
    """Runs that finish at once; those of linear attention fail."""
    names = []

    def start(run):
        names.append(run.name)
        if run.config.attention == "linear":
            return 1
        run.workdir.mkdir(parents=True)
        values = run.config.to_dict() | {"data_fingerprint": "ab"}
        (run.workdir / "config.json").write_text(json.dumps(values))
        text = json.dumps(result_of(run.config).to_dict())
        (run.workdir / "result.json").write_text(text)
        return 0

    monkeypatch.setattr(runs, "_start", start)
    return names


def test_a_sweep_goes_on_past_a_failure(started, tmp_path, capsys):
    flags = ["--attention=softmax,linear,flow", "--seeds=2", f"--workdir={tmp_path}"]
    with pytest.raises(SystemExit) as stop:
        sweep.main(flags)
    assert stop.value.code == 1
    names = ("softmax", "linear", "flow")
    assert started == [f"listops {name} seed {s}" for name in names for s in (0, 1)]
    out, err = capsys.readouterr()
    assert "softmax: test accuracy, best checkpoint 30.00 +- 0.00 %, last" in out
    assert "listops linear seed 1 ended with code 1; the others continue" in err
    assert "2 of 6 runs failed" in err
    started.clear()
    with pytest.raises(SystemExit):
        sweep.main(flags)
    assert started == ["listops linear seed 0", "listops linear seed 1"]
    assert capsys.readouterr().out.count("already finished") == 4


def test_folders_are_named_after_the_settings(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep.main(["--attention", "softmax,flow", "--seed=3", "--train.steps=700"])
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert folders[0].startswith("listops-flow-modern-quick-seed3-")
    # Another setting is another run, a finished one of the first does not count.
    started.clear()
    sweep.main(["--attention=softmax,flow", "--seed=3", "--train.steps=701"])
    assert len(started) == 2


def test_a_suite_is_run_with_the_rates_of_its_protocol(started, tmp_path, capsys):
    flags = ["--suite=state", "--attention=softmax,delta", f"--workdir={tmp_path}"]
    one = [*flags, "--task=parity"]
    sweep.main(one)
    # The delta rule once more with shares of up to 2.
    rate = "--train.learning_rate=0.005"
    assert started == [
        f"parity softmax {rate} seed 0",
        f"parity delta {rate} seed 0",
        f"parity delta {rate} --model.attention_options=beta_range=2 seed 0",
    ]
    assert len(list(tmp_path.iterdir())) == 3
    shown = capsys.readouterr().out
    assert "parity delta --train.learning_rate=0.005 --model.attention_op" in shown
    started.clear()
    sweep.main(one)
    assert not started
    # A given option is not varied.
    sweep.main([*one, "--train.learning_rate=0.1"])
    assert len(started) == 3
    plan = sweep.make_plan(["--suite=state", "--attention=flow"])
    tests = ["parity", "modular", "modular-brackets", "s5", "a5"]
    assert [run.config.task for run in plan] == ["parity"]
    official = "--preset=official"
    plan = sweep.make_plan(["--suite=state", "--attention=flow", official])
    assert [run.config.task for run in plan] == tests
    tests = "--task=s5, parity"
    plan = sweep.make_plan(["--suite=state", "--attention=flow", tests])
    assert [run.config.task for run in plan] == ["s5", "parity"]
    plan = sweep.make_plan(["--suite=recall", "--attention=flow", official])
    assert [run.config.task for run in plan] == ["mqar"] * 4 + ["needle"] * 3


def test_all_is_every_causal_mechanism(started, tmp_path):
    flags = ["--suite=recall", "--task=mqar", "--train.learning_rate=0.1"]
    with pytest.raises(SystemExit):  # The runs of linear attention fail here.
        sweep.main([*flags, "--attention=all", f"--workdir={tmp_path}"])
    names = {name.split()[1] for name in started}
    assert {"softmax", "delta", "flash", "local", "synthesizer"} < names
    assert not {"linformer", "nystrom", "fnet", "reformer", "sinkhorn"} & names


def test_seeds_of_one_mechanism(started, tmp_path):
    train.main(["--seeds=2", "--seed=4", "--attention=flow", f"--workdir={tmp_path}"])
    assert started == ["listops flow seed 4", "listops flow seed 5"]


def test_a_flag_is_given_once_to_a_run(tmp_path):
    arguments = ["--seed=4", "--workdir", str(tmp_path), "--train.steps=600"]
    arguments += ["--attention=flow", "--seeds=2"]
    command = cli.parse_config("prog", "text", arguments, runs.Seeds)
    for seed, run in enumerate(runs.make_plan(command), start=4):
        flags = runs.flags(run.config)
        assert {"--train.steps=600", "--attention=flow", f"--seed={seed}"} < {*flags}
        assert len(flags) == 6 and flags[-2] == f"--workdir={run.workdir}"
        assert cli.parse_config("prog", "text", flags) == run.config


def test_a_signal_ends_the_sweep(tmp_path, monkeypatch):
    plan = runs.make_plan(runs.Seeds(workdir=str(tmp_path)))
    popen, commands = runs.subprocess.Popen, []

    def start(script: str) -> int:
        def begin(command):
            commands.append(command)
            return popen(["/bin/sh", "-c", script])

        monkeypatch.setattr(runs.subprocess, "Popen", begin)
        return runs._start(plan[0])

    with pytest.raises(runs.Stopped) as stop:
        start("exit 143")
    assert stop.value.code == 128 + signal.SIGTERM
    assert start("kill -9 $$") == -9
    monkeypatch.setattr(runs.sys, "argv", ["sweep", "--debug"])
    assert start("exit 3") == 3
    assert [command.count("--debug") for command in commands] == [0, 0, 1]
    # One to the command alone is passed on.
    told = tmp_path / "told"
    steps = f"trap 'touch {told}; exit 0' INT", "kill -INT $PPID", "sleep 1 & wait"
    with pytest.raises(runs.Stopped) as stop:
        start("; ".join(steps))
    assert stop.value.code == 128 + signal.SIGINT and told.exists()


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_stopped_sweep_says_how_to_go_on(tmp_path, monkeypatch, capsys, seeds):
    """The run that was stopped says how to resume it, and it alone."""

    def stopped(run):
        raise runs.Stopped(128 + signal.SIGTERM)

    plan = runs.make_plan(runs.Seeds(workdir=str(tmp_path), seeds=seeds))
    monkeypatch.setattr(runs, "_start", stopped)
    with pytest.raises(runs.Stopped):
        runs.run_all(plan)
    said = "the same command continues with all runs" in capsys.readouterr().err
    assert said == (seeds > 1)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--suite=mad --atention=flow", "mean '--attention'"),
        ("--attention=flow --seed=0,1", "'0,1'"),
        ("--attention=flow --suite=mad --task=mqar", "--task"),
        ("--attention=linear --suite=mad --model.is_causal=False", "is_causal"),
        ("--attention=flow --preset=compact,moden", "mean 'modern'"),
        ("--attention=flow --model.attention_options=clip=1|clop=3", "clop"),
        ("--attention=flow --train.curriculum=700:0.6|x", "curriculum: expected"),
        ("--attention=flow --dry-run", "--dry_run: expected a flag"),
        (
            "--attention=flow --task=listops,needle --data.min_length=40",
            "--data.min_length: expected a sweep of its own for --task=listops and "
            "--task=needle, got ListOpsData.min_length of the one and "
            "NeedleData.min_length of the other",
        ),
        (
            "--attention=flow --task=mqar,mad-noisy-recall --noise=True",
            "--data.noise: ",
        ),
        ("--attention=flow --task=mqar,needle --data.train=64/4:9", "--data.num_train"),
    ],
)
def test_errors_of_a_sweep(capsys, started, flags, part):
    with pytest.raises(SystemExit) as stop:
        sweep.main(flags.split())
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, part)
    assert out == "" and started == []


@pytest.mark.parametrize(
    "flags",
    [
        "--task=text,retrieval --data.max_length=1000 --data.dir=/data",
        "--suite=mad --data.num_valid=100 --data.vocab_size=32",
        "--task=listops,pathfinder --data.seed=3",
    ],
)
def test_flags_of_one_meaning_are_for_several_tasks(flags):
    plan = sweep.make_plan(["--attention=flow", *flags.split()])
    assert len({run.config.task for run in plan}) >= 2


@pytest.mark.slow
def test_a_real_sweep_and_its_report(tmp_path):
    changes = {"steps": 8, "eval_every": 4, "warmup": 2}
    config = helpers.tiny(tmp_path / "data", train=changes)
    shared = [f for f in helpers.flags(config) if not f.startswith("--attention=")]
    folder = tmp_path / "runs"
    end = helpers.run(
        *("-m", "lra_jax.sweep", "--attention=linear", *shared, f"--workdir={folder}")
    )
    assert end.returncode == 0, end.stderr
    assert "linear: test accuracy" in end.stdout
    (result,) = folder.rglob("result.json")
    values = json.loads(result.read_text())
    assert values["peak_memory_kind"] == "process peak RSS"
    assert 50 << 20 < values["peak_memory_bytes"] < 8 << 30
    report.main([str(folder), f"--out={tmp_path / 'report'}"])
    text = (tmp_path / "report" / "report.md").read_text()
    assert "linear, compact" in text and "(se" in text
    page = (tmp_path / "report" / "report.html").read_text()
    assert "data:image/" in page


def test_tasks_and_values_of_flags(started, tmp_path, capsys):
    flags = ["--attention=flow", "--task=listops,text", f"--workdir={tmp_path}"]
    more = ["--lr=1e-3,3e-3", "--train.dtype=float32,bfloat16", "--data.buckets=64,128"]
    sweep.main([*flags, *more, "--model.dropout=0"])
    assert [name.split()[0] for name in started] == ["listops"] * 4 + ["text"] * 4
    assert started[0] == (
        "listops flow --train.learning_rate=1e-3 --train.dtype=float32 seed 0"
    )
    configs = [json.loads(f.read_text()) for f in tmp_path.glob("*/config.json")]
    varied = [(c["task"], c["train"]) for c in configs]
    seen = {(task, t["learning_rate"], t["dtype"]) for task, t in varied}
    assert len(seen) == 8 and {c["data"]["buckets"] for c in configs} == {"64,128"}
    out = capsys.readouterr().out
    assert "text flow --train.learning_rate=3e-3 --train.dtype=bfloat16: test" in out


def test_parts_are_names_between_commas_and_options_are_texts():
    lion = ["--attention=flow", "--train.optimizer=lion"]
    plan = sweep.make_plan([*lion, "--train.optimizer_options=b2=0.9|b2=0.99"])
    options = {run.config.train.optimizer_options for run in plan}
    assert options == {"b2=0.9", "b2=0.99"}
    plan = sweep.make_plan(["--attention=flow", "--train.optimizer=lion,optax:sgd"])
    assert {x.config.train.optimizer for x in plan} == {"lion", "optax:sgd"}


def test_of_a_flag_given_twice_the_last_counts(started, tmp_path):
    flags = ["--attention=flow", f"--workdir={tmp_path}"]
    sweep.main([*flags, "--lr=1e-3,3e-3", "--lr=1e-2"])
    sweep.main([*flags, "--lr=1e-2", "--lr=1e-3,3e-3", "--lr=4e-3,5e-3"])
    configs = [json.loads(f.read_text()) for f in tmp_path.glob("*/config.json")]
    assert sorted(c["train"]["learning_rate"] for c in configs) == [4e-3, 5e-3, 1e-2]


def test_the_best_by_validation_is_named():
    """Of those with the most seeds, as the page of a report compares them."""
    scores = {"flow --a=1": (30, 33), "flow --a=2": (40, 32), "softmax": (90, 90)}
    groups = {
        series: group_of(
            *({"valid_accuracy_best": value} for value in values),
            attention=series.split()[0],
        )
        for series, values in scores.items()
    }
    best = "listops, flow: best of 2: flow --a=2, by validation accuracy, 36.00 +- 5.66"
    assert list(runs.best_by_validation(groups)) == [f"{best} %"]
    groups["flow --a=2"] = group_of({"valid_accuracy_best": 99})
    (line,) = runs.best_by_validation(groups)
    assert "best of 2: flow --a=1, by validation accuracy, 31.50" in line


def test_scores_of_a_task_are_summarised():
    seeds = [{"bits_per_byte_best": x, "bits_per_byte_last": x} for x in (2.0, 2.5)]
    group = group_of(*({"scores": x} for x in seeds), task="lm")
    (line,) = runs.summarise({"flow": group})
    assert "last 29.00 +- 0.00 %, bits per byte 2.250 +- 0.354; chosen by" in line


def test_runs_on_other_examples_are_not_compared():
    other = {"valid_accuracy_best": 60, "data_fingerprint": "cd"}
    groups = {"bytes": group_of({"valid_accuracy_best": 40}), "words": group_of(other)}
    assert list(runs.best_by_validation(groups)) == []


def test_a_run_on_files_is_asked_whether_they_have_changed(started, tmp_path, capsys):
    """It is started again: only its own process reads the files."""
    flags = ["--attention=flow", f"--workdir={tmp_path}"]
    for task, again in (("listops", 0), ("lm", 1), ("parity", 0)):
        for times in (1, 1 + again):
            with contextlib.suppress(SystemExit):  # The folder is there.
                sweep.main([*flags, f"--task={task}"])
            assert sum(name.startswith(task) for name in started) == times
    assert capsys.readouterr().out.count("already finished") == 2


def test_validation_on_the_test_itself_is_said():
    """As in LRA's code for text, whose best checkpoint has seen the test: none of
    several settings is the best."""
    text = {"validation": "test", "test_accuracy_last": 64}
    groups = {
        f"flow --a={n}": group_of(
            text | {"valid_accuracy_best": 67 - n},
            task="text",
            data={"validation": "test"},
        )
        for n in (1, 2)
    }
    words = "validation accuracy on the test split itself"
    first, _ = runs.summarise(groups)
    assert f"last 64.00 %; chosen by {words}, 66.00 % (1 seed)" in first
    assert list(runs.best_by_validation(groups)) == []


def test_the_best_by_validation_goes_by_the_figure_of_the_runs(
    started, tmp_path, capsys
):
    flags = ["--attention=flow", "--preset=compact", f"--workdir={tmp_path}"]
    rates = "--lr=3e-3,1e-3"
    for _ in range(2):  # Also of runs that are finished.
        sweep.main([*flags, rates])
        *_, high, low, best = capsys.readouterr().out.splitlines()
        assert high.startswith("flow --train.learning_rate=3e-3: test accuracy")
        assert high.endswith("last 29.00 %; chosen by validation loss, 0.3000 (1 seed)")
        assert low.endswith("last 29.00 %; chosen by validation loss, 0.1000 (1 seed)")
        assert best == (
            "listops, flow: best of 2: flow --train.learning_rate=1e-3, by validation "
            "loss, 0.1000"
        )
    # Runs that go by different figures are not compared.
    sweep.main([*flags, rates, "--train.best_by=loss,accuracy"])
    out = capsys.readouterr().out
    for rate, metric in (("1e-3", "loss"), ("3e-3", "accuracy")):
        best = f"best of 2: flow --train.learning_rate={rate} "
        assert f"{best}--train.best_by={metric}, by validation {metric}, " in out


def test_a_failed_run_of_a_sweep_is_named_by_its_values(started, tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--attention=linear", "--lr=1e-3,3e-3", f"--workdir={tmp_path}"])
    out, err = capsys.readouterr()
    name = "listops linear --train.learning_rate=3e-3 seed 0"
    assert f"[2/2] {name}, in {tmp_path}" in out
    assert f"error: {name} ended with code 1" in err


def test_presets_and_texts_take_several_values(started, tmp_path, capsys):
    options = "--model.attention_options=clip=1|clip=30"
    flags = ["--attention=flow", f"--workdir={tmp_path / 'a|b'}", options]
    sweep.main([*flags, "--preset", "compact,modern", "--train.curriculum=|700:0.6"])
    configs = [json.loads(f.read_text()) for f in tmp_path.glob("*/*/config.json")]
    assert len(started) == len(configs) == 8
    assert {
        (c["preset"], c["model"]["attention_options"], c["train"]["curriculum"])
        for c in configs
    } == {
        (preset, clip, curriculum)
        for preset in ("compact", "modern")
        for clip in ("clip=1", "clip=30")
        for curriculum in ("", "700:0.6")
    }
    assert started[1] == (
        "listops flow --preset=compact --model.attention_options=clip=1 "
        "--train.curriculum=700:0.6 seed 0"
    )
    capsys.readouterr()
    sweep.main(["--help"])
    out = capsys.readouterr().out
    assert "--preset=NAME,NAME" in out and "--FLAG='TEXT|TEXT|...'" in out
    assert "also take the others: list them by name" in out
    assert "train except --dry-run" in out and max(map(len, out.splitlines())) <= 88


def test_a_suite_takes_several_values(started, tmp_path):
    flags = ["--suite=state", "--task=parity", "--attention=flow", "--seed=1"]
    flags += ["--preset=quick,official", "--model.attention_options=clip=1|clip=5"]
    sweep.main([*flags, "--lr=0.1,0.2", f"--workdir={tmp_path}"])
    assert len(set(started)) == len(started) == 8
    assert started[0].startswith(
        "parity flow --preset=quick --model.attention_options=clip=1 "
        "--train.learning_rate=0.1"
    )
