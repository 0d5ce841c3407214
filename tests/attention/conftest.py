"""Marks the tests of the first mechanisms as the quick loop's."""

from pathlib import Path

import pytest

CORE = {"softmax", "linear", "cosformer", "flow", "linformer"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`core`: a test of one of these in its own file, by name, or by golden case."""
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:  # this hook sees those of all folders
            continue
        own = item.path.stem.removeprefix("test_") in CORE
        parameters = getattr(item, "callspec", None)
        given = {} if parameters is None else parameters.params
        name = given.get("name") or given.get("case")
        if isinstance(name, dict):  # a golden case
            name = name["name"].split("_")[0]
        if own or (isinstance(name, str) and name in CORE):
            item.add_marker("core")
