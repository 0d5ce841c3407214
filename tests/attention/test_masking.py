"""Masks in all their shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.attention import masking

PADDING = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)


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
    expected = masking.padding_mask(jnp.asarray(PADDING), 2, 5)
    assert expected is not None
    got = masking.padding_mask(mask, 2, 5)
    np.testing.assert_array_equal(got, expected)
    traced = jax.jit(lambda mask: masking.padding_mask(mask, 2, 5))(jnp.asarray(mask))
    np.testing.assert_array_equal(traced, expected)
    pairs = masking.pair_mask(mask, 2, 3, 4, 5)
    assert pairs is not None
    np.testing.assert_array_equal(pairs, PADDING[:, None, None])


@pytest.mark.parametrize(
    "shape", [(1,), (5,), (1, 5), (2, 1), (1, 1, 5), (1, 1, 1, 5), (2, 1, 1, 1)]
)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    mask = jnp.zeros(shape, bool).at[..., 0].set(True)
    got = masking.padding_mask(mask, 2, 5)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    expected = np.broadcast_to(np.asarray(mask).reshape(aligned), (2, 1, 1, 5))
    np.testing.assert_array_equal(got, expected[:, 0, 0])


@pytest.mark.parametrize("shape", [(3, 1, 5), (3, 3, 5)])
def test_three_axes_may_be_of_batch_or_heads(shape: tuple[int, ...]) -> None:
    """Here B = N = 3, so that one reading would be taken for the other."""
    with pytest.raises(ValueError, match=r"^mask: .* to \[B, N, T, S\]"):
        masking.pair_mask(jnp.ones(shape, bool), 3, 3, 3, 5)


def test_no_mask_is_no_mask() -> None:
    assert masking.padding_mask(None, 2, 5) is None
    assert masking.pair_mask(None, 2, 3, 4, 5) is None


@pytest.mark.parametrize("hidden", [-np.inf, -1e9, np.nan, 2.0])
@pytest.mark.parametrize("read", ["padding", "pairs"])
def test_additive_masks_are_refused(read: str, hidden: float) -> None:
    mask = np.where(PADDING, np.float32(0 if hidden < 0 else 1), np.float32(hidden))
    with pytest.raises(ValueError, match="mask: expected a boolean mask, or one of 0"):
        if read == "padding":
            masking.padding_mask(mask, 2, 5)
        else:
            masking.pair_mask(mask, 2, 3, 4, 5)
