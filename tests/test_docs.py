"""The examples of the documentation run."""

import re
from pathlib import Path

import pytest

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
