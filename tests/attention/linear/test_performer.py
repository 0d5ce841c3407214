"""Performer: its estimate, large norms, other kernels, its projection."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

from .. import dense
from ..mechanisms import (
    MASK,
    Case,
    assert_close,
    assert_refuses,
    fast_jit,
    inputs,
    pulled_back,
    run,
)
from ..mechanisms import formula as formula_of


@functools.cache
def projection(head_dim: int, features: int = 6) -> np.ndarray:
    """Random rows for a head width."""
    rng = np.random.default_rng(head_dim)
    return rng.normal(size=(features, head_dim)).astype("float32")


def formula(q, k, v, mask=None, projection=None, causal=False) -> np.ndarray:
    """Weights in proportion to ``sum_r exp(w_r . q' + w_r . k' - |k'|^2 / 2)``."""
    w = np.asarray(projection, np.float64)

    def head(q, k, v, where):
        q, k = (x / x.shape[-1] ** 0.25 for x in (q, k))
        rows = q @ w.T
        rows -= rows.max(-1, keepdims=True)  # A large one would swallow the rest.
        exponents = rows[:, None] + (k @ w.T - (k**2).sum(-1)[:, None] / 2)
        top = exponents.max(-1)
        logits = top + np.log(np.exp(exponents - top[..., None]).sum(-1))
        seen = dense.seen(len(q), where, causal) > 0
        top = np.where(seen, logits, -np.inf).max(-1, keepdims=True)
        # A row that sees nothing has no largest logit; its weights stay zero.
        top = np.where(np.isfinite(top), top, 0)
        weights = np.where(seen, np.exp(np.minimum(logits - top, 0)), 0)
        return weights @ v / np.maximum(weights.sum(-1, keepdims=True), 1e-300)

    return dense.each_head(q, k, v, mask, head)


CASE = Case(
    formula,
    lambda heads, head_dim: {"projection": projection(head_dim)},
    every_call=True,
    mean=True,
    unordered=("query", "key"),
)

W = projection(4)


def long_inputs(seed: int, length: int = 41) -> tuple[np.ndarray, ...]:
    """Long enough for halves of up to 16 positions, and for several chunks."""
    return inputs(seed, query_length=length, length=length, value_dim=3)


def _traced(query, key, value, matrix, causal: bool):
    """The formula, to be differentiated by jax."""
    query, key = (x / query.shape[-1] ** 0.25 for x in (query, key))
    rows = jnp.einsum("btnh,mh->bntm", query, matrix)
    columns = jnp.einsum("bsnh,mh->bnsm", key, matrix)
    columns -= jnp.square(key).sum(-1).swapaxes(1, 2)[..., None] / 2
    logits = jax.nn.logsumexp(rows[:, :, :, None] + columns[:, :, None], axis=-1)
    if causal:
        seen = np.tri(logits.shape[-1], dtype=bool)[None, None]
        logits = jnp.where(seen, logits, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(logits, axis=-1), value)


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_outputs_and_gradients_are_those_of_the_formula(causal: bool) -> None:
    """Of the projection too: it may be trained, if someone wants to."""
    arrays = (*long_inputs(1), W)
    chunking = {"is_causal": True, "chunking": Chunking(16, 32)} if causal else {}
    got = pulled_back(functools.partial(attention.performer_attention, **chunking))(
        *arrays
    )
    expected = pulled_back(functools.partial(_traced, causal=causal))(*arrays)
    assert_close(got, expected)


@pytest.mark.parametrize(
    "chunking",
    [Chunking(), Chunking(5, 100), Chunking(16, 16), Chunking(8, 8, "parallel")],
    ids=str,
)
def test_every_cut_is_the_formula(chunking: Chunking) -> None:
    q, k, v = long_inputs(2)
    mask = np.arange(41)[None] % np.array([[7], [5]]) > 1
    call = functools.partial(run("performer"), is_causal=True, chunking=chunking)
    got = fast_jit(call)(q, k, v, mask)
    assert_close(got, formula(q, k, v, mask, W, causal=True))


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("size", [6, 100])
def test_large_norms(size: int, causal: bool) -> None:
    q, k, v = long_inputs(3)
    call = fast_jit(functools.partial(run("performer"), is_causal=causal))
    got = call(size * q, size * k, v)
    expected = formula(size * q, size * k, v, None, W, causal=causal)
    # Exponents of some 1e5 have a rounding of 1e-2 in float32, and decide.
    assert_close(got, expected, 1e-5 if size == 6 else 5e-2)
    with jax.enable_x64(True):
        wide = [np.asarray(x, "float64") for x in (size * q, size * k, v)]
        assert_close(call(*wide), expected, 1e-10)


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(8, 16)], ids=str)
def test_a_later_key_of_more_weight_hides_no_earlier_one(chunking: Chunking) -> None:
    """With one reference for a chunk the earlier features would all be zero."""
    q, k, v = long_inputs(5)
    early = np.arange(41)[None, :, None, None] < 37
    k = np.where(early, 40 * k, k / 8).astype("float32")
    call = functools.partial(run("performer"), is_causal=True, chunking=chunking)
    got, gradients = pulled_back(lambda q, k, v: call(q, k, v))(q, k, v)
    assert_close(got, formula(q, k, v, None, W, causal=True), 1e-3)
    assert all(np.isfinite(x).all() for x in gradients)


