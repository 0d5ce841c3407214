"""Flow-Attention: its formulas, clip, ablations, conservation and masks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.flow.causal import unit_of
from lra_jax.attention.flow.flow import flow_slice

from .. import dense
from ..mechanisms import (
    SMALL,
    Case,
    assert_close,
    assert_rejects,
    extremes,
    fast_jit,
    inputs,
    jitted,
    pulled_back,
    run,
)

# Scattered, and on the left.
SIDES = np.array([[0, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]], bool)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def formula(
    q,
    k,
    v,
    mask=None,
    query_mask=None,
    clip: float | None = 30.0,
    eps=1e-6,
    competition=True,
    allocation=True,
    phi=sigmoid,
) -> np.ndarray:
    def one_head(q, k, v):
        a, b = phi(q), phi(k)
        incoming = (a + eps) @ (b.sum(0) + eps)
        outgoing = (b + eps) @ (a.sum(0) + eps)
        sink = (a + eps) @ ((b / outgoing[:, None]).sum(0) + eps)
        source = (b + eps) @ ((a / incoming[:, None]).sum(0) + eps)
        if clip is not None:
            source = np.clip(source, -clip, clip)
        weights = (a / incoming[:, None]) @ b.T
        if allocation:
            weights = weights / (1 + np.exp(-sink * len(q) / len(k)))[:, None]
        if competition:
            weights = weights * dense.row_softmax(source) * len(k)
        return weights @ v

    out = np.zeros((*q.shape[:3], v.shape[-1]))
    rows = np.ones(q.shape[:2], bool) if query_mask is None else np.asarray(query_mask)
    for n in range(q.shape[0]):
        if rows[n].any():
            sample = None if mask is None else np.asarray(mask)[n : n + 1]
            out[n, rows[n]] = dense.each_head(
                np.asarray(q)[n, rows[n]][None],
                k[n : n + 1],
                v[n : n + 1],
                sample,
                lambda q, k, v, _: one_head(q, k, v),
            )[0]
    return out


def causal_formula(
    q,
    k,
    v,
    mask=None,
    clip: float | None = 30.0,
    eps=1e-6,
    competition=True,
    allocation=True,
    phi=sigmoid,
) -> np.ndarray:
    """The authors' causal form, position by position; a hidden one does not exist."""

    def one_head(q, k, v):
        a, b, count = phi(q), phi(k), np.arange(1, len(q) + 1)
        out, logits = np.zeros((len(q), v.shape[-1])), np.zeros(len(q))
        incoming, outgoing = np.zeros(len(q)), np.zeros(len(q))
        shares = np.ones(len(q))
        for i in range(len(q)):
            past = slice(0, i + 1)
            incoming[i] = (a[i] + eps) @ (b[past].sum(0) + eps)
            outgoing[i] = (b[i] + eps) @ (a[past].sum(0) + eps)
            to_sink = (b[past] * (count / outgoing)[past, None]).sum(0)
            to_source = (a[past] * (count / incoming)[past, None]).sum(0)
            sink = (a[i] + eps) @ (to_sink + eps) / count[i]
            logits[i] = (b[i] + eps) @ (to_source + eps) / count[i]
            if clip is not None:
                logits[i] = np.clip(logits[i], -clip, clip)
            if competition:
                shares[i] = dense.row_softmax(logits[past])[-1] * count[i]
            out[i] = a[i] @ b[past].T / incoming[i] * shares[past] @ v[past]
            if allocation:
                out[i] /= 1 + np.exp(-sink)
        return out

    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    real = np.ones(q.shape[:2], bool) if mask is None else np.asarray(mask)
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    with np.errstate(divide="ignore"):  # counts over flows that are still to come
        for b in range(q.shape[0]):
            rows = np.flatnonzero(real[b])
            for n in range(q.shape[2]):
                kn, vn = (n * x.shape[2] // q.shape[2] for x in (k, v))
                head = one_head(q[b, rows, n], k[b, rows, kn], v[b, rows, vn])
                out[b, rows, n] = head
    return out


CASE = Case(
    formula, causal_formula=causal_formula, level=None, unordered=("query", "key")
)


MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0]], bool)
ROWS = np.array([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]], bool)
WITHOUT = (
    {"competition": False},
    {"allocation": False},
    {"competition": False, "allocation": False},
)
OPTIONS = ({}, {"clip": 1.0}, {"clip": None}, {"allocation": False, "clip": None})


