"""Options of wrong values: ``ValueError`` in the one form, before anything is computed.

Every call is traced on shapes alone, so an error that only running would raise is none.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import FAMILY, NAMES, STREAMS, fast_jit, inputs, jitted, keywords, run

NAN = float("nan")
POSITIVE = (0, -3, 2.5, "2", True, [2], NAN)
COUNT = (-1, 2.5, "2", True, NAN)
CHOICE = ("no such", 3, None, ["dense"])
NAME = ("no such", 3, ["dense"])
REAL = (0, -1.0, NAN, float("inf"), "1", True)
EPS = (-1.0, NAN, float("inf"), "1", True, None, [1])
SWITCH = ("yes", 1, None, NAN)
ARRAY = ("text", 3, [[1.0]], np.ones(3, "float32"), np.ones((9, 9, 9), int))

# Each kind of wrong values, and what must be of that kind: an option of a mechanism's
# attention and of its weights,
OPTIONS = [
    (POSITIVE, "local.block bigbird.block sparse.stride sparse.max_length"),
    (POSITIVE, "reformer.chunk reformer.num_hashes reformer.max_length sinkhorn.block"),
    (POSITIVE, "nystrom.num_landmarks gau.length flash.length flash.chunk"),
    ((*POSITIVE, 3), "reformer.num_buckets"),
    (COUNT, "local.window longformer.window longformer.global_tokens reformer.seed"),
    (COUNT, "bigbird.num_random bigbird.seed sinkhorn.iterations nystrom.iterations"),
    (CHOICE, "sparse.pattern synthesizer.variant linformer.projection nystrom.padding"),
    (CHOICE, "nystrom.initialisation gau.activation flash.activation"),
    ((*REAL, None), "sinkhorn.temperature"),
    (ARRAY, "sinkhorn.sort_bias synthesizer.first_bias"),
    (ARRAY, "linformer.value_projection linformer.key_bias"),
    (ARRAY, "nystrom.conv_weight gau.scale gau.offset gau.relative_bias"),
    (ARRAY, "flash.scale flash.offset flash.relative_bias"),
    ((*ARRAY, None), "sinkhorn.sort_kernel synthesizer.first luna.memory"),
    ((*ARRAY, None), "linformer.key_projection performer.projection"),
    (SWITCH, "gau.rotate flash.rotate"),
]
# of its attention and of its stream,
OF_THE_OUTPUT = [
    (POSITIVE, "softmax.block"),
    (NAME[:2], "softmax.implementation"),
    (EPS, "linear.eps cosformer.eps flow.eps flow.extra_eps norm.eps retention.eps"),
    (EPS, "gla.eps delta.eps gated_delta.eps hgrn.eps"),
    (NAME, "linear.feature_map cosformer.feature_map flow.feature_map"),
    (NAME, "norm.feature_map lightning.feature_map delta.feature_map"),
    (NAME, "gated_delta.feature_map performer.kernel cosformer.denominator hgrn.scale"),
    (NAME, "norm.norm retention.norm lightning.norm gla.norm delta.norm hgrn.norm"),
    (NAME, "gated_delta.norm flow.competition_axis retention.chunking"),
    (NAME, "lightning.chunking gla.chunking gated_delta.chunking performer.chunking"),
    (SWITCH, "cosformer.reweight flow.competition flow.allocation norm.per_head"),
    (SWITCH, "retention.rotate performer.hyperbolic"),
    ((0, -3, 3, 7.5, np.ones(2), np.ones(3, int)), "cosformer.max_length"),
    ((0, -1, NAN, "1", True), "flow.clip"),
    (REAL, "performer.scale"),
    ((*REAL, None), "delta.beta_range gated_delta.beta_range"),
    (CHOICE, "fnet.norm"),
    (ARRAY, "linformer.value_bias gau.gate flash.gate"),
]
# and an argument of its parameters.
PARAMETERS = [
    (POSITIVE, "linformer.max_length linformer.num_heads linformer.head_dim"),
    (POSITIVE, "linformer.features nystrom.num_heads synthesizer.max_length"),
    (POSITIVE, "synthesizer.num_heads synthesizer.head_dim synthesizer.rank"),
    (POSITIVE, "sinkhorn.max_length sinkhorn.num_heads sinkhorn.head_dim"),
    (POSITIVE, "sinkhorn.block luna.num_heads luna.head_dim luna.slots"),
    (POSITIVE, "gau.num_heads gau.head_dim flash.num_heads flash.head_dim"),
    ((*POSITIVE, 4), "nystrom.conv_kernel"),
    (CHOICE, "linformer.sharing linformer.projection synthesizer.variant"),
]
SIZES = {"max_length": 8, "num_heads": 2, "head_dim": 4}
Q, K, V = inputs(1)


def _each(table: list[tuple[tuple, str]]) -> Iterator[Any]:
    """One function checks a kind: the first option of a row has all of its values."""
    for wrong, words in table:
        arrays = any(isinstance(value, np.ndarray) for value in wrong)
        for number, word in enumerate(words.split()):
            name, _, option = word.partition(".")
            some = wrong if number == 0 or arrays else (wrong[0], wrong[-1])
            yield pytest.param(name, option, some, id=f"{name}-{option}")


def _assert_refused(call: Callable[..., Any], option: str, wrong: tuple) -> None:
    """``call(option=value)`` names the option and the value, for each wrong value."""
    for value in wrong:
        with pytest.raises(ValueError) as caught:
            jax.eval_shape(functools.partial(call, **{option: value}))
        message = str(caught.value)
        assert message.startswith(f"{option}: expected "), f"{value!r}: {message}"
        assert ", got " in message and "\n" not in message, f"{value!r}: {message}"


def _usual(name: str, option: str) -> dict[str, Any]:
    """The mechanism's keywords, but not one that stands in place of the option."""
    instead = {("local", "block"): "window", ("sparse", "max_length"): "stride"}
    usual = {**keywords(name, 2, 4)}
    usual.pop(instead.get((name, option), ""), None)
    return usual


