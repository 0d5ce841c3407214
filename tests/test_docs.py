"""The examples of the documentation run."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.attention import MECHANISMS
from lra_jax.attention import __main__ as command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
EXAMPLES = {
    page.name: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in PAGES
}

DOCTESTS = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "lra_jax").rglob("*.py"))
    if "    >>> " in file.read_text()
]


@pytest.mark.parametrize("module", DOCTESTS)
def test_examples_of_docstrings(module: str) -> None:
    """The public names of a module, with jax, jnp, np and nnx, are what they need."""
    names = {"jax": jax, "jnp": jnp, "np": np, "nnx": nnx}
    results = doctest.testmod(
        importlib.import_module(module),
        extraglobs=names,
        optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST,
    )
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("page", [page for page, codes in EXAMPLES.items() if codes])
def test_examples(page: str) -> None:
    """Those of a page one after the other, as a reader would paste them."""
    names, known = {"__name__": page}, set(MECHANISMS)
    try:
        for code in EXAMPLES[page]:
            exec(compile(code, page, "exec"), names)
    finally:
        for name in {*MECHANISMS} - known:
            del MECHANISMS[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    paths = re.findall(
        r"`((?:lra_jax|tests|results|benchmarks|docs)/[\w./-]+)(?:::\w+)?`", text
    )
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    code = re.findall(r"`(?:python -m )?(lra_jax(?:\.\w+)+)", page.read_text())
    for name in {name for name in code if "NAME" not in name}:
        pkgutil.resolve_name(name)


def test_there_are_examples() -> None:
    assert EXAMPLES["README.md"] and EXAMPLES["attention.md"]


def test_the_readme_is_short() -> None:
    """More detail belongs on a page of docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_pages_can_be_finished() -> None:
    """A page has one topic; numbers beyond it belong into results/."""
    words = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    assert {name: count for name, count in words.items() if count > 1500} == {}


def test_every_result_is_listed() -> None:
    """A new file or folder of results/ gets a row in docs/results.md."""
    page = (DOCS / "results.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `results/")]
    listed = {
        name for row in rows for name in re.findall(r"`results/([\w.-]+)/?`", row)
    }
    assert listed == {entry.name for entry in (ROOT / "results").iterdir()}
    for row in rows:
        _, _, measures, command, pages, _ = row.split("|")
        assert measures.strip() and "`python " in command and "](" in pages


def test_every_page_is_in_the_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in site


def test_the_picture_of_matrices_can_be_drawn() -> None:
    """Every matrix of docs/matrices.py, and the causal ones see no later key."""
    spec = importlib.util.spec_from_file_location("matrices", DOCS / "matrices.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    both, causal = script.matrices(False), script.matrices(True)
    assert set(causal) == {name for name in both if MECHANISMS[name].causal}
    for matrix in (*both.values(), *causal.values()):
        assert matrix.shape == (64, 64) and np.isfinite(matrix).all()
    for matrix in causal.values():
        assert np.abs(np.triu(matrix, 1)).max() < 1e-6


def test_the_command_knows_no_other_flag(capsys) -> None:
    command.main(["--help"])
    assert "--markdown" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        command.main(["--html"])
    assert end.value.code == 2
    assert "--html" in capsys.readouterr().err