def test_the_future_within_a_chunk_changes_no_bit() -> None:
    arrays = long_inputs(6, length=70)
    later = np.arange(70)[None, :, None, None] >= 37
    changed = [np.where(later, np.float32(1e4), x) for x in arrays]
    call = fast_jit(functools.partial(run("performer"), is_causal=True))
    np.testing.assert_array_equal(call(*changed)[:, :37], call(*arrays)[:, :37])
    assert_close(call(*(x[:, :37] for x in arrays)), call(*arrays)[:, :37], 1e-6)


def test_no_features_outside_a_block() -> None:
    x, matrix = jnp.zeros((1, 64, 1, 8)), jnp.zeros((24, 8))

    def loss(x):
        chunking = {"is_causal": True, "chunking": Chunking(4, 16)}
        return attention.performer_attention(x, x, x, matrix, **chunking).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    assert "f32[1,1,4,4,24]" in text, "inside a block"
    for whole in ("f32[1,1,64,24]", "f32[4,1,1,16,24]", "f32[1,64,1,24]"):
        assert whole not in text


@functools.cache
def _draw(seed: int, features: int) -> np.ndarray:
    draw = fast_jit(attention.performer_projection, static_argnums=(1, 2))
    return np.asarray(draw(jax.random.key(seed), features, 8))


def test_the_error_falls_with_the_root_of_the_features() -> None:
    """And has no floor: the floor of an uncorrected QR would be 0.0136 here."""
    sizes = {"batch": 1, "query_length": 32, "length": 32, "head_dim": 8, "heads": 1}
    q, k, v = (x / 2 for x in inputs(7, **sizes))
    expected = formula_of("softmax")(q, k, v)
    call = fast_jit(jax.vmap(attention.performer_attention, (None, None, None, 0)))
    errors = []
    for features in (64, 1024, 16384):
        # Blocks are drawn independently: parts of one projection are projections.
        matrices = _draw(7, 4 * 16384)[: 4 * features].reshape(4, features, 8)
        squares = np.square(call(q, k, v, matrices) - expected[None])
        errors.append(np.sqrt(np.mean(squares)) / np.abs(v).std())
    ratios = np.array(errors[:-1]) / errors[1:]
    assert (ratios > 2.8).all() and (ratios < 5.6).all(), errors


def test_features_estimate_the_kernel_without_bias() -> None:
    x, y = 0.3 * np.random.default_rng(8).normal(size=(2, 8))
    matrix = _draw(0, 2**14)
    w = np.asarray(matrix, np.float64)
    for hyperbolic in (False, True):
        rows = np.concatenate([w, -w]) if hyperbolic else w
        values = np.exp(rows @ (x + y) - (x @ x + y @ y) / 2)
        error = values.std() / np.sqrt(len(values))
        assert abs(values.mean() - np.exp(x @ y)) < 3 * error
        assert 3 * error < 0.03 * np.exp(x @ y)


def test_projection() -> None:
    matrix = _draw(1, 20)
    assert matrix.shape == (20, 8) and matrix.dtype == np.float32
    for block in (matrix[:8], matrix[8:16], matrix[16:]):
        inner = block @ block.T
        assert np.abs(inner - np.diag(np.diag(inner))).max() < 1e-5
    assert np.abs(matrix[:8] @ matrix[8:16].T).max() > 0.1
    assert not np.allclose(matrix, _draw(2, 20))
    # Rows of N(0, I): their mean is zero in every coordinate, and their lengths vary.
    rows = _draw(3, 8 * 1000).reshape(1000, 8, 8)
    assert np.abs(rows.mean(0)).max() < 5 / np.sqrt(1000)
    assert_close(rows.var(0), np.ones((8, 8)), 0.25)
    lengths = np.linalg.norm(rows.reshape(-1, 8), axis=1)
    assert_close(np.square(lengths).mean(), 8, 0.02)
    assert_close(np.square(lengths).var(), 16, 0.1)
    even = attention.performer_projection(jax.random.key(4), 5, 8, scaling=1)
    assert_close(np.linalg.norm(even, axis=1), np.full(5, np.sqrt(8)), 1e-6)


TOGETHER = """
import functools, jax
from lra_jax.attention import performer_projection
draw = functools.partial(performer_projection, features=266, head_dim=64)
keys = jax.random.split(jax.random.key(0), 8)
for one in (lambda keys: [draw(key) for key in keys], jax.vmap(draw)):
    for turn in range(3):
        jax.block_until_ready(jax.jit(lambda keys: (one(keys), one(keys)))(keys))
"""


def test_projections_of_one_program_do_not_wait_for_each_other() -> None:
    """In a process of its own, as those that did waited forever."""
    process = helpers.start("-c", TOGETHER)
    try:
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err


