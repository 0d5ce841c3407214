"""Documents packed into one row give what each gives alone."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    ALL_FORMS,
    CAUSAL,
    FAMILY,
    FAMILY_STREAMS,
    NAMES,
    STREAMS,
    assert_close,
    assert_rejects,
    cuts,
    fast_jit,
    formula,
    gradients,
    inputs,
    one_step,
    prefill,
    row_inputs,
    run,
    takes,
    unnormed,
    weights,
)

# Padding at the end, at the front and in the middle, also between two runs of one
# number; documents of one position, also at the end; one that fills its row.
IDS = np.array(
    [
        [1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 6, 6, 6, 0, 0, 0],
        [0, 0, 4, 4, 0, 4, 4, 4, 2, 0, 0, 7, 7, 7, 9, 5],
        [7] * 16,
        [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4],
    ],
    np.int32,
)
BATCH, LENGTH = IDS.shape  # Those of `mechanisms.row_inputs`.
# All of ours; a mechanism from outside need not take documents.
PACKED = tuple(name for name in NAMES if takes(name, "segment_ids"))
# Rows of the others go through the same code; here against their formulas.
COMPARED = [name for name in PACKED if name in (*FAMILY, "luna", "fnet", "flash")]
CHUNKINGS = [Chunking(3, 6), Chunking(5, 5, "parallel"), Chunking(1, 2), Chunking(64)]
# Options that other formulas belong to.
OPTIONS = [
    *itertools.product(["cosformer"], [{"reweight": False}], [False, True]),
    *itertools.product(["performer"], [{"kernel": "relu"}], [False, True]),
    *itertools.product(["flow"], [{"clip": None}], [False, True]),
    ("flow", {"competition": False}, False),
]


def documents(ids: np.ndarray = IDS) -> list[tuple[int, int, int]]:
    """Row, first position and the one after the last of each document."""
    spans_of_rows = []
    for row, numbers in enumerate(ids):
        edges = np.flatnonzero(np.diff(numbers, prepend=0, append=0))
        spans = itertools.pairwise(edges)
        spans_of_rows += [(row, a, b) for a, b in spans if numbers[a] > 0]
    return spans_of_rows


# A mask in addition: some documents begin or end with a hidden position.
SEEN = np.random.default_rng(39).random(IDS.shape) < 0.6
ALL_SEEN = np.ones_like(SEEN)


def _inputs(seen: np.ndarray) -> tuple[tuple, np.ndarray]:
    """Arrays, and factors of the outputs, none at padding and hidden positions."""
    arrays, factors = row_inputs(31)
    factors = np.where((seen & (IDS > 0))[:, :, None, None], factors, 0)
    return tuple(x.astype("float64") for x in arrays), factors.astype("float64")


def _masks(name: str, mask: Any) -> dict[str, Any]:
    return {"mask": mask} | ({"query_mask": mask} if takes(name, "query_mask") else {})


def _alone(name: str, causal: bool, hidden: bool, **options: Any) -> list[np.ndarray]:
    """Output and gradients of every document alone, each in its place in the rows."""
    seen = SEEN if hidden else ALL_SEEN
    arrays, factors = _inputs(seen)
    together = [np.zeros_like(x) for x in (factors, *arrays)]
    more = {"mask_queries": True} if causal and takes(name, "query_mask") else {}
    call = gradients(name, "causal" if causal else "full", **more, **options)
    every = documents()
    for spans in (every[i : i + BATCH] for i in range(0, len(every), BATCH)):
        # Each at the start of a row; the positions after it are padding.
        rows = [np.zeros_like(x) for x in (*arrays, seen, factors)]
        for number, (row, first, end) in enumerate(spans):
            for x, part in zip(rows, (*arrays, seen, factors), strict=True):
                x[number, : end - first] = part[row, first:end]
        out, slopes = call(*rows)
        out = np.where(rows[3][:, :, None, None], out, 0)
        for number, (row, first, end) in enumerate(spans):
            for whole, part in zip(together, (out, *slopes), strict=True):
                whole[row, first:end] = np.asarray(part)[number, : end - first]
    return together


_cached = functools.cache(_alone)


def _check(
    name: str,
    causal: bool,
    options: dict[str, Any] | None = None,
    hidden: bool = False,
    **more: Any,
) -> None:
    """In float64: gradients of a norm over a few numbers lose half of the digits.

    The padding is NaN: it may hold anything.
    """
    more |= ({"is_causal": True} if causal else {}) | (options or {})
    more |= _masks(name, SEEN) if hidden else {}
    seen = SEEN if hidden else ALL_SEEN

    @fast_jit
    def call(factors, *arrays):
        ids = jnp.asarray(IDS)
        attend = functools.partial(run(name), segment_ids=ids, **more)
        out, pull = jax.vjp(attend, *arrays)
        real = (ids > 0) & seen
        return jnp.where(real[:, :, None, None], out, 0), *pull(factors)

    with jax.enable_x64(True):
        arrays, factors = _inputs(seen)
        real = (IDS > 0)[:, :, None, None]
        arrays = (np.where(real, x, np.nan) for x in arrays)
        make = _alone if options else _cached
        expected = make(name, causal, hidden, **options or {})
        assert_close(call(factors, *arrays), tuple(expected), 1e-9)


@pytest.mark.parametrize("name", COMPARED)
def test_a_packed_row_is_each_document_alone(name: str) -> None:
    """Some positions are hidden in addition; the cuts below have no mask."""
    _check(name, False, hidden=True)


# All cuts of one that has the common engine, and of softmax.
CUTS = [(name, CHUNKINGS[0], True) for name in COMPARED if name in CAUSAL]
CUTS += itertools.product(["linear", "softmax"], CHUNKINGS[1:], [False])


@pytest.mark.parametrize(("name", "chunking", "hidden"), CUTS)
def test_a_packed_row_is_each_document_alone_in_the_causal_form(
    name: str, chunking: Chunking, hidden: bool
) -> None:
    _check(name, True, hidden=hidden, **cuts(name, chunking))


@pytest.mark.parametrize(
    ("name", "form"), [(x, y) for x, y in ALL_FORMS if x in {*PACKED} - {*COMPARED}]
)
def test_a_packed_row_is_the_formula_of_each_document(name: str, form: str) -> None:
    arrays, _ = row_inputs(31)
    out = np.asarray(fast_jit(run(name, form))(*arrays, segment_ids=IDS))
    for row, first, end in documents():
        part = np.s_[row : row + 1, first:end]
        assert_close(out[part], formula(name, form)(*(x[part] for x in arrays)))


@pytest.mark.parametrize(("name", "options", "causal"), OPTIONS)
def test_documents_under_other_options(name: str, options: dict, causal: bool) -> None:
    _check(name, causal, options, False, **(cuts(name, CHUNKINGS[0]) if causal else {}))


@pytest.mark.parametrize("name", [name for name in PACKED if takes(name, "gate")])
def test_gates_of_padding_between_documents_do_not_matter(name: str) -> None:
    form = "causal" if name in CAUSAL else "full"
    real = (IDS > 0)[:, :, None, None]
    sizes = {"batch": BATCH, "query_length": LENGTH, "length": LENGTH}
    arguments = dict(zip(("query", "key", "value"), inputs(37, **sizes), strict=True))
    arguments["gate"] = inputs(38, **sizes)[0]

    @fast_jit
    def slope(arguments):
        def loss(arguments):
            out = run(name, form)(**arguments, segment_ids=jnp.asarray(IDS))
            out = jnp.where(real, out, 0)
            return jnp.sin(out).sum(), out

        return jax.grad(loss, has_aux=True)(arguments)

    nothing = {
        part: np.where(real, x, np.float32(np.nan)) for part, x in arguments.items()
    }
    assert_close(slope(nothing), slope(arguments), 1e-6)


@pytest.mark.parametrize("name", STREAMS)
def test_a_packed_prompt_gives_the_state_of_each_last_document(name: str) -> None:
    arrays = inputs(33, batch=BATCH, query_length=LENGTH, length=LENGTH)
    further = [x[:, 0] for x in inputs(34, batch=BATCH, query_length=1, length=1)]
    # Each row's last document, in a row of its own that begins with it.
    alone, mask = [np.zeros_like(x) for x in arrays], np.zeros_like(SEEN)
    for row, first, end in {row: (row, a, b) for row, a, b in documents()}.values():
        mask[row, : end - first] = True
        for x, whole in zip(alone, arrays, strict=True):
            x[row, : end - first] = whole[row, first:end]
    _, state = prefill(name, *arrays, segment_ids=IDS)
    out, _ = one_step(name)(state, *further)
    _, state = prefill(name, *alone, mask=mask)
    expected, _ = one_step(name)(state, *further)
    assert_close(list(out), list(expected), 1e-5)


@pytest.mark.parametrize("name", FAMILY_STREAMS)
def test_the_first_document_of_a_packed_row_continues_a_stream(name: str) -> None:
    q, k, v = inputs(39, batch=1, query_length=LENGTH, length=LENGTH)
    ids = IDS[:1]
    start = (x[:, :3] for x in (q, k, v))
    _, state = prefill(name, *start)
    rest = [x[:, 3:] for x in (q, k, v)]
    if name == "softmax":
        call = functools.partial(prefill, name, *rest, state=state)
        assert_rejects(lambda: call(segment_ids=ids[:, 3:]), "segment_ids", "None")
        return
    out, after = prefill(name, *rest, state=state, segment_ids=ids[:, 3:])
    whole, expected = prefill(name, q, k, v, segment_ids=ids)
    real = ids[:, 3:] > 0
    assert_close(out[real], whole[:, 3:][real], 2e-5)
    assert_close(after, expected, 2e-5)


@pytest.mark.parametrize("name", PACKED)
def test_what_segment_ids_must_be(name: str) -> None:
    q, k, v = inputs(3)
    for bad, word in (
        (np.ones((2, 8), int), "[B, T]=(2, 7)"),
        (np.ones((2, 7)), "an integer dtype"),
    ):
        assert_rejects(
            lambda bad=bad: run(name)(q, k, v, segment_ids=bad), "segment_ids", word
        )


def test_documents_of_at_most_max_length() -> None:
    """cosFormer's M may be shorter than a row whose documents all fit."""
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0]])
    arrays = inputs(40, batch=1, query_length=10, length=10)
    attend = functools.partial(attention.cosformer_attention, max_length=4)
    full = attend(*arrays, segment_ids=ids)
    causal = attend(*arrays, segment_ids=ids, is_causal=True)
    stream, _ = attention.cosformer_prefill(*arrays, max_length=4, segment_ids=ids)
    for _, first, end in documents(ids):
        alone = [x[:, first:end] for x in arrays]
        assert_close(full[:, first:end], attend(*alone), 1e-6)
        for out in (causal, stream):
            assert_close(out[:, first:end], attend(*alone, is_causal=True), 1e-6)
    # A longer one is cut.
    ids = np.array([[1] * 6 + [2] * 4])
    causal = attend(*arrays, segment_ids=ids, is_causal=True)
    stream, state = attention.cosformer_prefill(*arrays, max_length=4, segment_ids=ids)
    assert_close(stream, causal, 1e-6)
    assert not causal[:, 4:6].any() and state.position.tolist() == [4]


