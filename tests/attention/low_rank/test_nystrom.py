"""Nystromformer: when it is softmax, its convolution, its batch, wrong options."""

import functools

import jax
import numpy as np
import pytest

from lra_jax import attention

from .. import dense
from ..mechanisms import (
    MASK,
    Case,
    assert_close,
    assert_rejects,
    fast_jit,
    inputs,
    jitted,
)


def formula(
    q, k, v, mask=None, query_mask=None, num_landmarks=64, iterations=6
) -> np.ndarray:
    """Landmarks are means of the segments of what is visible, evenly dealt."""

    def landmarks(x):
        segment = np.arange(len(x)) * num_landmarks // len(x)
        return np.stack([x[segment == one].mean(0) for one in np.unique(segment)])

    def head(q, k, v, where):
        root = q.shape[-1] ** 0.5
        query_marks, key_marks = landmarks(q), landmarks(k)
        first = dense.row_softmax(q @ key_marks.T / root)
        middle = dense.row_softmax(query_marks @ key_marks.T / root)
        last = dense.row_softmax(query_marks @ k.T / root)
        inverse = middle.T / middle.sum(0).max() / middle.sum(1).max()
        one = np.eye(len(middle))
        for _ in range(iterations):
            step = middle @ inverse
            inverse = inverse @ (13 * one - step @ (15 * one - step @ (7 * one - step)))
            inverse = inverse / 4
        return first @ inverse @ last @ v

    out = np.zeros((*q.shape[:3], v.shape[-1]))
    rows = np.ones(q.shape[:2], bool) if query_mask is None else np.asarray(query_mask)
    for b in range(q.shape[0]):
        if rows[b].any():
            sample = None if mask is None else np.asarray(mask)[b : b + 1]
            arrays = np.asarray(q)[b, rows[b]][None], k[b : b + 1], v[b : b + 1]
            out[b, rows[b]] = dense.each_head(*arrays, sample, head)[0]
    return out


CASE = Case(formula, {"num_landmarks": 3})


def _jit(**options):
    return fast_jit(functools.partial(attention.nystrom_attention, **options))


@pytest.mark.parametrize("landmarks", [7, 11, 3])
def test_softmax_if_landmarks_are_the_positions(landmarks: int) -> None:
    """One for each, more, which leave some empty, or for segments of equal ones."""
    q, k, v = inputs(2, query_length=7, length=7)
    if landmarks == 3:
        q, k, v = inputs(2, query_length=12, length=12)
        q, k = (np.repeat(x[:, ::4], 4, axis=1) for x in (q, k))
    with jax.enable_x64(True):
        arrays = [x.astype("float64") for x in (q, k, v)]
        out = _jit(num_landmarks=landmarks, iterations=25)(*arrays)
        assert_close(out, jitted("softmax")(*arrays), 1e-9)


def test_the_published_form_is_softmax_where_every_position_is_a_landmark() -> None:
    """Without a pseudo-inverse, so to rounding after any number of iterations."""
    q, k, v = inputs(3, batch=3)
    mask = {"mask": MASK, "query_mask": MASK}
    out = _jit(num_landmarks=7, padding="published", **mask)(q, k, v)
    expected = jitted("softmax")(q * MASK[..., None, None], k, v, mask=MASK)
    assert_close(out, expected, 2e-6)


def test_the_published_initialisation_looks_at_companions() -> None:
    q, k, v = inputs(3, batch=2)
    q[1] *= 5
    for initialisation, depends in (("exact", False), ("original", True)):
        call = _jit(num_landmarks=3, initialisation=initialisation)
        change = np.abs(call(q, k, v)[:1] - call(q[:1], k[:1], v[:1])).max()
        assert (change > 1e-3) == depends


def _convolution(v: np.ndarray, weight: np.ndarray) -> np.ndarray:
    out = np.zeros_like(v)
    reach = weight.shape[1] // 2
    for i in range(v.shape[1]):
        for w in range(weight.shape[1]):
            if 0 <= i + w - reach < v.shape[1]:
                out[:, i] += weight[None, :, w, None] * v[:, i + w - reach]
    return out


