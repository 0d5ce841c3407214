"""The product of Flow-Attention by Hopper's kernels: interpreted, refused, lowered."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import inputs

from lra_jax import attention, kernels
from lra_jax.kernels import selection

from .test_linear import compare
from .test_selection import lowered


def masks(batch: int, length: int, seed: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).random((batch, length)) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        # Another number of keys, groups of heads; widths that are padded.
        ({"batch": 2, "heads": 2, "key_heads": 1, "query_length": 70}, {}),
        (
            {"batch": 1, "heads": 1, "head_dim": 24, "value_dim": 40},
            {"clip": None, "feature_map": jnp.exp},
        ),
    ],
)
def test_hopper_kernels(
    sizes: dict, more: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    sizes = {"query_length": 140, "length": 140} | sizes
    batch, length = sizes["batch"], sizes["query_length"]
    arrays = inputs(3, **sizes)
    mask, query_mask = masks(batch, 140), masks(batch, length, 5)
    # The values at hidden positions do not matter.
    hidden = (~x[:, :, None, None] for x in (query_mask, mask, mask))
    arrays = [
        jnp.asarray(np.where(x, np.float32("nan"), y), "bfloat16")
        for x, y in zip(hidden, arrays, strict=True)
    ]
    more = {"mask": mask, "query_mask": query_mask, "chunking": None} | more
    compare("flow", arrays, 1.5e-2, **more)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"implementation": "triton"}, "'pallas' or 'native', got 'triton'"),
        (
            {"competition_axis": "heads"},
            "competition_axis: expected 'source', got 'heads'",
        ),
        ({"competition_axis": "rows"}, "one of source, heads, got 'rows'"),
        ({"competition": False}, "competition: expected True, got False"),
        ({"allocation": False}, "allocation: expected True, got False"),
        ({"is_causal": True}, "its kernels are for CPUs"),
        ({}, "bfloat16, got .'float32'."),
    ],
)
def test_what_is_refused(
    more: dict, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    with pytest.raises(ValueError, match=match):
        attention.flow_attention(*inputs(0), **{"implementation": "pallas"} | more)


def test_lowers_for_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_own_target", lambda: "gpu")
    mask = np.arange(600)[None] < 550
    flow: Any = functools.partial(attention.flow_attention, implementation="pallas")

    def loss(q, k, v):
        return flow(q, k, v, mask).sum()

    x = jax.ShapeDtypeStruct((1, 600, 2, 64), "bfloat16")
    v = jax.ShapeDtypeStruct((1, 600, 2, 48), "bfloat16")
    text = lowered("gpu", jax.value_and_grad(loss, (0, 1, 2)), x, x, v)
    assert text.count("@mosaic_gpu") == 5
