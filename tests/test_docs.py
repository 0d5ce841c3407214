"""The examples of the documentation run."""

import pkgutil
import re
from pathlib import Path

import pytest

from lra_jax.attention import MECHANISMS
from lra_jax.attention import __main__ as command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
EXAMPLES = {
    page.name: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in PAGES
}


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


def test_the_table_of_mechanisms_is_the_registry() -> None:
    page = (DOCS / "mechanisms.md").read_text()
    shown = re.search(r"<!-- mechanisms -->\n(.*)<!-- end -->", page, re.DOTALL)
    assert shown is not None and shown[1] == command.markdown() + "\n"


def test_the_command_knows_no_other_flag(capsys) -> None:
    assert command.main(["--help"]) == 0
    assert "--markdown" in capsys.readouterr().out
    assert command.main(["--html"]) == 2
    assert "--html" in capsys.readouterr().err
