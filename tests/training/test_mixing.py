"""Mixtures of images: mixup and cutmix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.tasks.base import classification_loss
from lra_jax.training.mixing import mix_batches

ROWS = 6


class Model:
    """Keeps the images; the logits are their first pixels."""

    INPUTS = ("tokens",)

    def __call__(self, tokens, rngs=None):
        self.tokens = np.asarray(tokens)
        return tokens[:, :3].reshape(len(tokens), -1)[:, :3].astype(jnp.float32) / 255


def batch(*more: int) -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(0), (ROWS, 80, *more), 0, 256)
    labels = jnp.array([0, 1, 2, 0, 1, 1])
    return {"tokens": tokens.astype(jnp.uint8), "labels": labels}


def mix(arrays, mixup, cutmix, seed) -> tuple[np.ndarray, dict[str, Any]]:
    """The mixed images, and the sums of their loss."""
    model: Any = Model()
    loss = mix_batches(classification_loss, (8, 10), mixup, cutmix)
    sums = loss(model, arrays, nnx.Rngs(dropout=seed))
    return model.tokens, sums


def losses(tokens: np.ndarray, labels: Any) -> float:
    logits = tokens[:, :3].reshape(ROWS, -1)[:, :3] / 255
    of_labels = np.exp(logits)[np.arange(ROWS), np.asarray(labels)]
    return -np.log(of_labels / np.exp(logits).sum(1)).sum()


@pytest.mark.parametrize("colours", [(), (3,)])
def test_mixup(colours):
    arrays = batch(*colours)
    first = np.asarray(arrays["tokens"], float)
    mixed, sums = mix(arrays, 0.8, 0.0, 0)
    apart = first - first[::-1]
    share = np.median((mixed - first[::-1])[apart != 0] / apart[apart != 0])
    expected = share * first + (1 - share) * first[::-1]
    assert mixed.dtype == np.uint8 and 0.05 < share < 0.95
    np.testing.assert_allclose(mixed, expected, atol=3)
    labels = arrays["labels"]
    loss = share * losses(mixed, labels) + (1 - share) * losses(mixed, labels[::-1])
    np.testing.assert_allclose(sums["loss"], loss, rtol=1e-2)
    assert float(sums["count"]) == ROWS


@pytest.mark.parametrize("colours", [(), (3,)])
def test_cutmix(colours):
    arrays = batch(*colours)
    first = np.asarray(arrays["tokens"])
    for seed in range(4):
        mixed, sums = mix(arrays, 0.0, 1.0, seed)
        same = (mixed == first).reshape(ROWS, 80, -1).all(2)
        other = (mixed == first[::-1]).reshape(ROWS, 80, -1).all(2)
        assert (same | other).all()
        cut = (~same).any(0).reshape(8, 10)  # One rectangle for all images.
        np.testing.assert_array_equal(cut, np.outer(cut.any(1), cut.any(0)))
        labels, share = arrays["labels"], 1 - cut.mean()
        loss = share * losses(mixed, labels) + (1 - share) * losses(mixed, labels[::-1])
        np.testing.assert_allclose(sums["loss"], loss, rtol=1e-5)


def test_with_both_each_has_its_turn():
    arrays = batch()
    first = np.asarray(arrays["tokens"])
    blended = []
    for seed in range(8):
        mixed, _ = mix(arrays, 0.8, 1.0, seed)
        blended.append(bool(((mixed != first) & (mixed != first[::-1])).any()))
    assert True in blended and False in blended
