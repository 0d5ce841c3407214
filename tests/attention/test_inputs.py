"""Masks in all their shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.attention import inputs

PADDING = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)


def test_sums_of_numpys_float64_are_what_jax_makes_of_it() -> None:
    """Else the lowest float64 number stands for a float32 one, as minus infinity."""
    arrays = np.zeros(2), np.zeros(2, "float16")
    assert inputs.accumulation_dtype(*arrays) == jnp.float32
    with jax.enable_x64(True):
        assert inputs.accumulation_dtype(*arrays) == jnp.float64


@pytest.mark.parametrize(
    "mask",
    [
        PADDING,
        PADDING[:, None, None],
        PADDING.astype("int32"),
        PADDING[:, None, None].astype("float32"),
        nnx.make_attention_mask(np.ones((2, 1), bool), PADDING),
        list(map(list, PADDING.tolist())),
    ],
    ids=["BS", "B11S", "int", "float", "flax", "list"],
)
def test_one_mask_in_many_forms(mask) -> None:
    wanted = inputs.padding_mask(jnp.asarray(PADDING), 2, 5)
    assert wanted is not None
    got = inputs.padding_mask(mask, 2, 5)
    np.testing.assert_array_equal(got, wanted)
    pairs = inputs.pair_mask(mask, 2, 3, 4, 5)
    assert pairs is not None
    np.testing.assert_array_equal(pairs, PADDING[:, None, None])


@pytest.mark.parametrize(
    "shape", [(1,), (5,), (1, 5), (2, 1), (1, 1, 5), (1, 1, 1, 5), (2, 1, 1, 1)]
)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    mask = jnp.zeros(shape, bool).at[..., 0].set(True)
    got = inputs.padding_mask(mask, 2, 5)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    wanted = np.broadcast_to(np.asarray(mask).reshape(aligned), (2, 1, 1, 5))
    np.testing.assert_array_equal(got, wanted[:, 0, 0])


def test_no_mask_is_no_mask() -> None:
    assert inputs.padding_mask(None, 2, 5) is None
    assert inputs.pair_mask(None, 2, 3, 4, 5) is None


@pytest.mark.parametrize("hidden", [-np.inf, -1e9, np.nan, 2.0])
@pytest.mark.parametrize("read", ["padding", "pairs"])
def test_additive_masks_are_refused(read: str, hidden: float) -> None:
    mask = np.where(PADDING, np.float32(0 if hidden < 0 else 1), np.float32(hidden))
    with pytest.raises(ValueError, match="mask: expected a boolean mask, or one of 0"):
        if read == "padding":
            inputs.padding_mask(mask, 2, 5)
        else:
            inputs.pair_mask(mask, 2, 3, 4, 5)
