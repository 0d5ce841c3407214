"""Command lines: errors of one line, the allocator's restart."""

import io
import json
import logging
import os
import pathlib
import platform
import pty
import subprocess
import sys
import warnings

import helpers
import pytest

from lra_jax import cli, evaluate, report, train
from lra_jax.cli import parse_config
from lra_jax.configs import TASKS, get_preset
from lra_jax.configs.registry import find_task
from lra_jax.errors import InputError
from lra_jax.tasks import get_task
from lra_jax.training.optimizer import make_schedule
from lra_jax.training.workdir import open_workdir

RESTART = """
import json, os, signal, subprocess, sys
from lra_jax import runtime
runtime.tune_allocator()
names = ("GLIBC_TUNABLES", "LRA_JAX_ALLOCATOR_SET")
child = "import json, os; print(json.dumps([os.environ.get(n) for n in %r]))" % (names,)
with open("/proc/self/environ") as file:
    # The C library cuts the value into its parts, in place.
    mine = [part.removeprefix("GLIBC_TUNABLES=") for part in file.read().split("\\0")]
print(json.dumps({
    "mine": [part for part in mine if part.startswith("glibc.")],
    "child": json.loads(subprocess.check_output([sys.executable, "-c", child])),
    "arguments": sys.argv[1:],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
}))
"""

linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc",
    reason="the restart is for glibc",
)


def outcome(capsys, *args: str, module=train) -> tuple[object, str, str]:
    """Exit code, output and errors of a command line."""
    with pytest.raises(SystemExit) as stop:
        module.main(list(args))
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--data.buckets=20", ["--data.buckets", "'20'"]),
        ("--data.dir=FILE/data", ["FILE", "Not a directory"]),
    ],
)
def test_errors_that_need_the_data(capsys, tmp_path, small_data, flags, parts):
    file = tmp_path / "file"
    file.touch()
    config = helpers.tiny(small_data, tmp_path / "run")
    flags, *parts = (text.replace("FILE", str(file)) for text in (flags, *parts))
    code, _, err = outcome(capsys, *helpers.flags(config), flags)
    helpers.assert_one_error(code, err, 2, *parts)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError("--split", "expected\na split"), (2, "--split: expected a split")),
        (ValueError("two\nlines"), (1, "ValueError: two lines (--debug")),
        (OSError("no space left"), (2, "no space left")),
        (RuntimeError("two\nlines"), (1, "RuntimeError: two lines (--debug")),
        (KeyError("tokens"), (1, "KeyError: 'tokens' (--debug shows where)")),
        (AssertionError(), (1, "AssertionError")),
    ],
)
def test_any_error_is_one_line(capsys, monkeypatch, error, expected) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(evaluate, "run", run)
    code, _, err = outcome(capsys, "--workdir=somewhere", module=evaluate)
    helpers.assert_one_error(code, err, *expected)
    flags = ("--debug", "--workdir=somewhere")
    code, _, err = outcome(capsys, *flags, module=evaluate)
    assert code == expected[0] and "Traceback" in err and ", in run\n" in err


def test_an_error_that_nobody_reads_keeps_its_code(monkeypatch) -> None:
    class Closed(io.StringIO):
        def write(self, *_: object) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(SystemExit) as stop:
        cli.fail("stopped", 141)
    assert stop.value.code == 141


FULL = "error: [Errno 28] No space left on device\n"
WRITERS = ("lra_jax.attention", "lra_jax.train --help", "lra_jax.data --help")


@linux
@pytest.mark.parametrize(
    ("command", "output", "code", "error"),
    [
        ("lra_jax", ">&-", 0, ""),
        ("lra_jax", ">&- 2>&-", 0, ""),
        ("lra_jax", ">/dev/full 2>/dev/full", 2, ""),
        *((command, ">/dev/full", 2, FULL) for command in WRITERS),
    ],
)
def test_an_output_that_is_closed_or_full(command, output, code, error) -> None:
    shell = ["sh", "-c", f"{sys.executable} -m {command} {output}"]
    environment = helpers.environment({})
    end = subprocess.run(shell, env=environment, stderr=subprocess.PIPE, text=True)
    assert (end.returncode, end.stderr) == (code, error)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def test_evaluate_before_the_first_checkpoint(capsys, tmp_path, small_data):
    config = helpers.tiny(small_data, tmp_path)
    fingerprint = get_task("listops").prepare(config.data).fingerprint
    open_workdir(tmp_path, config, fingerprint)
    code, _, err = outcome(capsys, f"--workdir={tmp_path}", module=evaluate)
    helpers.assert_one_error(
        code, err, 2, "checkpoints/best: expected a checkpoint, got none yet"
    )
    values = json.loads((tmp_path / "config.json").read_text())
    values["data_fingerprint"] = "00"
    (tmp_path / "config.json").write_text(json.dumps(values))
    code, _, err = outcome(capsys, f"--workdir={tmp_path}", module=evaluate)
    message = f"--workdir: expected a run on these data, of fingerprint {fingerprint}"
    helpers.assert_one_error(code, err, 2, message, "on other data, 00")