@pytest.mark.parametrize("scaling", [0, 1])
def test_a_projection_in_half_precision_is_a_rounded_one(scaling: int) -> None:
    draw = functools.partial(
        attention.performer_projection, jax.random.key(5), 6, 4, scaling=scaling
    )
    half = draw(dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, draw().astype(jnp.bfloat16))


def test_parameters() -> None:
    make = functools.partial(attention.performer_parameters, jax.random.key(0))
    for head_dim, width in ((1, 1), (2, 2), (8, 16), (32, 110), (64, 266)):
        made = jax.eval_shape(functools.partial(make, head_dim=head_dim))
        assert made["projection"].shape == (width, head_dim)
    made = make(head_dim=4, features=7, num_heads=3, max_length=9)
    assert made.keys() == {"projection"} and made["projection"].shape == (7, 4)


def _other_kernel(q, k, v, mask, phi, causal: bool) -> np.ndarray:
    """Dense attention with given features; hidden keys do not exist."""

    def head(q, k, v, where):
        scores = phi(q) @ phi(k).T
        if causal:
            scores = scores * (where[None] <= np.arange(len(q))[:, None])
        return scores @ v / np.maximum(scores.sum(-1, keepdims=True), 1e-300)

    return dense.each_head(q, k, v, mask, head)


def _abs(x):
    return abs(x)


KERNELS = [
    ({"kernel": "relu"}, lambda u: np.maximum(u, 0) + 1e-3, True),
    ({"kernel": "exp", "feature_eps": 0.5}, lambda u: np.exp(u) + 0.5, True),
    ({"kernel": _abs, "projection": None}, lambda u: np.abs(u) + 1e-3, True),
    ({"kernel": "relu", "scale": 1.0}, lambda u: np.maximum(u, 0) + 1e-3, False),
]


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize(("keywords", "phi", "scaled"), KERNELS)
def test_other_kernels(keywords: dict, phi, scaled: bool, causal: bool) -> None:
    q, k, v = inputs(9, batch=3, heads=4, key_heads=2)
    matrix = np.eye(4) if "projection" in keywords else W.astype("float64")
    scale = 4**-0.25 if scaled else 1.0
    expected = _other_kernel(q, k, v, MASK, lambda x: phi(scale * x @ matrix.T), causal)
    got = fast_jit(functools.partial(run("performer"), is_causal=causal, **keywords))
    got = got(q, k, v, MASK)
    assert_close(got, expected)
    assert not np.asarray(got)[2].any()


def test_scale_and_pairs() -> None:
    q, k, v = inputs(10)
    call = attention.performer_attention

    @fast_jit
    def all_of_them(q, k, v):
        pairs = np.concatenate([W, -W])
        return (
            (call(q, k, v, W, hyperbolic=True), call(q, k, v, pairs)),
            (call(q, k, v, W, scale=0.5), call(0.5 * q, 0.5 * k, v, W, scale=1.0)),
        )

    for got, expected in all_of_them(q, k, v):
        assert_close(got, expected)


def test_a_state_of_another_width() -> None:
    arrays = [x[:, 0] for x in inputs(13)]
    state = attention.performer_init(2, 2, 4, projection=W)
    assert state.sums.summary.shape == (2, 2, 6, 4)
    with pytest.raises(ValueError, match=r"state: expected summary of shape \(2, 2, 5"):
        attention.performer_step(state, *arrays, W[:5])
    with pytest.raises(ValueError, match="projection: expected"):
        attention.performer_init(2, 2, 4)
    with pytest.raises(ValueError, match=r"projection: expected \[M, H\]=\(M, 5\)"):
        attention.performer_init(2, 2, 5, projection=W)


WRONG = np.ones((6, 16), "float32")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"projection": None}, ("got None; performer_parameters makes one",)),
        ({"projection": WRONG}, ("[M, H]=(M, 4)", "(6, 16)")),
        ({"projection": WRONG[:0, :4]}, ("at least one row", "(0, 4)")),
        ({"kernel": "relu", "hyperbolic": True}, ("False", "'relu'")),
    ],
)
def test_options_that_do_not_fit(options: dict, parts: tuple) -> None:
    assert_refuses("performer", options, *parts)


@pytest.mark.slow
def test_nothing_is_read_before_it_is_written() -> None:
    """With new memory full of huge numbers (glibc), as it may be at any time."""
    script = """
import jax, numpy as np
from lra_jax import attention
matrix = attention.performer_projection(jax.random.key(1), 64, 16)
query, key = jax.random.normal(jax.random.key(0), (2, 1, 64, 1, 16))
value = jax.numpy.eye(64)[None, :, None]
run = jax.jit(lambda *x: attention.performer_attention(
    *x, is_causal=True, projection=matrix
))
assert all(np.isfinite(run(query, key, value)).all() for _ in range(3))
"""
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.perturb=128"}
    end = helpers.run("-c", script, **tunables)
    assert end.returncode == 0, end.stderr
