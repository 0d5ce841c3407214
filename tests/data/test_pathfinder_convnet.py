"""The labels of Pathfinder's images can be learned from their pixels."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra_jax.data import pathfinder_shapes
from lra_jax.data.pathfinder_images import Images, iterate
from lra_jax.models.instance_norm import InstanceNorm

STEPS, BATCH, WIDTH = 160, 64, 8


@pytest.fixture
def fast_programs() -> Iterator[None]:
    """Optimised machine code: here programs run for longer than they compile."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def normalise(norm: InstanceNorm, images: jax.Array) -> jax.Array:
    """Each column over all pixels of an image `[n, rows, columns, width]`."""
    pixels = images.reshape(len(images), -1, images.shape[-1])
    return norm(pixels).reshape(images.shape)


class Block(nnx.Module):
    """Two 3 x 3 convolutions with a skip connection."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        shape = {"kernel_size": (3, 3), "use_bias": False, "rngs": rngs}
        self.convs = nnx.List([nnx.Conv(width, width, **shape) for _ in range(2)])
        self.norms = nnx.List([InstanceNorm(width) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = nnx.relu(normalise(self.norms[0], self.convs[0](x)))
        return nnx.relu(x + normalise(self.norms[1], self.convs[1](inner)))


class ConvNet(nnx.Module):
    """Pixels `uint8 [n, 32, 32]` to two logits; `WIDTH` channels on 16 x 16."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = (1, 16, WIDTH, 2 * WIDTH)
        stem = zip(sizes, sizes[1:], (5, 3, 3), (1, 2, 2), strict=False)
        self.stem = nnx.List(
            [nnx.Conv(a, b, (k, k), strides=(s, s), rngs=rngs) for a, b, k, s in stem]
        )
        self.norms = nnx.List([InstanceNorm(width) for width in sizes[1:]])
        self.wide = nnx.List([Block(WIDTH, rngs) for _ in range(2)])
        self.deep = nnx.List([Block(2 * WIDTH, rngs) for _ in range(2)])
        self.hidden = nnx.Linear(64 * 2 * WIDTH, 64, rngs=rngs)
        self.logits = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = jnp.asarray(pixels, jnp.float32)[..., None] / 128
        parts = ((), self.wide, self.deep)
        for conv, norm, blocks in zip(self.stem, self.norms, parts, strict=True):
            x = nnx.relu(normalise(norm, conv(x)))
            for block in blocks:
                x = block(x)
        return self.logits(nnx.relu(self.hidden(x.reshape(len(x), -1))))


@nnx.jit
def train_step(
    model: ConvNet, optimizer: nnx.Optimizer, pixels: jax.Array, labels: jax.Array
) -> None:
    def loss(model: ConvNet) -> jax.Array:
        logits = model(pixels)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def draw(seed: int, count: int) -> Images:
    """Images of 32 pixels a side with the shortest contours."""
    settings = pathfinder_shapes.Settings(32, "short")
    pixels, labels = zip(*iterate(settings, seed, count, processes=1), strict=True)
    return Images(np.concatenate(pixels), np.concatenate(labels).astype(np.int32))


@pytest.mark.slow
@pytest.mark.usefixtures("fast_programs")
def test_a_small_network_learns_short_contours() -> None:
    """Images are transposed at random but not mirrored: markers are a fraction of a
    pixel to the upper left of the points they mark."""
    images, rng = draw(0, 8_000), np.random.default_rng(0)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, STEPS // 2, STEPS)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    # These parts are Flax's and Optax's, which mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        model = ConvNet(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)
        for _ in range(STEPS):
            batch = rng.choice(len(images.labels), BATCH, replace=False)
            pixels = images.pixels[batch]
            pixels = pixels.swapaxes(1, 2) if rng.random() < 0.5 else pixels
            train_step(model, optimizer, pixels, images.labels[batch])
        test = draw(1_000, 500)
        answers = nnx.jit(lambda model, pixels: model(pixels).argmax(-1))(
            model, test.pixels
        )
    assert (np.asarray(answers) == test.labels).mean() > 0.75
