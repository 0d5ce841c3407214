"""Options of wrong values: ``ValueError`` in the one form, before anything is computed.

Every call is traced on shapes alone, so an error that only running would raise is none.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import NAMES, STREAMS, fast_jit, inputs, jitted, keywords, run

POSITIVE = (0, -3, 2.5, "2", True, [2], float("nan"))
COUNT = (-1, 2.5, "2", True, float("nan"))
CHOICE = ("no such", 3, None, ["dense"])
REAL = (0, -1.0, float("nan"), float("inf"), "1", True, None)
ARRAY = ("text", 3, [[1.0]], np.ones(3, "float32"), np.ones((9, 9, 9), int))

OPTIONS: dict[str, dict[str, tuple]] = {
    "softmax": {"implementation": ("flash", 3), "block": POSITIVE},
    "local": {"window": COUNT, "block": POSITIVE},
    "longformer": {"window": COUNT, "global_tokens": COUNT},
    "bigbird": {"block": POSITIVE, "num_random": COUNT, "seed": COUNT},
    "sparse": {"stride": POSITIVE, "pattern": CHOICE, "max_length": POSITIVE},
    "reformer": {
        "chunk": POSITIVE,
        "num_hashes": POSITIVE,
        "num_buckets": (*POSITIVE, 3),
        "seed": COUNT,
        "max_length": POSITIVE,
    },
    "sinkhorn": {
        "block": POSITIVE,
        "iterations": COUNT,
        "temperature": REAL,
        "sort_kernel": (*ARRAY, None),
        "sort_bias": ARRAY,
    },
    "synthesizer": {
        "variant": CHOICE,
        "first": (*ARRAY, None),
        "first_bias": ARRAY,
        "second": ARRAY,
        "second_bias": ARRAY,
    },
    "linformer": {
        "projection": CHOICE,
        "window": (3,),
        "key_projection": (*ARRAY, None),
        "value_projection": ARRAY,
        "key_bias": ARRAY,
    },
    "nystrom": {
        "num_landmarks": POSITIVE,
        "iterations": COUNT,
        "initialisation": CHOICE,
        "padding": CHOICE,
        "conv_weight": (*ARRAY, np.ones((2, 2), "float32")),
    },
    "luna": {"memory": (*ARRAY, None)},
    "gau": {
        "scale": ARRAY,
        "offset": ARRAY,
        "relative_bias": ARRAY,
        "activation": CHOICE,
        "rotate": ("yes", 1, None),
        "length": POSITIVE,
    },
}
OPTIONS["flash"] = OPTIONS["gau"] | {"chunk": POSITIVE}
# Options without a part in the weights, or none of its own.
EPS = (-1.0, float("nan"), float("inf"), "1", True, None, [1])
NAME = ("no such", 3, ["dense"])
SWITCH = ("yes", 1, None, float("nan"))
ATTENTION_ONLY: dict[str, dict[str, tuple]] = {
    "linear": {"eps": EPS, "feature_map": NAME},
    "cosformer": {
        **{"eps": EPS, "reweight": SWITCH, "denominator": NAME, "feature_map": NAME},
        "max_length": (0, -3, 3),
    },
    "flow": {
        **{"eps": EPS, "extra_eps": EPS, "clip": (0, -1, float("nan"), "1", True)},
        **{"competition": SWITCH, "allocation": SWITCH, "competition_axis": NAME},
        "feature_map": NAME,
    },
    "norm": {"eps": EPS, "per_head": SWITCH, "norm": NAME, "feature_map": NAME},
    "retention": {"eps": EPS, "rotate": SWITCH, "norm": NAME, "chunking": NAME},
    "lightning": {"norm": NAME, "feature_map": NAME, "chunking": NAME},
    "performer": {"hyperbolic": SWITCH, "scale": REAL[:-1], "kernel": NAME},
    "gla": {"eps": EPS, "norm": NAME, "chunking": NAME},
    "delta": {"eps": EPS, "norm": NAME, "beta_range": REAL, "feature_map": NAME},
    "gated_delta": {
        **{"eps": EPS, "norm": NAME, "beta_range": REAL, "chunking": NAME},
        "feature_map": NAME,
    },
    "hgrn": {"eps": EPS, "norm": NAME, "scale": NAME},
    "fnet": {"norm": CHOICE},
    "linformer": {"value_bias": ARRAY},
    "gau": {"gate": ARRAY},
    "flash": {"gate": ARRAY},
}
SIZES = {"max_length": 8, "num_heads": 2, "head_dim": 4}
PARAMETERS: dict[str, dict[str, tuple]] = {
    "linformer": dict.fromkeys((*SIZES, "features"), POSITIVE)
    | {"sharing": CHOICE, "projection": CHOICE},
    "nystrom": {"num_heads": POSITIVE, "conv_kernel": (*POSITIVE, 4)},
    "synthesizer": dict.fromkeys((*SIZES, "rank"), POSITIVE) | {"variant": CHOICE},
    "sinkhorn": dict.fromkeys((*SIZES, "block"), POSITIVE),
    "luna": dict.fromkeys(("num_heads", "head_dim", "slots"), POSITIVE),
    "gau": dict.fromkeys(("num_heads", "head_dim"), POSITIVE),
    "flash": dict.fromkeys(("num_heads", "head_dim"), POSITIVE),
}
LAYOUTS = {"query_dim": POSITIVE, "expansion": (*REAL, 1.3)}


def _cases(table: dict[str, dict[str, tuple]]) -> Iterator[Any]:
    for name, options in table.items():
        for option in options:
            yield pytest.param(name, option, id=f"{name}-{option}")


def _refused(call, option: str, bad: object) -> None:
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(call)
    said = str(caught.value)
    assert said.startswith(f"{option}: expected "), f"{bad!r}: {said}"
    assert ", got " in said and "\n" not in said, f"{bad!r}: {said}"


Q, K, V = inputs(1)


def _given(name: str, option: str, bad: object) -> dict[str, Any]:
    given = keywords(name, 2, 4) | {option: bad}
    if (name, option) == ("local", "block"):
        del given["window"]
    if (name, option) == ("sparse", "max_length"):
        del given["stride"]
    return given


@pytest.mark.parametrize(("name", "option"), _cases(OPTIONS))
def test_options(name: str, option: str) -> None:
    for bad in OPTIONS[name][option]:
        given = _given(name, option, bad)
        call = functools.partial(getattr(attention, f"{name}_attention"), **given)
        weights = functools.partial(getattr(attention, f"{name}_weights"), **given)
        _refused(lambda call=call: call(Q, K, V), option, bad)
        if (name, option) not in (("softmax", "implementation"), ("softmax", "block")):
            _refused(lambda weights=weights: weights(Q, K), option, bad)


@pytest.mark.parametrize("name", NAMES)
def test_is_causal(name: str) -> None:
    """A word would count as True."""
    for bad in ("no", 1, None):
        _refused(lambda bad=bad: run(name)(Q, K, V, is_causal=bad), "is_causal", bad)


def _of_the_output() -> Iterator[tuple[str, str, str]]:
    """Options that the weights do not have, of a function and of its stream."""
    for name, options in ATTENTION_ONLY.items():
        functions = ("attention", "prefill") if name in STREAMS else ("attention",)
        for function in functions:
            taken = inspect.signature(getattr(attention, f"{name}_{function}"))
            for option in options:
                if function == "attention" or option in taken.parameters:
                    yield name, function, option


@pytest.mark.parametrize(("name", "function", "option"), _of_the_output())
def test_options_of_the_output_alone(name: str, function: str, option: str) -> None:
    for bad in ATTENTION_ONLY[name][option]:
        given = keywords(name, 2, 4) | {option: bad}
        call = functools.partial(getattr(attention, f"{name}_{function}"), **given)
        _refused(lambda call=call: call(Q, K, V), option, bad)


@pytest.mark.parametrize("projection", ["mean", "max"])
def test_windows_of_pooling(projection: str) -> None:
    call = functools.partial(attention.linformer_attention, projection=projection)
    for bad in (*POSITIVE, None):
        _refused(lambda bad=bad: call(Q, K, V, window=bad), "window", bad)


@pytest.mark.parametrize(("name", "option"), _cases(PARAMETERS))
def test_options_of_parameters(name: str, option: str) -> None:
    make = getattr(attention, f"{name}_parameters")
    for bad in PARAMETERS[name][option]:
        given = SIZES | {option: bad}
        _refused(lambda given=given: make(jax.random.key(0), **given), option, bad)


@pytest.mark.parametrize("option", LAYOUTS)
@pytest.mark.parametrize("name", ["gau", "flash"])
def test_options_of_layouts(name: str, option: str) -> None:
    layout = getattr(attention, f"{name}_layout")
    for bad in LAYOUTS[option]:
        _refused(lambda bad=bad: layout(64, **{option: bad}), option, bad)


@pytest.mark.parametrize("option", ["batch_size", "num_heads", "head_dim", "value_dim"])
def test_sizes_of_a_softmax_stream(option: str) -> None:
    sizes = {"batch_size": 2, "num_heads": 2, "head_dim": 4, "max_length": 8}
    for bad in POSITIVE:
        given = sizes | {option: bad}
        _refused(lambda given=given: attention.softmax_init(**given), option, bad)


def test_weights_say_which_options_they_take() -> None:
    """An editor and ``help`` show the options, not ``**options``."""
    shown = inspect.signature(attention.sparse_weights).parameters
    assert list(shown)[:4] == ["query", "key", "mask", "is_causal"]
    assert {"pattern", "stride", "summary", "precision"} <= set(shown)
    assert "sparse_attention" in (attention.sparse_weights.__doc__ or "")
    assert attention.sparse_weights.__name__ == "sparse_weights"
    # They pass for what they are under a transformation, too.
    assert fast_jit(attention.sparse_weights)(Q, K).shape == (2, 2, 7, 7)


def test_misspelt_options_of_parameters() -> None:
    key = jax.random.key(0)
    attention.linformer_parameters(key, **SIZES, layer=0, num_layers=2)
    with pytest.raises(ValueError, match=r"^feature: .* did you mean 'features'"):
        attention.linformer_parameters(key, **SIZES, feature=8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("misspelt", "near"),
    [("is_casual", "is_causal"), ("maks", "mask")],
)
def test_misspelt_keywords(name: str, misspelt: str, near: str) -> None:
    q, k, v = inputs(3, query_length=7)
    for call, arrays in (
        (getattr(attention, f"{name}_attention"), (q, k, v)),
        (getattr(attention, f"{name}_weights"), (q, k)),
    ):
        with pytest.raises(ValueError) as caught:
            call(*arrays, **{misspelt: None})
        assert f"{misspelt}: expected a keyword of {name}_" in str(caught.value)
        assert f"did you mean {near!r}?" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_keywords_of_flax_are_ignored(name: str) -> None:
    q, k, v = inputs(3, query_length=7)
    more = {"deterministic": True, "dropout_rng": None, "module": None}
    call = fast_jit(functools.partial(run(name), **more))
    np.testing.assert_array_equal(call(q, k, v), jitted(name)(q, k, v))
