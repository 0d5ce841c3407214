"""The notebooks agree with their sources, and run with small settings."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest
from matplotlib import pyplot

from lra_jax import train

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]_*.py"))

# Where a line of the parameters is another.
DATA = """DATA = {
    "num_train": 200,
    "num_valid": 20,
    "num_test": 20,
    "min_length": 20,
    "max_length": 60,
    "processes": 1,
    "buckets": "60",
}"""
SMALL = {
    "1_quick_start": ["STEPS = 8", DATA],
    "4_rank_collapse": [
        *('SHAPE = "albert"', "LAYERS = 2", "TOKENS = 16", "SEQUENCES = 1"),
        'MECHANISMS = ("cosformer",)',
    ],
    "5_bring_your_own_attention": [
        *("STEPS = 8", DATA),
        'SIZES = {"num_layers": 1, "max_length": 60}',
    ],
    "6_your_own_training_loop": ["STEPS = 8", DATA],
}


# What a Colab machine has, but for its disk.
COLAB = """
def mount(place):
    print("mounted", place)
"""


def setup_cell(source: Path) -> str:
    """The code of the cell that installs the package."""
    cells = json.loads(source.with_suffix(".ipynb").read_text("utf-8"))["cells"]
    return "".join(cells[1]["source"])


def run_as_script(code: str, folder: Path, **variables: str) -> str:
    """What it prints, in a folder of its own."""
    script = folder / "notebook.py"
    script.write_text(code)
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": os.pathsep.join([str(folder), str(FOLDER.parent)]),
        "TFDS_DATA_DIR": str(folder),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_notebooks_are_those_of_the_sources():
    spec = importlib.util.spec_from_file_location("build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert [s.stem for s in build.sources()] == [s.stem for s in SOURCES]
    assert len(SOURCES) == 6
    for source in SOURCES:
        made = source.with_suffix(".ipynb").read_text("utf-8")
        assert made == build.notebook(source), "run python notebooks/build.py"
        assert '"outputs": []' in made and '"image/png"' not in made


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """As in a new session, in a folder of its own, but without importing jax again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(train, "_draw", lambda session: None)
    pyplot.switch_backend("agg")
    modules = {*sys.modules}
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        yield {"__name__": "__main__"}
    pyplot.close("all")
    # The notebook's own.
    for name in {*sys.modules} - modules:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize("source", SOURCES, ids=[s.stem for s in SOURCES])
def test_it_runs(source: Path, tmp_path: Path, notebook, capsys):
    code = source.read_text("utf-8")
    changed = SMALL.get(source.stem, [])
    if changed:
        start = code.index('# %% tags=["parameters"]')
        end = code.index("# %%", start + 1)
        names = set(re.findall(r"^(\w+) =", code[start:end], re.MULTILINE))
        assert {line.split()[0] for line in changed} <= names
        code = code[:end] + "\n".join(changed) + "\n\n" + code[end:]
    # Validated once: each time is a checkpoint, too.
    code = re.sub(r'"eval_every": STEPS // \d', '"eval_every": STEPS', code)
    exec(compile(code, source.name, "exec"), notebook)
    printed = capsys.readouterr().out
    differences = re.findall(r"largest difference: (\S+)", printed)
    assert len(differences) == {"2": 3, "3": 5}.get(source.stem[0], 0)
    assert all(float(difference) < 1e-5 for difference in differences)
    if source.stem.startswith("5"):
        page = (tmp_path / "report" / "report.html").read_text("utf-8")
        assert "power" in page and "linear" in page


@pytest.mark.parametrize("source", SOURCES, ids=[s.stem for s in SOURCES])
def test_the_setup_leaves_an_installed_package_alone(source: Path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("installed"))
    exec(setup_cell(source), {})


def without_the_package(monkeypatch, jax: str) -> list[list[str]]:
    """Hides lra_jax, and has jax in that version; returns what was run since."""
    run: list[list[str]] = []

    def record(command: list[str], **_):
        run.append(command)
        return subprocess.CompletedProcess(command, 1 if jax == "0.99" else 0, "", "no")

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lra_jax" else name
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda _: jax)
    monkeypatch.setattr(subprocess, "run", record)
    return run


@pytest.mark.parametrize("version", ["0.9.2", "0.4.38", "0.5.0.dev1"])
def test_the_setup_names_a_jax_that_is_too_old(version: str, monkeypatch):
    run = without_the_package(monkeypatch, version)
    with pytest.raises(SystemExit) as stop:
        exec(setup_cell(SOURCES[0]), {})
    message = str(stop.value)
    assert message.startswith("lra_jax needs jax 0.10 or later, and this machine has ")
    assert version in message and "%pip install --upgrade" in message
    assert "\n" not in message and not run


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.dev1", "1.0"])
def test_the_setup_keeps_the_machines_jax(version: str, monkeypatch):
    run = without_the_package(monkeypatch, version)
    exec(setup_cell(SOURCES[0]), {})
    (command,) = run
    assert command[-2:] == [f"jax=={version}", f"jaxlib=={version}"]


def test_the_setup_says_what_pip_said(monkeypatch):
    without_the_package(monkeypatch, "0.99")
    with pytest.raises(SystemExit, match="pip could not install lra_jax:\nno"):
        exec(setup_cell(SOURCES[0]), {})


@pytest.mark.parametrize("in_colab", [True, False])
def test_the_quick_start_keeps_its_run(in_colab: bool, tmp_path: Path):
    """On Google Drive, where there is one; up to the training alone."""
    code, separator, _ = SOURCES[0].read_text("utf-8").partition("# ## Train\n")
    assert separator
    cell = code[code.index("# %%\ntry:") :]
    if in_colab:
        (tmp_path / "google" / "colab").mkdir(parents=True)
        (tmp_path / "google" / "colab" / "__init__.py").touch()
        (tmp_path / "google" / "colab" / "drive.py").write_text(COLAB)
    parameters = (
        f'from pathlib import Path\nRUNS = "mine"\nDRIVE = "{tmp_path}/drive"\n'
    )
    printed = run_as_script(parameters + cell, tmp_path)
    place = tmp_path / ("drive/MyDrive/lra_jax/mine" if in_colab else "mine")
    assert place.is_dir() and f"runs are kept in {place}" in printed
    assert ("mounted" in printed) == in_colab
