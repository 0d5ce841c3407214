"""The labels of Pathfinder's images can be learned from their pixels."""

import jax
import pathfinder_convnet as script
import pytest


@pytest.mark.slow
def test_a_small_network_learns_short_contours() -> None:
    """The whole way to the hard level: python benchmarks/pathfinder_convnet.py."""
    images = script.draw("short", 0, 6_000)
    # The fixture's parts are Flax's and Optax's, which mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        model, optimizer = script.make(16, "instance", 150, 3e-3)
        script.train(model, optimizer, images, 150, 64)
    assert script.score(model, script.draw("short", script.TEST_SEED, 500)) > 0.8


def test_a_network_with_batch_norm_fits_a_few_images() -> None:
    images = script.draw("short", 0, 16)
    with jax.numpy_dtype_promotion("standard"):
        model, optimizer = script.make(16, "batch", 60, 1e-2)
        reached = script.train(model, optimizer, images, 60, 16)
    assert reached > 0.9


@pytest.mark.parametrize("stages", ["easy", "easy:0", "easy:x", "simple:10"])
def test_bad_stages(stages: str) -> None:
    with pytest.raises(ValueError, match=r"^--stages: expected"):
        script.parse(stages)
