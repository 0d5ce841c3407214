"""The labels of Pathfinder's images can be learned from their pixels."""

from collections.abc import Iterator

import jax
import pathfinder_convnet as script
import pytest


@pytest.fixture
def fast_programs() -> Iterator[None]:
    """Optimised machine code: here programs run for longer than they compile."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_programs")
def test_a_small_network_learns_short_contours() -> None:
    """The whole way to the hard level: python benchmarks/pathfinder_convnet.py."""
    images = script.draw("short", 0, 8_000)
    # The fixture's parts are Flax's and Optax's, which mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        model, optimizer = script.make(8, "instance", 160, 2e-3)
        script.train(model, optimizer, images, 160, 64)
    assert script.score(model, script.draw("short", script.TEST_SEED, 500)) > 0.75


@pytest.mark.parametrize("stages", ["easy", "easy:0", "easy:x", "simple:10"])
def test_bad_stages(stages: str) -> None:
    with pytest.raises(ValueError, match=r"^--stages: expected"):
        script.parse(stages)
