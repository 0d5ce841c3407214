"""The public names are typed for a user's own pyright, and the citation is of here."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import lra_jax

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).parent / "user_program.py"

needs_pyright = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is not installed"
)


def problems(folder: Path, *programs: str) -> list[str]:
    """What pyright says of programs in a folder of their own, in its strictest mode."""
    for number, program in enumerate(programs):
        (folder / f"program_{number}.py").write_text(program)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson"]
    command += ["--pythonpath", sys.executable, "--project", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(programs), done.stderr
    return [
        f"{Path(one['file']).name}, line {one['range']['start']['line'] + 1}: "
        f"{one['message']}"
        for one in report["generalDiagnostics"]
    ]


@needs_pyright
def test_a_users_program_has_types(tmp_path) -> None:
    """And a wrong one is found."""
    right = PROGRAM.read_text("utf-8")
    wrong = right.replace("allow_code=False", "allow_code=3")
    (problem,) = problems(tmp_path, right, wrong)
    assert problem.startswith("program_1.py") and "allow_code" in problem


def test_the_program_runs(capsys) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "(2, 16, 4, 8)"


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    version = re.search(r"^version: (\S+)$", text, re.MULTILINE)
    assert version is not None and version[1] == lra_jax.__version__
