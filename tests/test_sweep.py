"""Seeds and sweeps: what is run, what is skipped, what a failure does."""

import json
import signal

import helpers
import pytest

from lra_jax import cli, report, runs, sweep, train
from lra_jax.configs import get_preset

FAKE = {"test_accuracy_best": 30.0, "test_accuracy_last": 29.0, "steps": 10**6}


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
        (run.workdir / "result.json").write_text(json.dumps(FAKE))
        return 0

    monkeypatch.setattr(runs, "_start", start)
    return names


def test_a_sweep_goes_on_past_a_failure(started, tmp_path, capsys):
    flags = ["--attention=softmax,linear,flow", "--seeds=2", f"--workdir={tmp_path}"]
    with pytest.raises(SystemExit) as stop:
        sweep.main(flags)
    assert stop.value.code == 1
    names = [
        f"listops {a} seed {s}" for a in ("softmax", "linear", "flow") for s in (0, 1)
    ]
    assert started == names
    out, err = capsys.readouterr()
    assert "softmax: test accuracy, best checkpoint 30.00 +- 0.00 %, last" in out
    assert "listops linear seed 1 ended with code 1; the others go on" in err
    assert "2 of 6 runs failed" in err
    started.clear()
    with pytest.raises(SystemExit):
        sweep.main(flags)
    assert started == ["listops linear seed 0", "listops linear seed 1"]
    assert capsys.readouterr().out.count("finished before") == 4


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
    assert started == ["parity softmax seed 0"] + ["parity delta seed 0"] * 2
    assert len(list(tmp_path.iterdir())) == 3
    shown = capsys.readouterr().out
    assert "parity delta --train.learning_rate=0.005 --model.attention_op" in shown
    started.clear()
    sweep.main(one)
    assert not started
    # A given option is not varied.
    sweep.main([*one, "--train.learning_rate=0.1"])
    assert len(started) == 3
    plan = sweep._suite_plan("state", [], ["flow"], 1)
    tests = ["parity", "modular", "modular-brackets", "s5", "a5"]
    assert [run.config.task for run in plan] == tests
    plan = sweep._suite_plan("recall", ["--preset=official"], ["flow"], 1)
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
    given = ["--seed=4", "--workdir", str(tmp_path), "--train.steps=600"]
    plan = runs.make_plan(
        lambda flags: cli.parse_config("prog", "text", flags), given, ["flow"], 2
    )
    for seed, run in enumerate(plan, start=4):
        assert run.args[:2] == ("--train.steps=600", "--attention=flow")
        assert run.args[2:] == (f"--seed={seed}", f"--workdir={run.workdir}")
        assert cli.parse_config("prog", "text", run.args).identity() == (
            run.config.identity()
        )


def test_a_signal_ends_the_sweep(tmp_path, monkeypatch):
    plan = runs.make_plan(
        lambda _: get_preset(), [f"--workdir={tmp_path}"], ["softmax", "flow"], 1
    )
    monkeypatch.setattr(runs.sys, "executable", "/bin/sh")
    for script, code in (("exit 143", 143), ("kill -9 $$", 9), ("exit 3", 3)):
        child = tmp_path / "child"
        child.write_text(script)
        command = runs.dataclasses.replace(plan[0], args=())
        monkeypatch.setattr(
            runs.subprocess,
            "Popen",
            lambda _, c=child, popen=POPEN: popen(["/bin/sh", str(c)]),
        )
        if code == 143:
            with pytest.raises(runs.Stopped) as stop:
                runs._start(command)
            assert stop.value.code == 128 + signal.SIGTERM
        else:
            assert abs(runs._start(command)) == code


POPEN = runs.subprocess.Popen


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("", ["--attention", "expected mechanisms"]),
        ("--attention", ["--attention: expected a value"]),
        ("--attention=softmax,cosfomer", ["'cosfomer'", "did you mean 'cosformer'"]),
        ("--attention=softmax,,flow", ["--attention", "distinct names"]),
        ("--attention=flow,flow", ["--attention", "distinct names"]),
        ("--attention=flow --seeds=0", ["--seeds: expected a positive", "'0'"]),
        ("--attention=flow --seeds=two", ["--seeds: expected a positive", "'two'"]),
        ("--attention=flow --task=listop", ["did you mean 'listops'"]),
        ("--attention=flow --suite=states", ["--suite", "did you mean 'state'"]),
        ("--attention=flow --suite=mad --task=mqar", ["--task", "mad-recall", "mqar"]),
        ("--attention=linformer --suite=recall", ["--attention", "causal form"]),
        ("--attention=flow --train.step=3", ["did you mean '--train.steps'"]),
        (
            "--attention=flow --train.steps=-3",
            ["--train.steps: expected a positive int, got -3"],
        ),
    ],
)
def test_errors_of_a_sweep(capsys, started, flags, parts):
    with pytest.raises(SystemExit) as stop:
        sweep.main(flags.split())
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, *parts)
    assert out == "" and started == []


def test_help_imports_no_jax():
    code = (
        "import sys\n"
        "from lra_jax import report, sweep\n"
        "sweep.main(['--help']); report.main(['--help'])\n"
        "print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    end = helpers.run("-c", code)
    assert end.stdout.splitlines()[-1] == "False False", end.stderr
    assert "--seeds=N" in end.stdout and "--out=FOLDER" in end.stdout


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
    assert "linear, compact" in text and "(1 seed; se" in text
    page = (tmp_path / "report" / "report.html").read_text()
    assert "data:image/" in page


def test_tasks_and_values_of_flags(started, tmp_path, capsys):
    flags = ["--attention=flow", "--task=listops,text", f"--workdir={tmp_path}"]
    more = ["--lr=1e-3,3e-3", "--train.dtype=float32,bfloat16", "--data.buckets=64,128"]
    sweep.main([*flags, *more, "--model.dropout=0"])
    assert started == ["listops flow seed 0"] * 4 + ["text flow seed 0"] * 4
    found = [json.loads(f.read_text()) for f in tmp_path.glob("*/config.json")]
    varied = [(c["task"], c["train"]) for c in found]
    seen = {(task, t["learning_rate"], t["dtype"]) for task, t in varied}
    assert len(seen) == 8 and {c["data"]["buckets"] for c in found} == {"64,128"}
    out = capsys.readouterr().out
    assert "text flow --train.learning_rate=3e-3 --train.dtype=bfloat16: test" in out


def test_the_best_by_validation_is_named():
    scores = {"flow --a=1": (30, 33), "flow --a=2": (40, 32), "softmax": (90, 90)}
    results = {
        series: [
            {"task": "t", "attention": series.split()[0], "valid_accuracy_best": v}
            for v in values
        ]
        for series, values in scores.items()
    }
    assert list(runs.best_by_validation(results)) == [
        "t, flow: best by validation of 2: flow --a=2 (36.00 % there)"
    ]
