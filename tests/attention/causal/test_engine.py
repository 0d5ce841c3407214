"""The causal engine: every way of cutting gives the dense formula and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention.call import Call
from lra_jax.attention.causal.engine import Chunking, Cut
from lra_jax.attention.causal.prefix import prefix
from lra_jax.attention.linear import core
from lra_jax.attention.linear.sums import Sums

from ..mechanisms import assert_close, assert_rejects, fast_jit

LENGTH = 23
CHUNKINGS = [
    Chunking(1, 1),
    Chunking(3, 6),
    Chunking(7, 100),
    Chunking(64),
    Chunking(4, 4),
    Chunking(5, 5, "parallel"),
]
# Slow, fast, and so fast that a position forgets all before it.
SLOPES = np.array([0.0, 0.3, 120.0], "float32")


def _inputs(seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (2, 3, LENGTH, 4), (2, 3, LENGTH, 4), (2, 3, LENGTH, 5)
    return tuple(rng.normal(size=shape).astype("float32") for shape in shapes)


def causal_linear(query, key, value, *, slopes=None, start=None, chunking):
    """Numerators, denominators and state of features with the heads first."""
    arrays = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    call = Call.of(*arrays, is_causal=True, chunking=chunking)
    if start is not None:
        call = call.replace(state=core.LinearState(start, None))
    rates = None if slopes is None else jnp.asarray(slopes)
    form = core._Form.of(call, core.Kernel(slopes=rates))
    sums, state = form.causal(form.sums_form, call.dtype)
    return *(jnp.swapaxes(x, 1, 2) for x in sums), state


def _dense(query, key, value, slopes=None, start=None):
    """The same from one matrix, to be differentiated by jax."""
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = (distance >= 0)[None, None]
    scores = jnp.einsum("bnim,bnjm->bnij", query, key)
    past = jnp.ones((1, 1, LENGTH), query.dtype)
    if slopes is not None:
        rate = slopes[None, :, None]
        steps = np.maximum(distance, 0)[None, None].astype(query.dtype)
        scores = scores * jnp.exp(-rate[..., None] * steps)
        steps = np.arange(1, LENGTH + 1, dtype=query.dtype)[None, None]
        past = jnp.exp(-rate * steps)
    scores = jnp.where(visible, scores, 0)
    numerator, denominator = scores @ value, scores.sum(-1)
    if start is not None:
        far = query * past[..., None]
        numerator += far @ start.summary
        denominator += (far * start.total[:, :, None]).sum(-1)
    return numerator, denominator


def _loss(outputs, cotangents):
    return sum((jnp.sin(x) * c).sum() for x, c in zip(outputs, cotangents, strict=True))


def _start(seed: int = 5) -> Sums:
    rng = np.random.default_rng(seed)
    shapes = (2, 3, 4, 5), (2, 3, 4)
    return Sums(*(rng.normal(size=shape).astype("float32") for shape in shapes))


@functools.cache
def _expected(slopes: bool):
    cotangents = _inputs(7)[2], _inputs(8)[0][..., 0]

    def loss(query, key, value, rates, start):
        outputs = _dense(query, key, value, rates if slopes else None, start)
        return _loss(outputs, cotangents), outputs

    both = fast_jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))
    return both(*_inputs(), SLOPES, _start()), cotangents


@pytest.mark.parametrize("slopes", [False, True], ids=["plain", "decay"])
@pytest.mark.parametrize("chunking", CHUNKINGS, ids=str)
def test_every_cut_is_the_dense_formula(chunking: Chunking, slopes: bool) -> None:
    ((_, outputs), gradients), cotangents = _expected(slopes)

    def loss(query, key, value, rates, start):
        keywords = {"slopes": rates if slopes else None, "chunking": chunking}
        *actual, _ = causal_linear(query, key, value, start=start, **keywords)
        return _loss(actual, cotangents), actual

    both = fast_jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))
    (_, actual), slope = both(*_inputs(), SLOPES, _start())
    assert_close(tuple(actual), tuple(outputs))
    assert_close(slope, gradients, 2e-5)


@pytest.mark.parametrize("count", [1, 5, 20], ids=["one", "added", "scanned"])
def test_states_may_shrink_feature_by_feature(count: int) -> None:
    rng = np.random.default_rng(4)
    start, *updates = rng.normal(size=(count + 1, 1, 2, 3, 4)).astype("float32")
    fade = -rng.uniform(0, 90, size=(1, 2, count, 3)).astype("float32")
    expected = [start]
    for step, update in enumerate(updates):
        expected.append(expected[-1] * np.exp(fade[:, :, step, :, None]) + update)
    before, after = fast_jit(
        lambda *a: prefix((a[0], a[0][..., 0]), (a[1], a[1][..., 0]), a[2])
    )(start, np.stack(updates, 2), fade)
    assert_close(before[0], np.stack(expected[:-1], 2))
    assert_close(before[1], np.stack(expected[:-1], 2)[..., 0])
    assert_close(after[0], expected[-1])


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ({"chunk": 0}, ("chunk: expected a positive int", "got 0")),
        ({"segment": -1}, ("segment: expected a positive int", "got -1")),
        ({"implementation": "scan"}, ("'loop', 'parallel' or None", "'scan'")),
    ],
)
def test_chunkings_that_do_not_fit(option: dict, parts: tuple) -> None:
    assert_rejects(lambda: Chunking(**option), *parts)


def test_cuts_hold_the_sequence_and_little_more() -> None:
    for length in (1, 7, 64, 65, 100, 513, 1000, 4097):
        for chunking in (*CHUNKINGS, Chunking()):
            cut = chunking.cut(length)
            assert length <= cut.length < length + cut.chunk * cut.segments
            if chunking.implementation == "parallel":
                assert cut.segments == 1
            else:
                assert cut.segment <= max(chunking.segment or 128, cut.chunk)


def test_more_rows_get_shorter_segments() -> None:
    cuts = (Chunking().cut(4096, rows) for rows in (1, 4, 8, 16, 4096))
    assert [cut.segment for cut in cuts] == [256, 256, 128, 64, 64]
    # Short chunks do not make more turns of the loop, with a state kept for each.
    assert Chunking(16).cut(4096, 4096) == Cut(chunk=16, chunks=4, segments=64)
    assert Chunking(64, 512).cut(4096, 4096) == Cut(chunk=64, chunks=8, segments=8)


def test_the_default_is_the_loop_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Chunking().cut(2048) == Cut(chunk=64, chunks=2, segments=16)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert Chunking().cut(2048) == Cut(chunk=64, chunks=32, segments=1)


def test_gradients_keep_inputs_and_one_state_a_segment() -> None:
    q, k, v = (jnp.zeros((1, 1, 256, 8)),) * 3
    chunking = Chunking(8, 64)

    def kept(query, key, value):
        run = functools.partial(causal_linear, chunking=chunking)
        return jax.vjp(lambda *a: run(*a)[:2], query, key, value)[1]

    sizes = [x.size for x in jax.tree.leaves(jax.eval_shape(kept, q, k, v))]
    states = 4 * (8 * 8 + 8)
    assert sum(sizes) <= 3 * q.size + states
