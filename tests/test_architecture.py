"""The layers hold: imports go one way, and what must stay light stays light."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # Its dataclasses look themselves up there.
    spec.loader.exec_module(module)
    return module


HOUSE = load(ROOT / "docs" / "architecture.py")


@functools.cache
def code() -> Any:
    """Every module of the package and its imports, read when a test needs them."""
    return HOUSE.read(ROOT / "lra_jax")


def within(*parts: str) -> set[str]:
    return {module for module in code().modules if code().part(module) in parts}


def outside(*parts: str) -> set[str]:
    """The packages of others that a part imports, but for Python's own."""
    part = within(*parts)
    targets = {i.target.split(".")[0] for i in code().outside if i.source in part}
    return targets - sys.stdlib_module_names


def test_imports_go_down_the_layers() -> None:
    assert not HOUSE.against_the_layers(code())


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not HOUSE.circles(code().inside)


def test_nothing_imports_a_command_line() -> None:
    commands = code().commands
    assert {"lra_jax.train", "lra_jax.data.__main__"} <= commands
    assert not {i for i in code().inside if i.target in commands}


def test_attention_needs_arrays_alone() -> None:
    assert {"jax", "numpy"} <= outside("attention") <= {"jax", "numpy", "chex"}
    assert {b for a, b in code().arrows() if a == "attention"} <= {"kernels", "errors"}


def test_attention_enters_the_kernels_by_one_door() -> None:
    rooms, kernels = within("attention"), within("kernels")
    doors = {
        i.target for i in code().inside if i.source in rooms and i.target in kernels
    }
    assert doors == {"lra_jax.kernels"}


def test_the_library_knows_no_arena() -> None:
    library, arena = {"models", "attention"}, {"data", "tasks", "configs", "training"}
    assert not {(a, b) for a, b in code().arrows() if a in library and b in arena}


def test_data_needs_neither_jax_nor_tensorflow() -> None:
    assert "grain" in outside("data")
    assert not {"jax", "flax", "tensorflow"} & outside("data")
    for module in within("data"):
        assert not within("attention", "models") & code().at_import(module)


@pytest.mark.parametrize(
    "module", ["attention", "attention.registry", "cli", "configs", "errors"]
)
def test_help_needs_no_jax(module: str) -> None:
    imported = code().at_import(f"lra_jax.{module}")
    packages = {name.split(".")[0] for name in imported}
    assert not {"jax", "flax", "chex", "orbax", "grain"} & packages


def test_the_page_has_the_imports_of_today() -> None:
    """After a change: python docs/architecture.py."""
    page = HOUSE.PAGE.read_text()
    assert page == HOUSE.written(page, lambda: HOUSE.table(code()))


def test_what_breaks_the_rules_is_found(tmp_path: Path) -> None:
    files = {
        "__init__": "",
        "low": "def f():\n    from house import high",
        "high": "from house.low import f\nimport jax.numpy",
        "one": "import typing\nif typing.TYPE_CHECKING:\n    from house import two",
        "two": "import house.one, house.high",
        "run": 'import house.two\nif __name__ == "__main__":\n    pass',
    }
    package = tmp_path / "house"
    package.mkdir()
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    code = HOUSE.read(package)
    assert HOUSE.circles(code.inside) == {
        frozenset({"house.low", "house.high"}),
        frozenset({"house.one", "house.two"}),
    }
    layers = [[HOUSE.COMMANDS], ["two"], ["one"], ["high"], ["low"]]
    assert HOUSE.against_the_layers(code, layers) == {
        ("house.low", "house.high"),
        ("house.one", "house.two"),
    }
    assert code.commands == {"house.run"}
    assert "jax.numpy" in code.at_import("house.run")
    assert "jax.numpy" not in code.at_import("house.one")
    assert HOUSE.steps({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}
