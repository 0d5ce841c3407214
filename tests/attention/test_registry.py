"""The registry: names, capabilities, lookup, and that none of it imports jax."""

import ast
import functools
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from lra_jax import attention
from lra_jax.attention import __main__ as command

from .mechanisms import NAMES, assert_rejects


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_and_listing_leaves_jax_alone() -> None:
    code = (
        "import sys, lra_jax.attention as a, lra_jax.attention.__main__ as m;"
        "m.table(); a.names(); dir(a); a.resolve('cosformer');"
        "print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    assert _python(code) == "False False"


def test_every_module_of_a_mechanism_is_in_the_table() -> None:
    package = Path(inspect.getfile(attention)).parent
    files = [
        file
        for file in package.rglob("*.py")
        if f"\ndef {file.stem}_attention(" in file.read_text()
    ]
    parts = [file.relative_to(package).with_suffix("").parts for file in files]
    modules = {".".join(("lra_jax", "attention", *part)) for part in parts}
    assert modules == {one.module for one in attention.MECHANISMS.values()}
    for name, mechanism in attention.MECHANISMS.items():
        assert mechanism.module.rpartition(".")[2] == mechanism.name == name


@pytest.mark.parametrize("name", NAMES)
def test_each_mechanism_finds_its_functions(name: str) -> None:
    mechanism = attention.resolve(name)
    assert mechanism is attention.MECHANISMS[name]
    assert mechanism.attention is getattr(attention, f"{name}_attention")
    assert mechanism.weights is getattr(attention, f"{name}_weights")
    assert mechanism.cost
    assert mechanism.summary
    assert mechanism.source
    parameters = inspect.signature(mechanism.attention).parameters
    assert list(parameters)[:3] == ["query", "key", "value"]
    assert {"mask", "is_causal", "precision", "flax"} <= set(parameters)
    made = getattr(attention, f"{name}_parameters", None)
    assert mechanism.make_parameters is made
    if made is not None:
        sizes = {"max_length": 8, "num_heads": 2, "head_dim": 4}
        taken = inspect.signature(made).parameters
        sizes = {size: value for size, value in sizes.items() if size in taken}
        arrays = jax.eval_shape(functools.partial(made, **sizes), jax.random.key(0))
        assert {*mechanism.buffers} <= arrays.keys()
        assert arrays.keys() <= set(parameters)


def test_capabilities() -> None:
    """All that an entry claims is there; other tests show that it works."""
    for mechanism in attention.MECHANISMS.values():
        for part in ("init", "prefill", "step"):
            has = hasattr(attention, f"{mechanism.name}_{part}")
            assert has == mechanism.stream
        parameters = inspect.signature(mechanism.attention).parameters
        assert {gate.name for gate in mechanism.gates} <= set(parameters)
        if mechanism.kernels:
            assert "implementation" in parameters


def _mine(query, key, value, mask=None, *, width=3):
    return value


class _Callable:
    def __call__(self, query, key, value):
        return value


def test_functions_from_outside() -> None:
    mechanism = attention.resolve(_mine)
    assert mechanism.attention is _mine
    assert mechanism.name == "_mine"
    assert mechanism.causal is mechanism.stream is None
    assert mechanism.make_parameters is None
    with pytest.raises(ValueError, match="registered mechanism"):
        _ = mechanism.weights
    assert attention.resolve(mechanism) is mechanism
    assert attention.resolve(_Callable()).name == "_Callable"
    part = functools.partial(_mine, width=2)
    assert attention.resolve(part).attention is part


def test_functions_by_their_path() -> None:
    spec = "lra_jax.benchmarking.fused:fused_softmax_attention"
    mechanism = attention.resolve(spec)
    assert mechanism.name == spec
    assert mechanism.attention.__name__ == "fused_softmax_attention"
    assert mechanism.causal is None


def test_our_own_functions_are_recognised() -> None:
    for spec in ("lra_jax.attention:flow_attention", attention.flow_attention):
        assert attention.resolve(spec) is attention.MECHANISMS["flow"]


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("cosfomer", ("softmax, linear", "'cosfomer'", "did you mean 'cosformer'?")),
        ("Linformer", ("did you mean 'linformer'?",)),
        ("hgrn,cosformer", ("several that blocks take in turn are a `hybrid`",)),
        ("zzz", ("softmax, linear", "got 'zzz'")),
        ("no_such_package:f", ("importable module", "No module named", "no_such_")),
        ("lra_jax:no_such", ("'no_such' in the module 'lra_jax'", "no attribute")),
        ("lra_jax:__version__", ("to be a function", "got a str")),
        (":f", ("expected 'package.module:function'", "':f'")),
        ("lra_jax:", ("expected 'package.module:function'",)),
        (7, ("a registered name", "got 7")),
    ],
)
def test_what_cannot_be_resolved(spec, parts: tuple[str, ...]) -> None:
    assert_rejects(lambda: attention.resolve(spec), "attention: expected", *parts)


def test_accepted_keywords() -> None:
    assert attention.accepted_keywords(_mine) == {"mask", "width"}
    assert attention.accepted_keywords(lambda q, k, v, **more: v) is None
    accepted = attention.accepted_keywords(attention.softmax_attention)
    assert accepted is not None
    assert {"mask", "is_causal", "implementation"} <= accepted
    assert not {"max_length", "dropout_rate"} & accepted
    assert attention.accepted_keywords(_Callable()) == frozenset()
    assert attention.accepted_keywords(lambda q, k, v, /, *, mask: v) == {"mask"}


def test_lazy_names_are_those_of_the_type_checker_and_of_the_modules() -> None:
    source = Path(inspect.getfile(attention)).read_text()
    lines = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.ImportFrom)]
    typed = [str(node.module) for node in lines if node.names[0].name == "*"]
    names = [one.module for one in attention.MECHANISMS.values()]
    assert sorted(typed) == sorted(names)
    modules = [importlib.import_module(name) for name in names]
    public = {name for module in modules for name in module.__all__}
    assert {*dir(attention)} <= {*attention.__all__} | public
    for module in modules:
        for name in module.__all__:
            assert getattr(attention, name) is getattr(module, name)


def test_unknown_attributes_are_attribute_errors() -> None:
    for name in ("no_such_attention", "flow_nonsense"):
        with pytest.raises(AttributeError, match=name):
            getattr(attention, name)


def test_table() -> None:
    lines = command.table().splitlines()
    assert [line.split()[0] for line in lines] == ["name", *NAMES]
    assert len({line.index("Qin") for line in lines if "Qin" in line}) == 1
    assert all(not line.endswith(" ") for line in lines)


def test_table_shows_measured_exponents(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command, "EXPONENTS", tmp_path / "exponents.json")
    assert "T^1.04" not in command.table()
    command.EXPONENTS.write_text('{"flow": 1.04}')
    shown = [line for line in command.table().splitlines() if " T^1.04 " in line]
    assert [line.split()[0] for line in shown] == ["flow"]