@pytest.mark.parametrize(("length", "width"), [(7, 3), (7, 15), (90, 5), (90, 1)])
def test_the_convolution_is_added(length: int, width: int) -> None:
    q, k, v = inputs(4, query_length=length, length=length)
    weight = np.random.default_rng(0).normal(size=(2, width)).astype("float32")
    both = fast_jit(
        lambda *a: (
            attention.nystrom_attention(*a, num_landmarks=3),
            attention.nystrom_attention(*a, num_landmarks=3, conv_weight=weight),
        )
    )
    plain, out = both(q, k, v)
    assert_close(np.asarray(out) - plain, _convolution(v, weight))


def test_convolution_weights_and_padding() -> None:
    q, k, v = inputs(5, batch=3)
    weight = np.random.default_rng(0).normal(size=(2, 3)).astype("float32")
    keywords = {"num_landmarks": 3, "conv_weight": weight}
    run, weights = (
        functools.partial(f, mask=MASK, query_mask=MASK, **keywords)
        for f in (attention.nystrom_attention, attention.nystrom_weights)
    )
    matrix, out = fast_jit(lambda *a: (weights(*a[:2]), run(*a)))(q, k, v)
    assert_close(np.einsum("bnts,bsnh->btnh", matrix, v), out)
    alone = _jit(**keywords)(*(x[:1, :5] for x in (q, k, v)))
    assert_close(np.asarray(out)[:1, :5], alone, 2e-6)


def test_parameters() -> None:
    make = attention.nystrom_parameters
    assert make(jax.random.key(0), num_heads=2) == {}
    made = make(jax.random.key(0), num_heads=2, conv_kernel=9, max_length=5)
    assert made["conv_weight"].shape == (2, 9)
    assert np.abs(np.asarray(made["conv_weight"])).max() <= 1 / 3
    for kernel, said in ((4, "an odd number, got 4"), (0, "a positive int, got 0")):
        with pytest.raises(ValueError, match=f"conv_kernel: expected {said}"):
            make(jax.random.key(0), num_heads=2, conv_kernel=kernel)


Q, K, V = inputs(6, query_length=5)
WEIGHT = np.ones((2, 3), "float32")


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        (
            {"padding": "published", "num_landmarks": 4},
            ("num_landmarks: expected a divisor of the length 7", "got 4"),
        ),
        ({"conv_weight": WEIGHT[:, :2]}, ("an odd W", "(2, 2)")),
        ({"query_mask": np.ones((2, 5), bool)}, ("query_mask: ", "(2, 5)")),
    ],
)
def test_options_that_do_not_fit(keywords: dict, parts: tuple) -> None:
    for call in (
        lambda: attention.nystrom_attention(K, K, V, **keywords),
        lambda: attention.nystrom_weights(K, K, **keywords),
    ):
        assert_rejects(call, *parts)


def test_no_convolution_across() -> None:
    with pytest.raises(ValueError, match="expected None for cross attention"):
        attention.nystrom_attention(Q, K, V, conv_weight=WEIGHT)


@pytest.mark.parametrize(
    "option",
    [{"padding": "published"}, {"padding": "front"}, {"initialisation": "original"}],
)
def test_a_packed_row_needs_options_of_each_document(option: dict[str, str]) -> None:
    """The others depend on the row's own length or on other samples."""
    q, k, v = inputs(9, length=8, query_length=8)
    documents = np.repeat([[1, 2]], 4, 1).repeat(2, 0)
    for call in (
        lambda **more: attention.nystrom_attention(q, k, v, **more),
        lambda **more: attention.nystrom_weights(q, k, **more),
    ):
        more = {"num_landmarks": 2, "segment_ids": documents, **option}
        assert_rejects(
            lambda call=call, more=more: call(**more),
            *("segment_ids: expected None", *option.values()),
        )