def restart(**environment: str) -> dict:
    settings = {"LRA_JAX_ALLOCATOR": "tuned", "JAX_PLATFORMS": "cpu"} | environment
    end = helpers.run("-c", RESTART, "a b", "--c", **settings)
    assert end.returncode == 0, end.stderr
    result = json.loads(end.stdout)
    assert result["arguments"] == ["a b", "--c"]
    assert result["blocked"] == []  # A script that does not watch can be interrupted.
    return result


@linux
@pytest.mark.parametrize("theirs", ["", "glibc.pthread.rseq=1"])
def test_the_allocator_is_tuned_for_this_process_alone(theirs):
    """Tunables of other parts are kept."""
    result = restart(**{"GLIBC_TUNABLES": theirs} if theirs else {})
    mine = ":".join(result["mine"])
    assert mine.startswith(f"{theirs}:glibc.malloc." if theirs else "glibc.malloc.")
    for setting in ("mmap_threshold=", "tcache_count=0"):
        assert f"glibc.malloc.{setting}" in mine
    assert result["child"] == [theirs or None, None]


@linux
@pytest.mark.parametrize(
    "environment",
    [
        {"LRA_JAX_ALLOCATOR": "system"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"},
        {"JAX_PLATFORMS": "cuda,cpu"},
    ],
)
def test_the_allocator_is_left_alone(environment):
    result = restart(**environment)
    theirs = environment.get("GLIBC_TUNABLES")
    assert ":".join(result["mine"]) == (theirs or "")
    assert result["child"] == [theirs, None]


without_gpu = pytest.mark.skipif(
    pathlib.Path("/dev/nvidiactl").exists(), reason="CUDA starts"
)


@pytest.mark.parametrize(
    "environment",
    [
        {"LRA_JAX_ALLOCATOR": "fast"},
        {"LRA_JAX_CPU_DEVICES": "0"},
        {"LRA_JAX_CPU_DEVICES": "999999"},
        {"JAX_PLATFORMS": "foo"},
        pytest.param({"JAX_PLATFORMS": "cuda"}, marks=without_gpu),
    ],
)
def test_environment_errors(environment):
    end = helpers.run("-m", "lra_jax.train", "--train.steps=1", **environment)
    ((name, value),) = environment.items()
    helpers.assert_one_error(end.returncode, end.stderr, 2, name, f"'{value}'")


KEPT = """
import os, pathlib, sys
del os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
os.environ.update(setting.split("=") for setting in sys.argv[1:])
from lra_jax import runtime
runtime.configure_jax()
import jax
jax.jit(lambda x: x + 1)(1)
folder = pathlib.Path(jax.config.jax_compilation_cache_dir)
print(any(folder.glob("jit__lambda*")))
"""


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (["XDG_CACHE_HOME=cache"], True),
        (
            ["XDG_CACHE_HOME=cache", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=9"],
            False,
        ),
        (["JAX_COMPILATION_CACHE_DIR=cache"], False),
    ],
)
def test_which_cache_keeps_small_programs(tmp_path, monkeypatch, settings, kept):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert helpers.run("-c", KEPT, *settings).stdout == f"{kept}\n"


