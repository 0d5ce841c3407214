"""The examples of the documentation run."""

import re
from pathlib import Path

import pytest

from lra_jax.attention import __main__ as command

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = [
    (page.name, code)
    for page in sorted(DOCS.glob("*.md"))
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_example(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {"__name__": page})


def test_there_are_examples() -> None:
    assert "attention.md" in {page for page, _ in EXAMPLES}


def test_the_table_of_mechanisms_is_the_registry() -> None:
    page = (DOCS / "mechanisms.md").read_text()
    shown = re.search(r"<!-- mechanisms -->\n(.*)<!-- end -->", page, re.DOTALL)
    assert shown is not None and shown[1] == command.markdown() + "\n"


def test_the_command_knows_no_other_flag(capsys) -> None:
    assert command.main(["--html"]) == 2
    assert "--html" in capsys.readouterr().err