@pytest.mark.parametrize(("name", "option", "wrong"), _each(OPTIONS))
def test_options(name: str, option: str, wrong: tuple) -> None:
    for part, arrays in (("attention", (Q, K, V)), ("weights", (Q, K))):
        function = getattr(attention, f"{name}_{part}")
        call = functools.partial(function, *arrays, **_usual(name, option))
        _assert_refused(call, option, wrong)


@pytest.mark.parametrize(("name", "option", "wrong"), _each(OF_THE_OUTPUT))
def test_options_of_the_output_alone(name: str, option: str, wrong: tuple) -> None:
    """Of a function, and of its stream if it takes them."""
    for part in ("attention", "prefill")[: 1 + (name in STREAMS)]:
        function = getattr(attention, f"{name}_{part}")
        if part == "attention" or option in inspect.signature(function).parameters:
            more = keywords(name, 2, 4)
            if (name, part) == ("softmax", "prefill"):
                more = {"max_length": 8}
            _assert_refused(functools.partial(function, Q, K, V, **more), option, wrong)


@pytest.mark.parametrize(("name", "option", "wrong"), _each(PARAMETERS))
def test_options_of_parameters(name: str, option: str, wrong: tuple) -> None:
    make = getattr(attention, f"{name}_parameters")
    key = jax.random.key(0)
    _assert_refused(lambda **more: make(key, **SIZES | more), option, wrong)


def test_other_sizes() -> None:
    for name in ("gau", "flash"):
        layout = functools.partial(getattr(attention, f"{name}_layout"), 64)
        _assert_refused(layout, "query_dim", POSITIVE)
        _assert_refused(layout, "expansion", (*REAL, None, 1.3))
    sizes = {"batch_size": 2, "num_heads": 2, "head_dim": 4, "max_length": 8}
    for option in ("batch_size", "num_heads", "head_dim", "value_dim"):
        start = functools.partial(attention.softmax_init, **sizes)
        _assert_refused(start, option, POSITIVE)
    draw = functools.partial(attention.performer_projection, jax.random.key(0))
    _assert_refused(lambda features: draw(features, 4), "features", POSITIVE)
    _assert_refused(lambda head_dim: draw(4, head_dim), "head_dim", POSITIVE)
    _assert_refused(lambda scaling: draw(4, 4, scaling=scaling), "scaling", (2, None))
    for projection in ("mean", "max"):
        pool = functools.partial(attention.linformer_attention, projection=projection)
        _assert_refused(functools.partial(pool, Q, K, V), "window", (*POSITIVE, None))


@pytest.mark.parametrize("name", NAMES)
def test_is_causal(name: str) -> None:
    """A word would count as True."""
    call = functools.partial(run(name), Q, K, V)
    _assert_refused(call, "is_causal", ("no", 1, None))


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
def test_misspelt_keywords(name: str) -> None:
    for part, arrays in (("attention", (Q, K, V)), ("weights", (Q, K))):
        call = getattr(attention, f"{name}_{part}")
        for misspelt, near in (("is_casual", "is_causal"), ("maks", "mask")):
            with pytest.raises(ValueError) as caught:
                call(*arrays, **{misspelt: None})
            assert f"{misspelt}: expected a keyword of {name}_" in str(caught.value)
            assert f"did you mean {near!r}?" in str(caught.value)


@pytest.mark.parametrize("name", FAMILY)
def test_keywords_of_flax_are_ignored(name: str) -> None:
    more = {"deterministic": True, "dropout_rng": None, "module": None}
    call = fast_jit(functools.partial(run(name), **more))
    np.testing.assert_array_equal(call(Q, K, V), jitted(name)(Q, K, V))