def test_no_preset_is_changed_by_parsing():
    for preset in ("modern-quick", "compact", "official"):
        parsed = parse_config("prog", "text", [f"--preset={preset}"])
        assert parsed == get_preset("listops", preset)
    flags = ["--train.batch_size=4", "--seed", "7", "--model.qkv-bias=False"]
    assert parse_config("prog", "text", flags) == get_preset().replace(
        seed=7, train={"batch_size": 4}, model={"qkv_bias": False}
    )


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [
        ("--distributed", True),
        ("--distributed --seed=1", True),
        ("--distributed=true", True),
        ("--seed=1", False),
        ("--distributed False", False),
        ("--distributed=false", False),
    ],
)
def test_a_switch_may_stand_alone_or_with_its_value(flags, is_on):
    assert parse_config("prog", "text", flags.split()).distributed == is_on


def test_folders_may_come_before_and_after_flags():
    words = ["a", "--out=x", "--allow-code=True", "b"]
    config = cli.parse(report.ReportConfig, "prog", "text", words)
    assert (config.runs, config.out, config.allow_code) == (("a", "b"), "x", True)


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--lr=0.1", {"learning_rate": 0.1}),
        ("--steps 30 --batch-size 4", {"steps": 30, "batch_size": 4}),
        ("--batch=4", {"batch_size": 4}),
        ("--train.eval-every=20 --train.eval_every=30", {"eval_every": 30}),
        ("--train.steps=20", {"steps": 20, "warmup": 2}),
    ],
)
def test_short_forms_and_a_short_run(flags, changes) -> None:
    train = parse_config("train", "", flags.split()).train
    assert {name: getattr(train, name) for name in changes} == changes
    assert parse_config("train", "", ["--dim=32"]).model.embed_dim == 32


def test_a_warm_up_that_was_asked_for_stays(tmp_path, capsys) -> None:
    """Even where it is that of the preset: it is refused, and not replaced."""
    arguments = ["--preset=compact", "--steps=300", "--warmup=500"]
    assert parse_config("train", "", arguments).train.warmup == 500
    code, _, err = outcome(capsys, *arguments, f"--workdir={tmp_path / 'run'}")
    message = "--train.warmup: expected less than --train.steps=300, got 500"
    helpers.assert_one_error(code, err, 2, message)


def test_every_group_of_flags_says_what_it_is(capsys) -> None:
    with pytest.raises(SystemExit):
        parse_config("train", "", ["--help"])
    said = capsys.readouterr().out
    assert "pyright" not in said
    for words in ("Optimisation, evaluation and checkpoints.", "Sizes and parts of"):
        assert words in said


def test_a_short_run_of_every_kind_of_schedule() -> None:
    presets = [(task, preset) for task in TASKS for preset in find_task(task).presets]
    kinds = {}
    for task, preset in presets:
        train = get_preset(task, preset).train
        kinds[train.schedule, train.length_warmup, train.curriculum] = task, preset
    for task, preset in kinds.values():
        flags = [f"--task={task}", f"--preset={preset}", "--train.steps=20"]
        config = parse_config("train", "", flags)
        get_task(task).check(config)
        make_schedule(config.train)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_help_has_no_colours_where_none_are_wanted(no_color: str):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lra_jax.evaluate", "--help"]
    variables = helpers.environment({"NO_COLOR": no_color, "TERM": "xterm"})
    with subprocess.Popen(command, stdout=theirs, env=variables) as process:
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
    os.close(ours)
    assert process.returncode == 0
    assert b"--workdir" in shown and (b"\x1b[" in shown) == (not no_color)


def test_text_that_the_output_cannot_show_is_escaped(tmp_path):
    file = tmp_path / "texts.tsv"
    lines = [f"word{i} \u2192 caf\xe9\tlabel{i % 2}\n" for i in range(20)]
    file.write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
    flags = ["--task=finetune", f"--data.path={file}", "--count=2"]
    done = subprocess.run(
        [sys.executable, "-m", "lra_jax.data", "sample", *flags],
        env=helpers.environment({"PYTHONIOENCODING": "ascii"}),
        capture_output=True,
        encoding="ascii",
        check=True,
    )
    assert "\\u2192 caf\\xe9" in done.stdout


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux has an error in place of an end.
        return b""


def test_warnings_are_one_line(monkeypatch, capsys) -> None:
    """Those of the log too; a coroutine that Orbax leaves behind is no news."""
    log = logging.getLogger("lra_jax")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["command", "--flag"])
    assert cli.begin(None) == ["--flag"]
    logging.getLogger("lra_jax.data.text").warning("%d left out", 3)
    warnings.warn("coroutine 'write' was never awaited", RuntimeWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: 3 left out\n"
