"""Gated linear attention and the delta rule over long sequences, and their gates."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.recurrent import gated_delta

from ..mechanisms import assert_close, assert_rejects, fast_jit, inputs
from . import formulas as recurrent

LENGTH = 150
RECURRENT = ("gla", "delta", "gated_delta")


def naive(name: str, arrays: dict[str, jax.Array]) -> jax.Array:
    """The recurrence as a loop over positions; heads first, `[T, N, ...]`."""
    q, k, v = (arrays[part] for part in "qkv")
    if "delta" in name:
        q, k = (_unit(jax.nn.silu(x)) for x in (q, k))
    decay, beta = arrays.get("log_decay"), arrays.get("beta")

    def step(state: jax.Array, row: dict[str, jax.Array]) -> tuple:
        if decay is not None:
            fade = jnp.exp(row["log_decay"])
            state = state * (fade[..., None] if fade.ndim == 2 else fade[:, None, None])
        old = jnp.einsum("nmv,nm->nv", state, row["k"])
        new = row["v"] if beta is None else (row["v"] - old) * row["beta"][:, None]
        state = state + row["k"][..., None] * new[:, None]
        return state, jnp.einsum("nmv,nm->nv", state, row["q"])

    rows = arrays | {"q": q, "k": k}
    start = jnp.zeros((*k.shape[1:], v.shape[-1]), v.dtype)
    out = jax.lax.scan(step, start, rows)[1]
    return out / jnp.sqrt(jnp.square(out).mean(-1, keepdims=True) + 1e-6)


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


def drawn(name: str, strength: float) -> dict[str, np.ndarray]:
    """One sample, `[T, N, ...]`; decays from nearly none to ``exp(-strength)``."""
    q, k, v = (x[0] for x in inputs(1, 1, LENGTH, LENGTH, value_dim=3))
    made = {"q": q, "k": k, "v": v}
    rng = np.random.default_rng(2)
    shapes = {"decay": k.shape, "head_decay": k.shape[:2], "share": k.shape[:2]}
    for gate, kind in recurrent.GATES[name].items():
        x = rng.uniform(size=shapes[kind]).astype("float32")
        made[gate] = x if kind == "share" else -strength * x**8
    return made


def compared(name: str, arrays: dict[str, Any], options: dict[str, float]) -> tuple:
    """Output and gradients: ours in float32, and the loop's in float64."""

    def ours(arrays: dict[str, jax.Array]) -> jax.Array:
        batch = {part: x[None] for part, x in arrays.items()}
        q, k, v = (batch.pop(part) for part in "qkv")
        call = getattr(attention, f"{name}_attention")
        return call(q, k, v, is_causal=True, **batch, **options)[0]

    def loop(arrays: dict[str, jax.Array]) -> jax.Array:
        if options:
            arrays = arrays | {"beta": arrays["beta"] * options["beta_range"]}
        return naive(name, arrays)

    def both(function: Any, arrays: dict[str, jax.Array]) -> tuple:
        out, pullback = jax.vjp(function, arrays)
        return out, pullback(jnp.cos(out))[0]

    got = fast_jit(functools.partial(both, ours))(arrays)
    with jax.enable_x64(True):
        exact = {part: x.astype("float64") for part, x in arrays.items()}
        expected = fast_jit(functools.partial(both, loop))(exact)
        return got, jax.tree.map(np.asarray, expected)


@pytest.mark.parametrize(
    ("name", "options", "strength"),
    [
        *((name, {}, 0.1) for name in RECURRENT),
        *((name, {}, 100.0) for name in ("gla", "gated_delta")),
        ("delta", {"beta_range": 2.0}, 0.1),
        ("gated_delta", {"beta_range": 2.0}, 0.1),
    ],
)
def test_float32_over_many_chunks_is_the_loop_in_float64(
    name, options, strength
) -> None:
    """Values and gradients, for slow decays and for some that vanish in a chunk, and
    for shares of up to 2."""
    got, expected = compared(name, drawn(name, strength), options)
    assert_close(got[0], expected[0], 1e-4)
    for part, gradient in expected[1].items():
        assert_close(got[1][part], gradient, 1e-4)


@pytest.mark.parametrize("strong", [-20.0, -80.0, -np.inf])
@pytest.mark.parametrize("name", ["gla", "gated_delta"])
def test_weak_decays_after_strong_ones_keep_their_digits(name: str, strong) -> None:
    """Values and gradients: sums of strong decays have few decimals left."""
    arrays = drawn(name, 1.0)
    # In every chunk, of 16 or 64 positions, half of them.
    early = np.arange(LENGTH) % {"gla": 16, "gated_delta": 64}[name]
    early = early < early.max() / 2
    decay = arrays["log_decay"]
    wide = early.reshape(-1, *[1] * (decay.ndim - 1))
    arrays["log_decay"] = np.where(wide, np.float32(strong), 1e-3 * decay)
    got, expected = compared(name, arrays, {})
    assert_close(got[0], expected[0], 1e-5)
    for part in "qkv":
        assert_close(got[1][part], expected[1][part], 1e-5)