@pytest.mark.parametrize("options", [*OPTIONS, *WITHOUT], ids=str)
@pytest.mark.parametrize("form", ["full", "causal"])
def test_output_weights_and_terms(form: str, options: dict[str, Any]) -> None:
    q, k, v = inputs(1, query_length=6 if form == "full" else 7)
    masks: Any = {"mask": MASK} | ({"query_mask": ROWS} if form == "full" else {})
    keywords = {"is_causal": form == "causal"} | masks | options

    @fast_jit
    def each(q, k, v):
        out = attention.flow_attention(q, k, v, chunking=SMALL, **keywords)
        weights = attention.flow_weights(q, k, **keywords)
        return out, weights, attention.flow_terms(q, k, **keywords)

    out, weights, terms = each(q, k, v)
    dense_form = formula if form == "full" else causal_formula
    assert_close(out, dense_form(q, k, v, **masks, **options))
    assert_close(np.einsum("bnts,bsnv->btnv", weights, v), out)
    if not options.get("competition", True):
        ones = np.broadcast_to(MASK[..., None], terms.competition.shape)
        np.testing.assert_array_equal(terms.competition, ones)
    if not options.get("allocation", True):
        assert (np.asarray(terms.allocation) == 1).all()


@pytest.mark.parametrize("options", [{}, *WITHOUT, {"competition_axis": "heads"}])
def test_slices_of_a_sequence(options: dict[str, Any]) -> None:
    """Four devices' parts, here the samples of a named axis."""
    whole_arrays = inputs(4, query_length=8, length=8)
    mask = np.arange(8)[None] < np.array([[8], [5]])

    @fast_jit
    def sliced(*whole_arrays):
        parts = (x.reshape(2, 4, 2, *x.shape[2:]).swapaxes(0, 1) for x in whole_arrays)
        call = functools.partial(flow_slice, axis="seq", is_causal=False, **options)
        out = jax.vmap(call, axis_name="seq")(*parts)
        return out.swapaxes(0, 1).reshape(2, 8, *out.shape[3:])

    whole = functools.partial(attention.flow_attention, query_mask=mask, **options)
    assert_close(
        sliced(*whole_arrays, mask, mask), fast_jit(whole)(*whole_arrays, mask=mask)
    )


@pytest.mark.parametrize("clips", [(30.0, None), (None, 30.0), (30.0, 50.0)])
def test_a_stream_may_change_its_clip(clips: tuple[float | None, ...]) -> None:
    """With a small clip its state has no largest logit; both kinds read both."""
    q, k, v = inputs(6)

    @fast_jit
    def both(q, k, v):
        first, rest = ([x[:, part] for x in (q, k, v)] for part in np.s_[:4, 4:])
        one, state = attention.flow_prefill(*first, clip=clips[0])
        two, _ = attention.flow_prefill(*rest, clip=clips[1], state=state)
        return jnp.concatenate([one, two], 1)

    assert_close(both(q, k, v), causal_formula(q, k, v))


@pytest.mark.parametrize("clip", [30.0, 1.0])
def test_logits_at_the_clip(clip: float) -> None:
    """Sources after many without features: flows of thousands, and exact gradients."""
    q, k, v = inputs(7, query_length=70, length=70)
    k[:, :30] -= 12.0
    cotangent = inputs(8, query_length=70, length=70)[2]

    def outcome(dtype: str) -> list[jax.Array]:
        @jax.jit
        def call(q, k, v, cotangent):
            attend = functools.partial(
                attention.flow_attention, is_causal=True, clip=clip
            )
            out, pullback = jax.vjp(attend, q, k, v)
            return [out, *pullback(cotangent)]

        return call(*(jnp.asarray(x, dtype) for x in (q, k, v, cotangent)))

    got = outcome("float32")
    with jax.enable_x64(True):
        expected = outcome("float64")
        terms = attention.flow_terms(q, k, is_causal=True)
    assert float(terms.conserved_source.max()) > 1e3
    for one, two in zip(got, expected, strict=True):
        assert_close(one, two, 2e-6)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 12), (12, 5)])
