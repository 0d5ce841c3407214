"""``python -m lra_jax``: what there is, and its commands by one name."""

import importlib.util

import helpers
import pytest

import lra_jax
from lra_jax import __main__ as overview
from lra_jax import attention
from lra_jax.configs import TASKS


def test_it_lists_everything_without_jax():
    code = "import sys; from lra_jax.__main__ import main; main([]); "
    done = helpers.run("-c", code + "print('jax' in sys.modules)")
    assert done.returncode == 0, done.stderr
    for name in (*overview.COMMANDS, *TASKS, *attention.names()):
        assert name in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    assert max(map(len, done.stdout.splitlines())) <= 80


LOADED = """
import sys
from lra_jax.__main__ import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"jax", "flax", "numpy", "matplotlib"}
    print(sorted(heavy & sys.modules.keys()))
"""
# The defaults in the help of train are those of the preset.
WORDS = {
    "train --preset=official": [
        *("--train.learning-rate", "(default: 80000)", "cosformer"),
        "listops: modern-quick, compact, official",
    ],
    "evaluate": ["--checkpoint"],
    "sweep": ["--seeds=N"],
    "report": ["--out STR"],
    "data": ["prepare", "describe", "sample"],
    "data prepare": ["--data.path"],
    "data sample": ["--count"],
    "analyze": ["rank-collapse"],
    "analyze rank-collapse": ["--attention"],
    "benchmark": ["--max-seconds", "Table 2 of the LRA paper"],
}


@pytest.mark.parametrize("line", dict.fromkeys([*overview.COMMANDS, *WORDS]))
def test_help_is_there_at_once(line: str):
    """Without jax and whatever else takes long to import."""
    command, *more = line.split()
    assert importlib.util.find_spec(f"lra_jax.{command}") is not None
    done = helpers.run("-c", LOADED, command, *more, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    for part in (f"lra_jax.{command}", *WORDS.get(line, ())):
        assert part in done.stdout


def test_arguments_and_exit_codes_are_the_commands():
    done = helpers.run("-m", "lra_jax", "train", "--task=listop")
    assert done.returncode == 2
    assert "did you mean 'listops'" in done.stderr


def test_it_names_its_version(capsys):
    overview.main(["--version"])
    assert capsys.readouterr().out == f"lra_jax {lra_jax.__version__}\n"


def test_the_script_finds_an_attention_in_the_current_folder(tmp_path, monkeypatch):
    """The installed script, which is in another folder."""
    script = tmp_path / "bin" / "lra-jax"
    script.parent.mkdir()
    script.write_text("from lra_jax.__main__ import run\nrun()\n")
    (tmp_path / "mine.py").write_text("def squared(query, key, value): return value\n")
    monkeypatch.chdir(tmp_path)
    done = helpers.run(str(script), "train", "--attention=mine:square")
    assert done.returncode == 2
    assert "did you mean 'squared'?" in done.stderr


def test_an_unknown_command(capsys):
    with pytest.raises(SystemExit) as stop:
        overview.main(["trian"])
    assert stop.value.code == 2
    assert "command: expected one of train, " in (error := capsys.readouterr().err)
    assert error.rstrip().endswith("did you mean 'train'?")


def test_the_package_finds_its_folders_when_they_are_named():
    code = (
        "import sys, lra_jax; print('jax' in sys.modules, 'attention' in dir(lra_jax));"
        "print(lra_jax.attention.linear_attention.__name__, lra_jax.models.__name__);"
        "lra_jax.atention"
    )
    done = helpers.run("-c", code)
    expected = ["False True", "linear_attention lra_jax.models"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert "no attribute 'atention'" in done.stderr
