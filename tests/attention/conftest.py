"""Marks the tests of the first mechanisms as the quick loop's."""

from pathlib import Path

import pytest

CORE = {"softmax", "linear", "cosformer", "flow", "linformer"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`core`: a test of one of these in its own file, by name, or by golden case.

    Golden cases in float64 alone, and no simulated devices, which take long.
    """
    here = Path(__file__).parent
    for item in items:
        # This hook sees the tests of all folders.
        if here not in item.path.parents or item.path.parent.name == "sharded":
            continue
        in_core_file = item.path.stem.removeprefix("test_") in CORE
        parameters = getattr(item, "callspec", None)
        values = {} if parameters is None else parameters.params
        name = values.get("name")
        if values.get("dtype") == "float64" and "case" in values:
            name = values["case"]["name"].split("_")[0]
        if in_core_file or (isinstance(name, str) and name in CORE):
            item.add_marker("core")
