"""FNet: transforms at a sample's own length, and what it refuses."""

import functools

import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import Case, assert_close, assert_rejects, fast_jit, inputs


def formula(q, k, v, mask=None) -> np.ndarray:
    """The transform of each sample up to its last visible position."""
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    mask = np.ones(v.shape[:2], bool) if mask is None else np.asarray(mask)
    out = np.zeros(v.shape)
    for b in range(v.shape[0]):
        real = np.flatnonzero(mask[b]).max(initial=-1) + 1
        if real:
            x = np.where(mask[b, :real, None, None], v[b, :real], 0)
            spectrum = np.fft.fft2(x.reshape(real, -1), norm="ortho")
            out[b, :real] = spectrum.real.reshape(x.shape)
    return out


CASE = Case(formula, weighted=False)


def _reference(x: np.ndarray, norm: str) -> np.ndarray:
    """By the matrices themselves, one sample `[T, N, H]`."""

    def matrix(size: int) -> np.ndarray:
        number = np.arange(size)
        scale = size**0.5 if norm == "ortho" else 1
        return np.exp(-2j * np.pi * np.outer(number, number) / size) / scale

    flat = x.reshape(len(x), -1).astype("float64")
    out = matrix(len(x)) @ flat @ matrix(flat.shape[1])
    return np.real(out).reshape(x.shape)


@pytest.mark.parametrize("norm", ["ortho", "backward"])
def test_every_sample_is_transformed_at_its_own_length(norm: str) -> None:
    _, _, v = inputs(1, batch=4, length=300)
    lengths = np.array([257, 300, 1, 0])
    mask = np.arange(300)[None] < lengths[:, None]
    run = fast_jit(functools.partial(attention.fnet_attention, norm=norm))
    out, plain = np.asarray(run(v, v, v, mask)), np.asarray(run(v, v, v))
    for row, length in enumerate(lengths[:3]):
        assert_close(out[row, :length], _reference(v[row, :length], norm), 2e-6)
    assert not out[~mask].any()
    assert_close(plain[0], _reference(v[0], norm), 2e-6)


def test_angles_do_not_lose_accuracy_with_the_length() -> None:
    """j^2 / L reaches 5,000 turns here, which float32 would know to 1 in 1,000."""
    v = inputs(2, 1, length=5000, heads=1, head_dim=1)[2]
    mask = np.arange(5000)[None] < 4999
    out = fast_jit(attention.fnet_attention)(v, v, v, mask)
    expected = np.fft.fft(v[0, :4999].astype("float64"), axis=0, norm="ortho").real
    assert_close(np.asarray(out)[0, :4999], expected, 2e-6)


LONG = np.ones((1, 2**20 + 1), bool)


def test_what_it_refuses() -> None:
    q, k, v = inputs(3, query_length=5)
    run = attention.fnet_attention
    for call, said in (
        (lambda: run(k, k, v, is_causal=True), "is_causal: expected False, got True"),
        (lambda: run(q, k, v), "key: expected the query's length T=5"),
        (lambda: run(k, k, v, norm="forward"), "norm: expected one of ortho, backward"),
        (lambda: run(k, k, v, np.ones((2, 1, 7, 7), bool)), "from all queries"),
        (
            lambda: run(*[np.zeros((1, 2**20 + 1, 1, 1), "float32")] * 3, LONG),
            "mask: expected None for more than 1048576 positions",
        ),
        (lambda: attention.fnet_weights(k, k), "weighted sum of values, got 'fnet'"),
    ):
        assert_rejects(call, said)
