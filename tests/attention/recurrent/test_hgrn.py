"""The gated recurrence, position by position in numpy, and what is its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import attention
from lra_jax.attention.recurrent.columns import _loop, _tree, scan_columns
from lra_jax.models import MultiHeadAttention, stream

from ..mechanisms import Case, assert_close, assert_rejects, inputs, pulled_back
from . import formulas


def formula(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: Any = None,
    causal: bool = False,
    *,
    log_decay: Any = None,
    gate: Any = None,
    lower_bound: Any = None,
    angle: Any = None,
    rotation: Any = None,
    scale: str = "tied",
    norm: str | None = "rms",
    eps: float = 1e-6,
) -> np.ndarray:
    """One head and one sample at a time; a hidden position is left out."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if log_decay is None:
        log_decay = formulas.gates("hgrn", k)["log_decay"]
    batch, length, heads = q.shape[:3]
    is_complex = angle is not None or rotation is not None
    mask = np.ones((batch, length), bool) if mask is None else np.asarray(mask)
    out = np.zeros((batch, length, heads, v.shape[-1]), complex)
    for b in range(batch):
        for n in range(heads):
            forgets = np.exp(log_decay[b, :, n * log_decay.shape[2] // heads])
            if lower_bound is not None:
                bound = 1 / (1 + np.exp(-lower_bound[n]))
                forgets = bound + (1 - bound) * forgets
            shares = 1 - forgets if scale == "tied" else np.sqrt(1 - forgets**2)
            radians = np.zeros(length) if rotation is None else rotation[b, :, n]
            radians = radians + (0 if angle is None else angle[n])
            turns = np.exp(1j * radians)
            values = v[b, :, n * v.shape[2] // heads].astype(complex)
            if is_complex:
                values = values[:, :1] + 1j * values[:, 1:]
            order = np.arange(length)
            if not causal and n >= heads - heads // 2:
                order = order[::-1]
            state = np.zeros(values.shape[1], complex)
            for t in order:
                if mask[b, t]:
                    state = forgets[t] * turns[t] * state + shares[t] * values[t]
                out[b, t, n, : len(state)] = state
    if is_complex:
        out = np.concatenate([np.real(out[..., :1]), np.imag(out[..., :1])], -1)
    out = np.real(out)
    if norm is not None:
        out = out / np.sqrt((out**2).mean((2, 3), keepdims=True) + eps)
    return out if gate is None else out * gate


CASE = Case(
    formula,
    gates=lambda key, xp: formulas.gates("hgrn", key, xp),
    level=None,
    products=False,
    normalised=True,
)


def _arrays(width: int = 2) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    _, _, value = inputs(1, heads=4, value_dim=width)
    gates = {
        "log_decay": -np.abs(rng.normal(size=(2, 7, 4))),
        "gate": rng.normal(size=value.shape),
        "lower_bound": rng.normal(size=4),
    }
    return value, {name: x.astype("float32") for name, x in gates.items()}


def _angles() -> dict[str, np.ndarray]:
    rotation = np.random.default_rng(7).normal(size=(2, 7, 4))
    angle = np.linspace(0.1, 2, 4)
    return {"angle": angle.astype("float32"), "rotation": rotation.astype("float32")}


@pytest.mark.parametrize("scale", ["tied", "unit"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("turning", ["", "angle", "rotation", "angle rotation"])
def test_every_option_is_the_formula(scale: str, causal: bool, turning: str):
    value, gate_arrays = _arrays()
    gate_arrays |= {name: _angles()[name] for name in turning.split()}
    mask = np.array([[1] * 7, [1, 0, 1, 1, 1, 0, 0]], bool)
    query = np.zeros((2, 7, 4, 1), "float32")
    got = attention.hgrn_attention(
        query, query, value, mask, causal, scale=scale, **gate_arrays
    )
    expected = formula(query, query, value, mask, causal, scale=scale, **gate_arrays)
    assert_close(np.asarray(got)[mask], expected[mask])


def test_a_complex_stream_goes_on_where_the_prompt_ended():
    value, gate_arrays = _arrays()
    bound = {"lower_bound": gate_arrays.pop("lower_bound")}
    bound["angle"], gate_arrays["rotation"] = _angles().values()
    query = jnp.zeros((2, 7, 4, 1))
    whole = attention.hgrn_attention(
        query, query, value, None, True, **gate_arrays, **bound
    )
    early = {name: x[:, :4] for name, x in gate_arrays.items()}
    first = (x[:, :4] for x in (query, query, value))
    _, state = attention.hgrn_prefill(*first, **early, **bound)
    for t in range(4, 7):
        now = {name: x[:, t] for name, x in gate_arrays.items()}
        arrays = query[:, t], query[:, t], value[:, t]
        out, state = attention.hgrn_step(state, *arrays, **now, **bound)
        assert_close(out, whole[:, t])


def test_complex_columns_lose_no_digits_far_from_the_start():
    length, angle = 16_384, np.array([0.01, 1.0, 2.5, np.pi], "float32")
    rng = np.random.default_rng(6)
    value = rng.normal(size=(1, length, 4, 2)).astype("float32")
    log_decay = np.full((1, length, 4), np.log(0.9), "float32")
    query = np.zeros((1, length, 4, 1), "float32")

    @jax.jit
    def call(angle):
        options = {"log_decay": log_decay, "norm": None, "angle": angle}
        out = attention.hgrn_attention(query, query, value, None, True, **options)
        return out[:, -8:].sum(), out

    slope, out = jax.grad(call, has_aux=True)(angle)
    factor = np.exp(log_decay[0, 0].astype("float64") + 1j * angle)
    new = (1 - np.abs(factor)) * (value[0, ..., 0] + 1j * value[0, ..., 1])
    state: Any = np.zeros(4, complex)
    of_state: Any = np.zeros(4, complex)  # by the angle
    expected: Any = np.zeros(4, complex)
    for t in range(length - 200, length):
        of_state = factor * (1j * state + of_state)
        state = factor * state + new[t]
        if t >= length - 8:
            expected = expected + of_state
    assert_close(out[0, -1], np.stack([state.real, state.imag], -1))
    assert_close(slope, expected.real + expected.imag, 2e-3)


@pytest.mark.parametrize("reverse", [False, True])
def test_loop_and_tree_are_one_recurrence(reverse: bool):
    rng = np.random.default_rng(0)
    factors, values = (rng.uniform(0, 1, (9, 2, 3)).astype("float32") for _ in "ab")
    arrays = jnp.asarray(factors), jnp.asarray(values), jnp.ones((2, 3))
    assert_close(_tree(reverse, *arrays), _loop(reverse, *arrays))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_the_scan_is_that_of_its_loop(reverse: bool):
    rng = np.random.default_rng(0)
    factors = rng.uniform(0, 1, (2, 6, 3)).astype("float32")
    values = rng.normal(size=(2, 6, 3, 2)).astype("float32")
    start = rng.normal(size=(2, 3, 2)).astype("float32")

    def ours(factors, values, start):
        states, last = scan_columns(factors, values, start, reverse=reverse)
        return (jnp.sin(states) ** 2).sum() + (last**3).sum()

    def plain(factors, values, start):
        order = range(6)[::-1] if reverse else range(6)
        state, total = start, 0.0
        for t in order:
            state = factors[:, t, :, None] * state + values[:, t]
            total += (jnp.sin(state) ** 2).sum()
        return total + (state**3).sum()

    arguments = factors, values, start
    assert_close(
        jax.grad(ours, (0, 1, 2))(*arguments), jax.grad(plain, (0, 1, 2))(*arguments)
    )


def test_bounds_rise_from_layer_to_layer():
    make = attention.hgrn_parameters
    key = jax.random.key(0)
    assert make(key, num_heads=3) == {}
    for layer, expected in {1: 0.25, 2: 0.5, 3: 0.75}.items():
        made = make(key, num_heads=3, layer=layer, num_layers=4)
        assert_close(jax.nn.sigmoid(made["lower_bound"]), np.full(3, expected))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"log_decay": jnp.zeros((1, 3, 2)), "lower_bound": jnp.zeros(3)},
            ("lower_bound", "(2,)", "(3,)"),
        ),
        ({"angle": jnp.zeros(2)}, ("value", "Hv", "3)")),
        ({"rotation": jnp.zeros((1, 3, 2))}, ("value", "Hv", "3)")),
        ({"gate": jnp.zeros((1, 3, 2))}, ("gate", "(1, 3, 2)")),
    ],
)
def test_bad_options(options: dict[str, Any], parts: tuple[str, ...]):
    query, value = jnp.zeros((1, 3, 2, 1)), jnp.zeros((1, 3, 2, 3))
    assert_rejects(
        lambda: attention.hgrn_attention(query, query, value, **options), *parts
    )


def test_complex_columns_have_no_weights_and_come_in_pairs():
    query, angle = jnp.zeros((1, 3, 2, 1)), jnp.zeros(2)
    weights, layout = attention.hgrn_weights, attention.hgrn_layout
    rotation = jnp.zeros((1, 3, 2))
    assert_rejects(lambda: weights(query, query, angle=angle), "angle", "None")
    assert_rejects(lambda: weights(query, query, rotation=rotation), "rotation", "None")
    assert_rejects(lambda: layout(3, expand=1, is_complex=True), "is_complex")
    assert_rejects(lambda: layout(3, expand=1, rotates=True), "rotates")
    assert_rejects(lambda: layout(3, rotates=1), "rotates", "True or False")
    assert_rejects(lambda: layout(3, expand=0), "expand")
    assert layout(3, is_complex=True) == layout(3, rotates=True) == (3, 1, 2)


def test_a_phase_is_the_sum_of_the_angles():
    """Without decay, a state begun at 1 holds the sum of digits modulo 10."""
    length = 5_000
    digits = np.random.default_rng(8).integers(0, 10, length)
    rotation = (2 * np.pi / 10 * digits).astype("float32")[None, :, None]
    query = np.zeros((1, length, 1, 1), "float32")
    value = np.zeros((1, length, 1, 2), "float32")
    value[0, 0, 0, 0] = 1
    state = attention.hgrn_attention(
        query, query, value, None, True, rotation=rotation, norm=None
    )
    phase = np.arctan2(state[0, :, 0, 1], state[0, :, 0, 0])
    sums = np.cumsum(digits) - digits[0]
    np.testing.assert_array_equal(np.round(phase / (2 * np.pi / 10)) % 10, sums % 10)


def test_complex_columns_may_share_values():
    value, gate_arrays = _arrays()
    query, pair = np.zeros((2, 7, 4, 1), "float32"), value[:, :, :2]
    gate_arrays |= _angles()
    got = attention.hgrn_attention(query, query, pair, **gate_arrays)
    expected = attention.hgrn_attention(
        query, query, np.repeat(pair, 2, 2), **gate_arrays
    )
    np.testing.assert_array_equal(got, expected)


def test_nothing_in_padding_turns_a_state():
    value, gate_arrays = _arrays()
    rotation = jnp.asarray(_angles()["rotation"])
    query = np.zeros((2, 7, 4, 1), "float32")
    mask = np.array([[1, 1, 0, 1, 1, 0, 0]] * 2, bool)

    def total(value, rotation):
        out = attention.hgrn_attention(
            query, query, value, mask, True, rotation=rotation, **gate_arrays
        )
        return jnp.where(mask[..., None, None], out, 0).sum()

    hidden = jnp.where(mask[..., None], rotation, jnp.nan)
    expected = jax.grad(total, (0, 1))(jnp.asarray(value), rotation)
    got = jax.grad(total, (0, 1))(jnp.asarray(value), hidden)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rotates", [False, True])
def test_a_layer_rotates_if_asked(rotates: bool):
    options = {"rotates": rotates, "scale": "unit"}
    layer = MultiHeadAttention(
        num_heads=2,
        in_features=8,
        mechanism="hgrn",
        options=options,
        is_causal=True,
        rngs=nnx.Rngs(0),
    )
    assert ("rotation" in layer.gates) == rotates
    x = jax.random.normal(jax.random.key(1), (2, 9, 8))
    whole = layer(x)
    out, state = stream.prefill(layer, x[:, :5])
    rest, _ = stream.prefill(layer, x[:, 5:], state=state)
    assert_close(jnp.concatenate([out, rest], 1), whole)


@pytest.mark.parametrize("heads", [1, 5, 8])
@pytest.mark.parametrize("turns", [False, True])
def test_in_a_grid_heads_run_along_rows_and_columns(heads: int, turns: bool) -> None:
    """Each line of the images is a sequence of its own; padding and gradients, too."""
    rows, columns = 3, 4
    rng = np.random.default_rng(heads)
    q = jnp.zeros((2, rows * columns, heads, 1))
    v = jnp.asarray(rng.normal(size=(*q.shape[:3], 1 + turns)), jnp.float32)
    arrays = {"log_decay": -rng.uniform(0, 1, q.shape[:3])}
    if turns:
        arrays["rotation"] = rng.uniform(0, 1, q.shape[:3])
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    mask = jnp.asarray(rng.random((2, rows * columns)) < 0.8)
    half = heads - heads // 2

    def in_grid(v, arrays):
        options = {"norm": None, "grid": (rows, columns)}
        return attention.hgrn_attention(q, q, v, mask, **arrays, **options)

    def line_by_line(v, arrays):
        parts = []
        for part, turned in ((slice(half), False), (slice(half, None), True)):

            def lines(x, part=part, turned=turned):
                x = x.reshape(2, rows, columns, *x.shape[2:])
                x = jnp.swapaxes(x, 1, 2) if turned else x
                x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
                return x[:, :, part] if x.ndim > 2 else x

            rows_of_gates = {name: lines(x) for name, x in arrays.items()}
            out = lines(v)
            if out.shape[2]:
                empty = jnp.zeros((*out.shape[:3], 1))
                shown = lines(mask)
                out = attention.hgrn_attention(
                    empty, empty, out, shown, **rows_of_gates, norm=None
                )
            sides = (columns, rows) if turned else (rows, columns)
            out = out.reshape(2, *sides, *out.shape[2:])
            out = jnp.swapaxes(out, 1, 2) if turned else out
            parts.append(out.reshape(2, rows * columns, *out.shape[3:]))
        return jnp.concatenate(parts, 2)

    got, expected = (pulled_back(form)(v, arrays) for form in (in_grid, line_by_line))
    assert_close(got, expected)
    if not turns:
        weights = attention.hgrn_weights(q, q, mask, **arrays, grid=(rows, columns))
        assert_close(jnp.einsum("bnts,bsnv->btnv", weights, v), expected[0], 1e-4)


def test_angles_begin_like_those_of_rotary_positions():
    """One radian per position for the first pair, then falling to 1e-4."""
    sizes = {"max_length": 8, "num_heads": 4, "head_dim": 2}
    made = attention.hgrn_parameters(jax.random.key(0), is_complex=True, **sizes)
    np.testing.assert_allclose(made["angle"], [1.0, 0.1, 0.01, 0.001], rtol=1e-5)
