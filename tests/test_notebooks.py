"""The notebooks agree with their sources, and run with small settings."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
}"""
SMALL = {
    "1_quick_start": ["STEPS = 20", DATA],
    "4_rank_collapse": [
        *("LAYERS = 2", "TOKENS = 16", "SEQUENCES = 1"),
        'MECHANISMS = ("softmax", "cosformer")',
    ],
    "5_bring_your_own_attention": [
        *("STEPS = 20", DATA),
        'SIZES = {"num_layers": 1, "max_length": 60}',
    ],
}


def test_the_notebooks_are_those_of_the_sources():
    spec = importlib.util.spec_from_file_location("build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert [s.stem for s in build.sources()] == [s.stem for s in SOURCES]
    assert len(SOURCES) == 5
    for source in SOURCES:
        made = source.with_suffix(".ipynb").read_text("utf-8")
        assert made == build.notebook(source), "run python notebooks/build.py"
        assert '"outputs": []' in made and '"image/png"' not in made


@pytest.mark.parametrize("source", SOURCES, ids=[s.stem for s in SOURCES])
def test_it_runs(source: Path, tmp_path: Path):
    code = source.read_text("utf-8")
    changed = SMALL.get(source.stem, [])
    if changed:
        start = code.index('# %% tags=["parameters"]')
        end = code.index("# %%", start + 1)
        names = set(re.findall(r"^(\w+) =", code[start:end], re.MULTILINE))
        assert {line.split()[0] for line in changed} <= names
        code = code[:end] + "\n".join(changed) + "\n\n" + code[end:]
    script = tmp_path / "notebook.py"
    script.write_text(code)
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(FOLDER.parent),
        "TFDS_DATA_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for difference in re.findall(r"largest difference: (\S+)", done.stdout):
        assert float(difference) < 1e-5