@pytest.mark.parametrize("name", ["gla", "gated_delta", "hgrn"])
def test_a_state_forgotten_at_once_starts_anew(name: str) -> None:
    """As if the earlier positions were not there, however low the logarithm is."""
    q, k, v = inputs(4)
    wide = {"gla": k.shape, "gated_delta": k.shape[:3], "hgrn": k.shape[:3]}[name]
    attend = functools.partial(
        getattr(attention, f"{name}_attention"), is_causal=True, norm=None
    )
    slow = np.full(wide, -0.3, "float32")
    for low in (-np.inf, -1e8, -1e4):
        forgotten = slow.copy()
        forgotten[:, 2] = low
        out = attend(q, k, v, log_decay=forgotten)[:, 2:]
        # The values of HGRN depend on the decay, too.
        first = forgotten if name == "hgrn" else slow
        alone = attend(q[:, 2:], k[:, 2:], v[:, 2:], log_decay=first[:, 2:])
        assert_close(out, alone, 1e-5)


@pytest.mark.parametrize("name", ["delta", "gated_delta"])
def test_a_range_is_that_of_a_share_that_is_not_given_too(name: str) -> None:
    arrays = inputs(3)
    call = functools.partial(getattr(attention, f"{name}_attention"), beta_range=2.0)
    ones = np.ones(arrays[1].shape[:3], "float32")
    assert_close(call(*arrays), call(*arrays, beta=ones), 1e-6)
    assert np.abs(call(*arrays) - call(*arrays, beta_range=1.0)).max() > 0.1


def test_the_inverse_of_equal_keys_does_not_cancel() -> None:
    """L of ones below the diagonal: its powers reach 1e17, its inverse has -1 and 1."""
    ones = np.tril(np.ones((2, 61, 61), "float32"), -1)
    inverse = fast_jit(lambda x: gated_delta.unit_inverse(x, "highest"))(ones)
    expected = np.eye(61) - np.eye(61, k=-1)
    np.testing.assert_array_equal(np.asarray(inverse), np.stack([expected] * 2))


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_the_inverse_and_its_derivative(size: int) -> None:
    """Those of the whole inverse, where L has entries."""
    draw = np.random.default_rng(size).normal(size=(2, 2, size, size))
    lower, slopes = np.tril(draw[0], -1), draw[1]

    @fast_jit
    def both(lower: jax.Array, slopes: jax.Array) -> list:
        def whole(x: jax.Array) -> jax.Array:
            return jnp.linalg.inv(jnp.eye(size, dtype=x.dtype)[None] + x)

        def ours(x: jax.Array) -> jax.Array:
            return gated_delta.unit_inverse(x, "highest")

        outcomes = [jax.vjp(form, lower) for form in (ours, whole)]
        return [(out, jnp.tril(pull(slopes)[0], -1)) for out, pull in outcomes]

    with jax.enable_x64(True):
        assert_close(*both(lower, slopes), 1e-9)


@pytest.mark.parametrize("name", ["gla", "gated_delta"])
def test_the_output_gate_multiplies(name: str) -> None:
    q, k, v = inputs(4)
    gate = inputs(5)[2]
    call = getattr(attention, f"{name}_attention")
    assert_close(call(q, k, v, gate=gate), gate * np.asarray(call(q, k, v)), 1e-6)
    step = getattr(attention, f"{name}_step")
    state = getattr(attention, f"{name}_init")(2, 2, 4)
    one = [x[:, 0] for x in (q, k, v)]
    out, _ = step(state, *one, gate=gate[:, 0])
    assert_close(out, gate[:, 0] * np.asarray(step(state, *one)[0]), 1e-6)


X = inputs(7)[0]


@pytest.mark.parametrize(
    ("name", "more", "parts"),
    [
        ("gla", {"log_decay": X[..., 0]}, ("log_decay: expected", "(2, 7, 2)")),
        ("gla", {"log_decay": X[:, :5]}, ("[B, T, N, H]=(2, 7, 1|2, 4)", "(2, 5")),
        ("gla", {"gate": X[..., :3]}, ("gate: expected [B, T, N, Hv]", "2, 3)")),
        ("delta", {"beta": X}, ("beta: expected [B, T, N]=(2, 7, 1|2)", "2, 4)")),
        ("delta", {"beta": X[:, :, :0, 0]}, ("beta: expected", "(2, 7, 0)")),
        ("delta", {"beta_range": 3}, ("beta_range: expected", "(0, 2], got 3")),
        ("gated_delta", {"log_decay": X}, ("log_decay: expected", "(2, 7, 2, 4)")),
    ],
)
def test_what_does_not_fit(name: str, more: dict, parts: tuple) -> None:
    call = getattr(attention, f"{name}_attention")
    assert_rejects(lambda: call(X, X, X, **more), *parts)
