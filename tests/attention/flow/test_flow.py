"""Flow-Attention's clip and its two ablations, in every form that it has."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.sharded.flow_slice import flow_slice

from .. import reference
from ..mechanisms import SMALL, assert_close, fast_jit
from ..mechanisms import inputs as drawn

MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0]], bool)
ROWS = np.array([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]], bool)
WITHOUT = (
    {"competition": False},
    {"allocation": False},
    {"competition": False, "allocation": False},
)


def arrays(seed: int, **sizes: int) -> list[Any]:
    return list(drawn(seed, **sizes))


def forms(**options: Any) -> Any:
    """Output, weights and terms of both kinds, compiled."""

    def call(query, key, value, mask, query_mask=None):
        given = options | {"mask": mask, "query_mask": query_mask}
        out = attention.flow_attention(query, key, value, chunking=SMALL, **given)
        weights = attention.flow_weights(query, key, **given)
        return out, weights, attention.flow_terms(query, key, **given)

    return fast_jit(call)


def check_terms(terms: attention.FlowTerms, options: dict, mask: np.ndarray) -> None:
    if not options.get("competition", True):
        ones = np.broadcast_to(mask[..., None], terms.competition.shape)
        np.testing.assert_array_equal(terms.competition, ones)
    if not options.get("allocation", True):
        assert (np.asarray(terms.allocation) == 1).all()


@pytest.mark.parametrize("options", WITHOUT)
def test_without_a_part(options: dict[str, bool]) -> None:
    q, k, v = arrays(1, query_length=6)
    out, weights, terms = forms(**options)(q, k, v, MASK, ROWS)
    assert_close(out, reference.flow(q, k, v, MASK, ROWS, **options))
    assert_close(np.einsum("bnts,bsnv->btnv", weights, v), out)
    check_terms(terms, options, MASK)


@pytest.mark.parametrize("clip", [30.0, None])
@pytest.mark.parametrize("options", WITHOUT)
def test_without_a_part_if_causal(options: dict[str, bool], clip: float | None) -> None:
    q, k, v = arrays(2)
    out, weights, terms = forms(is_causal=True, clip=clip, **options)(q, k, v, MASK)
    assert_close(out, reference.flow_causal(q, k, v, MASK, clip=clip, **options))
    assert_close(np.einsum("bnts,bsnv->btnv", weights, v), out)
    check_terms(terms, options, MASK)


@pytest.mark.parametrize("options", WITHOUT)
def test_streams_without_a_part(options: dict[str, bool]) -> None:
    q, k, v = arrays(3)

    @fast_jit
    def streamed(q, k, v):
        out, state = attention.flow_prefill(
            *(x[:, :3] for x in (q, k, v)), chunking=SMALL, **options
        )
        outs = [out]
        for at in range(3, 7):
            one = (x[:, at] for x in (q, k, v))
            out, state = attention.flow_step(state, *one, **options)
            outs.append(out[:, None])
        return jnp.concatenate(outs, 1)

    assert_close(streamed(q, k, v), reference.flow_causal(q, k, v, **options))


@pytest.mark.parametrize("options", [{}, *WITHOUT, {"competition_axis": "heads"}])
def test_slices_of_a_sequence(options: dict[str, Any]) -> None:
    """Four devices' parts, here the samples of a named axis."""
    given = arrays(4, query_length=8, length=8)
    mask = np.arange(8)[None] < np.array([[8], [5]])

    @fast_jit
    def sliced(*given):
        parts = (x.reshape(2, 4, 2, *x.shape[2:]).swapaxes(0, 1) for x in given)
        call = functools.partial(flow_slice, axis="seq", is_causal=False, **options)
        out = jax.vmap(call, axis_name="seq")(*parts)
        return out.swapaxes(0, 1).reshape(2, 8, *out.shape[3:])

    whole = functools.partial(attention.flow_attention, query_mask=mask, **options)
    assert_close(sliced(*given, mask, mask), fast_jit(whole)(*given, mask=mask))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_default_is_the_softmax_of_the_paper(is_causal: bool) -> None:
    q, k, v = arrays(5)

    @fast_jit
    def three(q, k, v):
        call = functools.partial(attention.flow_attention, q, k, v, is_causal=is_causal)
        return call(), call(clip=None), call(clip=1.0)

    default, paper, core = three(q, k, v)
    assert_close(default, paper, 1e-6)
    assert np.abs(np.asarray(default) - np.asarray(core)).max() > 1e-2


@pytest.mark.parametrize("clips", [(30.0, None), (None, 30.0), (30.0, 50.0)])
def test_a_stream_may_change_its_clip(clips: tuple[float | None, ...]) -> None:
    """With a small clip its state has no largest logit; both kinds read both."""
    q, k, v = arrays(6)

    @fast_jit
    def both(q, k, v):
        first, rest = ([x[:, part] for x in (q, k, v)] for part in np.s_[:4, 4:])
        one, state = attention.flow_prefill(*first, clip=clips[0])
        two, _ = attention.flow_prefill(*rest, clip=clips[1], state=state)
        return jnp.concatenate([one, two], 1)

    assert_close(both(q, k, v), reference.flow_causal(q, k, v))


@pytest.mark.parametrize("clip", [30.0, 1.0])
def test_logits_at_the_clip(clip: float) -> None:
    """Sources after many without features: flows of thousands, and exact gradients."""
    q, k, v = arrays(7, query_length=70, length=70)
    k[:, :30] -= 12.0
    cotangent = arrays(8, query_length=70, length=70)[2]

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
        wanted = outcome("float64")
        terms = attention.flow_terms(q, k, is_causal=True)
    assert float(terms.conserved_source.max()) > 1e3
    for one, two in zip(got, wanted, strict=True):
        assert_close(one, two, 2e-6)


def test_parts_are_true_or_false() -> None:
    q, k, v = arrays(9)
    for name in ("competition", "allocation"):
        settings: Any = {name: "no"}
        with pytest.raises(ValueError, match=f"{name}: expected True or False, got 'n"):
            attention.flow_attention(q, k, v, **settings)