def test_flow_is_conserved(queries: int, keys: int) -> None:
    q, k, _ = inputs(8, query_length=queries, length=keys)
    terms = fast_jit(lambda q, k: attention.flow_terms(q, k, clip=None))(q, k)
    a, b = (1 / (1 + np.exp(-x)) for x in (q, k))
    assert_close(terms.incoming, np.einsum("btnh,bsnh->btn", a, b), 1e-5)
    assert_close(terms.outgoing, np.einsum("bsnh,btnh->bsn", b, a), 1e-5)
    everywhere = np.ones((2, 2))
    assert_close(terms.conserved_source.sum(1), queries * everywhere, 1e-5)
    assert_close(terms.conserved_sink.sum(1), keys * everywhere, 1e-5)
    assert_close(terms.competition.sum(1), keys * everywhere, 1e-5)
    assert (np.asarray(terms.allocation) > 0.5).all()
    assert (np.asarray(terms.allocation) < 1).all()


def test_flow_without_a_clip_survives_large_flows() -> None:
    # The features of two keys are huge: exp of their flows overflows without a maximum,
    # and a maximum over later positions would leave nothing of the earlier ones.
    q, k, v = inputs(18)
    k = np.where(np.isin(np.arange(7), (3, 5))[None, :, None, None], 1e4 + k, k)
    keywords = {"feature_map": "relu", "clip": None}
    arrays = (np.abs(q), np.abs(k).astype("float32"), v)

    @fast_jit
    def both(*arrays):
        call = run("flow", "causal", **keywords)
        out, pullback = jax.vjp(call, *arrays)
        terms = attention.flow_terms(*arrays[:2], is_causal=True, **keywords)
        return out, terms, pullback(jnp.ones_like(out))

    out, terms, gradients = both(*arrays)
    for array in (out, *terms, *gradients):
        assert np.isfinite(np.asarray(array)).all()
    shares = np.asarray(terms.competition) / np.arange(1, 8)[None, :, None]
    assert shares[:, 0].min() == 1
    assert (shares <= 1).all() and (shares >= 0).all()
    assert np.abs(np.asarray(out)[:, :3]).min() > 0


def test_flow_queries_are_hidden_with_the_keys_unless_said_otherwise() -> None:
    q, k, v = inputs(19)
    mask = SIDES
    call = jitted("flow", "causal")
    np.testing.assert_array_equal(
        call(q, k, v, mask), call(q, k, v, mask, query_mask=mask)
    )
    everyone = np.ones((2, 7), bool)
    unmasked = np.asarray(call(q, k, v, mask, query_mask=everyone))
    assert unmasked[0, 2].any() and not np.asarray(call(q, k, v, mask))[0, 2].any()


def test_options_that_do_not_fit() -> None:
    options = {"is_causal": True, "competition_axis": "heads"}
    call = functools.partial(run("flow"), *inputs(2), **options)
    assert_rejects(call, "competition_axis: expected 'source'", "'heads'")


@pytest.mark.parametrize("is_causal", [False, True], ids=["whole", "causal"])
def test_no_features_no_gradient(is_causal: bool) -> None:
    """Without eps nothing flows where features are zero: no 0 / 0."""
    q, k, v = inputs(12, query_length=7, length=7)
    q, k = (np.where(np.arange(7)[None, :, None, None] < 3, 0, x) for x in (q, k))
    options = {"feature_map": "relu", "eps": 0.0, "is_causal": is_causal}
    both = pulled_back(functools.partial(run("flow"), **options))
    for array in jax.tree.leaves(both(q, k, v)):
        assert np.isfinite(array).all()


# So long and wide that a plain sum of products of 1e18 has no room in float32.
LONG: dict[str, int] = {"batch": 1, "query_length": 80, "length": 80, "head_dim": 16}
HALVES = np.s_[:40, 40:]
DIRECTION = np.random.default_rng(13).normal(size=(1, 80, 2, 16))


def extremes_of_relu() -> dict[str, Any]:
    """`extremes`, and positions as far apart as float32 lets them be."""
    q, k, v = inputs(10, **LONG)
    scattered = np.random.default_rng(11).integers(0, 2, (2, 1, 80, 1, 1))
    one, two = np.where(scattered, 1e18, 1e-18).astype("float32")
    mixed = {
        "mixed": (one * q, one * k, v),
        "mixed apart": (one * q, two * k, v),
        "large and small": (np.float32(1e18) * q, np.float32(1e-18) * k, v),
        "small values": (q, k, np.float32(1e-18) * v),
    }
    return extremes("flow", q, k, v) | mixed


