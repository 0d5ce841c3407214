"""The one form of error: what makes it, and that nothing else does."""

import ast
import dataclasses
import os
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import lra_jax
from lra_jax import errors

PACKAGE = Path(lra_jax.__file__).parent
# Reasons that a caller puts after "got", and a list of errors of the one form.
INNER = (
    *("seals.py", "files.py", "data/builder.py", "data/pathfinder_files.py"),
    "training/checkpoints.py",
)


def _raises(tree: ast.AST) -> list[ast.Raise]:
    """Where ``ValueError(...)`` is raised, other than to be caught at once."""
    caught = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            handled = " ".join(ast.unparse(h.type) for h in node.handlers if h.type)
            if "ValueError" in handled:
                inside = (x for part in node.body for x in ast.walk(part))
                caught |= {id(x) for x in inside}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and re.match(r"(ValueError|KeyError|RuntimeError)\b", ast.unparse(node.exc))
        and id(node) not in caught
    ]


def test_every_error_of_a_user_has_the_one_form():
    lines_by_name = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        lines = [node.lineno for node in _raises(ast.parse(file.read_text("utf-8")))]
        if lines and name not in INNER:
            lines_by_name[name] = lines
    assert not lines_by_name


def test_a_raise_is_seen():
    assert len(_raises(ast.parse("def f():\n    raise ValueError('no')"))) == 1
    kept = "try:\n    raise ValueError('no')\nexcept ValueError:\n    pass"
    assert not _raises(ast.parse(kept))


@dataclasses.dataclass(frozen=True)
class Settings:
    count: int = 1
    rate: float = 0.5
    switch: bool = True
    place: str | None = None
    kind: Literal["a", "b"] = "a"
    other: Any = None


@pytest.mark.parametrize(
    "changes",
    [{"count": np.int64(3)}, {"rate": 1}, {"place": "x"}, {"other": object()}, {}],
)
def test_types_that_fit(changes):
    errors.check_types(Settings(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": "1"}, "--count: expected an int, got '1'"),
        ({"count": True}, "--count: expected an int, got True"),
        ({"count": None}, "--count: expected an int, got None"),
        ({"count": 2**31}, "--count: expected a number of at most 2147483647"),
        ({"count": -(2**40)}, "--count: expected a number of at most 2147483647"),
        ({"rate": "fast"}, "--rate: expected a number, got 'fast'"),
        ({"switch": 1}, "--switch: expected True or False, got 1"),
        ({"place": 3}, "--place: expected text or None, got 3"),
        ({"kind": "c"}, "--kind: expected one of a, b, got 'c'"),
    ],
)
def test_types_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        errors.check_types(Settings(**changes), "--")


@pytest.mark.parametrize("pair", ["batch path", "dim dir", "foo pooling", "nope jnp"])
def test_what_is_not_near_is_not_meant(pair):
    value, choice = pair.split()
    assert errors.did_you_mean(value, [choice]) == ""


def test_errors_change_their_name():
    error = errors.expected("clip", "a positive number", -1)
    renamed, within = errors.rename(error, "--clip"), errors.within("line 3", error)
    assert str(renamed) == "--clip: expected a positive number, got -1"
    assert str(within) == "line 3: clip: expected a positive number, got -1"


def test_long_texts_of_others_are_seen_to_be_cut():
    short, long = ValueError("a\nb"), ValueError("word " * 100)
    assert errors.first_line(short) == "a" and errors.on_one_line(short) == "a b"
    for text in (errors.first_line(long), errors.on_one_line(long)):
        assert len(text) == 300 and text.endswith(" ...")
    assert errors.first_line(ValueError()) == "ValueError"


@pytest.mark.skipif(os.sep == "\\", reason="separates folders there")
@pytest.mark.parametrize("name", ["a*", "a?", "a[1]", "a\\b"])
def test_a_path_that_orbax_would_misread_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^--workdir: expected a path without"):
        errors.check_path("--workdir", Path(name))
