"""Masks in all their shapes, and feature maps given as functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.attention import feature_maps, inputs

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


def test_feature_maps_may_be_functions() -> None:
    assert feature_maps.feature_map(np.tanh) is np.tanh


def test_gradients_at_the_bounds_pass() -> None:
    # Where torch's clamp and relu are at their bound, so that trained models agree.
    def slope(function, at: float) -> float:
        return float(jax.grad(function)(jnp.float32(at)))

    assert slope(lambda x: feature_maps.clamp(x, 1.0), 1.0) == 1
    assert slope(lambda x: feature_maps.clamp(x, 1.0), -1.0) == 1
    assert slope(lambda x: feature_maps.clamp(x, 1.0), 1.5) == 0
    assert slope(lambda x: feature_maps.at_least(x, 0.5), 0.5) == 1
    assert slope(lambda x: feature_maps.at_least(x, 0.5), 0.4) == 0
    assert slope(feature_maps.feature_map("relu"), 0.0) == 0


def test_the_largest_logit_keeps_its_gradient() -> None:
    logits = jnp.float32([1e7, 1e7 - 8, 0])
    value = jnp.float32([3, 1, 5])
    shares = np.array([1, np.exp(-8), 0]) / (1 + np.exp(-8))
    slope = jax.grad(lambda x: feature_maps.softmax(x, 0) @ value)(logits)
    np.testing.assert_allclose(slope, shares * (value - shares @ value), 1e-4)
    matrix = feature_maps.below(logits[None, :], logits[:2, None])
    assert matrix[0, 0] == 0 and matrix.shape == (2, 3)
    slope = jax.grad(lambda x: feature_maps.below(x[None], logits[:2, None]).sum())
    np.testing.assert_array_equal(slope(logits), [2, 2, 2])


@pytest.mark.parametrize("hidden", [-np.inf, -1e9, np.nan, 2.0])
@pytest.mark.parametrize("read", ["padding", "pairs"])
def test_additive_masks_are_refused(read: str, hidden: float) -> None:
    mask = np.where(PADDING, np.float32(0 if hidden < 0 else 1), np.float32(hidden))
    with pytest.raises(ValueError, match="mask: expected a boolean mask, or one of 0"):
        if read == "padding":
            inputs.padding_mask(mask, 2, 5)
        else:
            inputs.pair_mask(mask, 2, 3, 4, 5)