def test_the_unit_is_a_power_of_two() -> None:
    """Bit for bit, by the exponents of numbers from the smallest to the largest."""
    powers = np.float32(2) ** np.array([-149, -127, -126, 0, *range(38, 63), 127])
    powers = powers.astype("float32")
    ends = [np.nextafter(powers, np.float32(end)) for end in (0, np.inf)]
    largest = np.concatenate([powers, *ends, np.float32([0, np.inf, np.nan])])
    exponents = np.clip(np.frexp(largest)[1] - 40, 0, 20)
    expected = np.where(np.isfinite(largest), 2.0**exponents, 1)
    features = largest[:, None, None, None]
    actual = fast_jit(lambda *x: unit_of(x))(features, np.zeros_like(features))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("clip", [None, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_features(is_causal: bool, clip: float | None) -> None:
    """Outputs and gradients of float32 are those of the formula in float64."""
    form = causal_formula if is_causal else formula
    expected = functools.partial(form, clip=clip, phi=relu)
    (cotangent,) = inputs(12, **LONG)[:1]

    @fast_jit
    def slopes_for(*arrays):
        options = {"feature_map": "relu", "clip": clip, "is_causal": is_causal}
        attend = functools.partial(attention.flow_attention, **options)
        out, pull = jax.vjp(attend, *arrays)
        return out, pull(cotangent)

    for kind, arrays in extremes_of_relu().items():
        out, gradients = slopes_for(*arrays)
        with np.errstate(over="ignore"):
            right = expected(*(np.asarray(x, np.float64) for x in arrays))
        error = np.abs(np.asarray(out, np.float64) - right).max()
        assert error <= 1e-5 * np.abs(right).max(), kind
        slopes = relative_slopes(expected, arrays, cotangent)
        for name, array, gradient in zip("qkv", arrays, gradients, strict=True):
            assert np.isfinite(gradient).all(), kind
            got = (np.asarray(gradient, np.float64) * array * DIRECTION).sum()
            scale = 1e-3 * np.abs(cotangent * right).sum()
            assert abs(got - slopes[name]) <= scale, (kind, name)


def relative_slopes(form: Any, arrays: Any, cotangent: np.ndarray) -> dict[str, float]:
    """Central differences along ``x DIRECTION``, for each of the arrays x."""
    step, actual = 1e-6, {}
    arrays = [np.asarray(x, np.float64) for x in arrays]
    for at, name in enumerate("qkv"):
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[at] = arrays[at] * (1 + sign * step * DIRECTION)
            ends.append((form(*moved) * cotangent).sum())
        actual[name] = (ends[0] - ends[1]) / (2 * step)
    return actual


def test_huge_features_in_streams_rows_and_slices() -> None:
    """The unit of the features is the same in every part."""
    q, k, v = extremes_of_relu()["mixed"]
    options = {"feature_map": "relu", "clip": None}
    ids = np.repeat([1, 2], 40)[None]

    @fast_jit
    def parts(q, k, v):
        first, last = ([x[:, at] for x in (q, k, v)] for at in (np.s_[:79], 79))
        out, state = attention.flow_prefill(*first, **options)
        streamed = [out, attention.flow_step(state, *last, **options)[0][:, None]]
        packed = [
            attention.flow_attention(
                q, k, v, segment_ids=ids, is_causal=is_causal, **options
            )
            for is_causal in (False, True)
        ]
        halves = (x.reshape(2, 1, 40, *x.shape[2:]) for x in (q, k, v))
        call = functools.partial(flow_slice, axis="seq", is_causal=False, **options)
        sliced = jax.vmap(lambda *x: call(*x, None, None), axis_name="seq")(*halves)
        weights = [
            attention.flow_weights(q, k, is_causal=is_causal, **options)
            for is_causal in (False, True)
        ]
        return jnp.concatenate(streamed, 1), packed, sliced.reshape(v.shape), weights

    streamed, packed, sliced, weights = parts(q, k, v)
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    for got, matrix, form in zip(
        packed, weights, (formula, causal_formula), strict=True
    ):
        alone = [form(*(x[:, at] for x in wide), clip=None, phi=relu) for at in HALVES]
        assert_close(got, np.concatenate(alone, 1))
        whole = form(*wide, clip=None, phi=relu)
        assert_close(np.einsum("bnts,bsnv->btnv", matrix, wide[2]), whole)
        assert_close(sliced if form is formula else streamed, whole)
