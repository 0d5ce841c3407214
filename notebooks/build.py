"""Makes the ``.ipynb`` files from the ``.py`` files next to them.

    python notebooks/build.py

Adds to each notebook a badge that opens it in Colab, and a cell that installs the
package there; leaves outputs out.
"""

import tomllib
from pathlib import Path

import jupytext
import nbformat

FOLDER = Path(__file__).parent
PROJECT = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text("utf-8"))[
    "project"
]
REPOSITORY = PROJECT["urls"]["Repository"]
# The oldest jax that the package works with, as "0.10".
JAX = next(
    name.removeprefix("jax>=")
    for name in PROJECT["dependencies"]
    if name.startswith("jax>=")
)

_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_COLAB = "https://colab.research.google.com/github/{path}/blob/main/notebooks/{name}"
_SETUP = f"""# Installs the package where it is missing, as in Colab. Colab's own jax
# stays as it is, because it fits the machine's driver.
import importlib.metadata
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("lra_jax") is None:
    kept = {{
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib")
        if importlib.util.find_spec(name)
    }}
    found = kept.get("jax", "{JAX}")
    if [int(part) for part in found.split(".")[:2]] < [{JAX.replace(".", ", ")}]:
        raise SystemExit(
            f"lra_jax needs jax {JAX} or later, and this machine has {{found}}: run "
            "%pip install --upgrade 'jax[tpu]' (on a GPU 'jax[cuda12]', on a CPU "
            "jax), restart the session, and run this cell again."
        )
    pins = [f"{{name}}=={{version}}" for name, version in kept.items()]
    source = "git+{REPOSITORY}"
    install = ["-m", "pip", "install", "--quiet", source, *pins]
    done = subprocess.run(
        [sys.executable, *install], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pip could not install lra_jax:\\n{{done.stderr}}")"""


def sources() -> list[Path]:
    """The notebooks' sources, in order."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def notebook(source: Path) -> str:
    """The text of the ``.ipynb`` file that belongs to a source."""
    made = jupytext.reads(source.read_text("utf-8"), fmt="py:percent")
    path = REPOSITORY.removeprefix("https://github.com/")
    link = _COLAB.format(path=path, name=source.with_suffix(".ipynb").name)
    made.cells[0].source += f"\n\n[![Open in Colab]({_BADGE})]({link})"
    made.cells.insert(1, nbformat.v4.new_code_cell(_SETUP))
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"  # Else it is random.
        cell["metadata"] = {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.writes(nbformat.from_dict(made)) + "\n"


if __name__ == "__main__":
    for source in sources():
        target = source.with_suffix(".ipynb")
        target.write_text(notebook(source), encoding="utf-8")
        print(target)
