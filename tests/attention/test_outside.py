"""Attention of one's own: functions, modules of functions, classes, entries."""

import dataclasses
import functools
import types

import helpers
import pytest
from flax import linen, nnx

from lra_jax import attention
from lra_jax.attention.registry import spell
from lra_jax.configs import get_preset


def test_a_function_brings_what_is_beside_it() -> None:
    for spec in ("helpers:power", "helpers:power_attention", helpers.power_attention):
        mechanism = attention.resolve(spec)
        assert mechanism.attention is helpers.power_attention
        assert mechanism.make_parameters is helpers.power_parameters
        assert mechanism.weights is helpers.power_weights
        assert spell(spec) in (spec, "helpers:power_attention")


def test_a_module_of_functions(monkeypatch) -> None:
    module = types.ModuleType("package.power")
    with pytest.raises(ValueError, match=r"expected power_attention in a module"):
        attention.resolve(module)
    monkeypatch.setattr(module, "power_attention", helpers.power_attention, False)
    assert attention.resolve(module).attention is helpers.power_attention
    assert spell(module) == "package.power:power"
    entry = attention.Mechanism(name="power", parameters="power_parameters")
    monkeypatch.setattr(module, "MECHANISM", entry, raising=False)
    assert attention.resolve(module).module == "package.power"


def test_an_entry_by_its_path(monkeypatch) -> None:
    entry = attention.Mechanism(name="power", parameters="power_parameters")
    monkeypatch.setattr(helpers, "ENTRY", entry, raising=False)
    mechanism = attention.resolve("helpers:ENTRY")
    assert mechanism.attention is helpers.power_attention
    assert mechanism.make_parameters is helpers.power_parameters
    with pytest.raises(ValueError, match="power_parameters in the module ''"):
        _ = entry.make_parameters


def test_modules_are_made_by_each_layer() -> None:
    wide = functools.partial(helpers.Scaled, scale=2.0)
    for maker in (helpers.Scaled, helpers.make_scaled, wide, "helpers:Scaled"):
        assert attention.resolve(maker).make is not None
    with pytest.raises(ValueError, match="a function, where no layer"):
        _ = attention.resolve(helpers.Scaled).attention


def test_what_would_not_be_trained_is_refused() -> None:
    made = helpers.Scaled(2, 4, rngs=nnx.Rngs(0))
    for instance in (made, made.__call__):
        with pytest.raises(ValueError, match=r"a class or factory.*got .*an instance"):
            attention.resolve(instance)
    for thing in (linen.Dense, linen.Dense(3)):
        with pytest.raises(ValueError, match=r"ToNNX.*a Linen module"):
            attention.resolve(thing)


def test_a_config_takes_the_thing_itself() -> None:
    assert get_preset(attention=helpers.Scaled).attention == "helpers:Scaled"
    assert get_preset(attention=attention.flow_attention).attention == "flow"
    assert attention.resolve("helpers:MARKED") is helpers.MARKED
    with pytest.raises(ValueError, match="an object that its module can find"):
        get_preset(attention=lambda query, key, value: value)


def test_an_entry_with_another_function_stays_itself() -> None:
    """As one whose function splits a sequence over devices."""
    flow = attention.MECHANISMS["flow"]
    other = dataclasses.replace(flow, function=attention.flow_attention)
    assert attention.resolve(other) is other


def test_a_submodule_of_an_empty_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "power.py").write_text("from helpers import power_attention\n")
    (package / "broken.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mechanism = attention.resolve("own_package:power")
    assert mechanism.attention is helpers.power_attention
    with pytest.raises(ValueError, match=r"'own_package.broken', which .*no_such_mod"):
        attention.resolve("own_package:broken")
    with pytest.raises(ValueError, match=r"no attribute 'nothing'$"):
        attention.resolve("own_package:nothing")


@pytest.mark.parametrize("path", ["own/power.py", "own/power", "./own/power.py"])
def test_a_path_in_place_of_a_module(path: str) -> None:
    with pytest.raises(ValueError, match=r"as in 'own.power:f', got a file's, '.*own/"):
        attention.resolve(f"{path}:f")
    with pytest.raises(ValueError, match=r"as in 'power:f', got a file's, 'power.py'"):
        attention.resolve("power.py:f")


def test_a_misspelt_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_module.py").write_text("def squared_attention(q, k, v): return v")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="did you mean 'squared'"):
        attention.resolve("own_module:squard")