# Softmax has a function of its own; one derives those of all others.
@pytest.mark.parametrize(
    "name", ["softmax", "linear", "flow", "local", "linformer", "gau"]
)
def test_weights_of_packed_rows(name: str) -> None:
    """The matrix gives the output, and no pair of two documents has a weight."""
    q, k, v = inputs(35, batch=BATCH, query_length=LENGTH, length=LENGTH)

    @fast_jit
    def call(q, k, v):
        ids = jnp.asarray(IDS)
        out = run(name)(q, k, v, segment_ids=ids, **unnormed(name))
        return weights(name)(q, k, segment_ids=ids), out

    matrix, out = (np.asarray(x) for x in call(q, k, v))
    shown = (IDS > 0)[:, :, None, None]
    product = np.einsum("bnts,bsnv->btnv", matrix, np.where(shown, v, 0))
    assert_close(np.where(shown, product, 0), np.where(shown, out, 0), 1e-5)
    number = np.cumsum(np.diff(IDS, prepend=0) != 0, 1) * (IDS > 0)
    same = (number[:, :, None] == number[:, None]) & (number[:, None] > 0)
    seen = np.abs(matrix).max(1) > 0
    real = (IDS > 0)[:, :, None]
    assert not (seen & ~same & real).any()
    assert (seen & same).any()
