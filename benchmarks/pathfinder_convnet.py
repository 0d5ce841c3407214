"""Trains a small convolutional network on Pathfinder with 32 pixels a side.

    python benchmarks/pathfinder_convnet.py --out=results/pathfinder_convnet.json
    python benchmarks/pathfinder_convnet.py --norm=layer --stages=short:300 \
      --out=results/pathfinder_convnet_layer.json

It shows that the labels of our images can be learned from the pixels. If every pixel is
normalised alone (`--norm=layer`), they are not learned in the same number of steps.
Contours get longer from stage to stage (`--stages`, level:steps). Each stage has its
own images, and reports its accuracy on images that no stage trains on.

Images are transposed at random but not mirrored: markers are a fraction of a pixel to
the upper left of the points they mark, which a mirror image would reverse.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import origin, write
from flax import nnx

from lra_jax.data import pathfinder_shapes
from lra_jax.data.pathfinder_images import Images, iterate
from lra_jax.errors import expected, known
from lra_jax.models.instance_norm import InstanceNorm

TEST_SEED = 1_000
TEST_BATCH = 500


class OverPixels(nnx.Module):
    """`InstanceNorm` of images `[n, rows, columns, width]`."""

    def __init__(self, width: int):
        self.norm = InstanceNorm(width)

    def __call__(self, images: jax.Array) -> jax.Array:
        pixels = images.reshape(len(images), -1, images.shape[-1])
        return self.norm(pixels).reshape(images.shape)


NORMS: dict[str, Callable[..., nnx.Module]] = {
    "batch": lambda width, rngs: nnx.BatchNorm(width, rngs=rngs),
    "layer": lambda width, rngs: nnx.LayerNorm(width, rngs=rngs),
    "instance": lambda width, rngs: OverPixels(width),
}
"""Each column over all pixels of the batch; each pixel alone; each column over the
pixels of each image."""


class Block(nnx.Module):
    """Two 3 x 3 convolutions with a skip connection."""

    def __init__(self, width: int, norm: str, rngs: nnx.Rngs):
        conv = {"kernel_size": (3, 3), "use_bias": False, "rngs": rngs}
        self.convs = nnx.List([nnx.Conv(width, width, **conv) for _ in range(2)])
        self.norms = nnx.List([NORMS[norm](width, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = nnx.relu(self.norms[0](self.convs[0](x)))
        return nnx.relu(x + self.norms[1](self.convs[1](inner)))


class ConvNet(nnx.Module):
    """Pixels `uint8 [n, 32, 32]` to two logits; ``width`` channels on 16 x 16."""

    def __init__(self, width: int, norm: str, rngs: nnx.Rngs):
        sizes = (1, 16, width, 2 * width)
        stem = zip(sizes, sizes[1:], (5, 3, 3), (1, 2, 2), strict=False)
        self.stem = nnx.List(
            [nnx.Conv(a, b, (k, k), strides=(s, s), rngs=rngs) for a, b, k, s in stem]
        )
        self.norms = nnx.List([NORMS[norm](b, rngs=rngs) for b in sizes[1:]])
        self.wide = nnx.List([Block(width, norm, rngs) for _ in range(2)])
        self.deep = nnx.List([Block(2 * width, norm, rngs) for _ in range(2)])
        self.hidden = nnx.Linear(64 * 2 * width, 64, rngs=rngs)
        self.logits = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, pixels: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(pixels, jnp.float32)[..., None] / 128
        parts = ((), self.wide, self.deep)
        for conv, norm, blocks in zip(self.stem, self.norms, parts, strict=True):
            x = nnx.relu(norm(conv(x)))
            for block in blocks:
                x = block(x)
        return self.logits(nnx.relu(self.hidden(x.reshape(len(x), -1))))


@nnx.jit
def train_step(
    model: ConvNet,
    optimizer: nnx.Optimizer,
    pixels: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """One step; returns the batch's mean loss and accuracy."""

    def loss(model: ConvNet) -> tuple[jax.Array, jax.Array]:
        logits = model(pixels)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    (value, right), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    return value, right


def make(
    width: int, norm: str, steps: int, rate: float
) -> tuple[ConvNet, nnx.Optimizer]:
    """The network and its optimiser, AdamW with a cosine."""
    model = ConvNet(width, norm, nnx.Rngs(0))
    warmup = min(100, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, steps)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return model, nnx.Optimizer(model, rule, wrt=nnx.Param)


def draw(level: str, seed: int, count: int) -> Images:
    """Images of 32 pixels a side."""
    settings = pathfinder_shapes.Settings(32, level)
    batches = list(iterate(settings, seed, count, processes=1))
    pixels, labels = zip(*batches, strict=True)
    return Images(np.concatenate(pixels), np.concatenate(labels))


def train(
    model: ConvNet,
    optimizer: nnx.Optimizer,
    images: Images,
    steps: int,
    batch_size: int,
    report: Callable[[str], None] = lambda line: None,
) -> float:
    """Trains for some steps; returns the accuracy over the last 100."""
    model.train()
    rng = np.random.default_rng(0)
    count, right = len(images.labels), []
    epochs = -(-steps * batch_size // count)
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    for step in range(1, steps + 1):
        batch = order[(step - 1) * batch_size : step * batch_size]
        pixels = images.pixels[batch]
        if rng.random() < 0.5:
            pixels = pixels.swapaxes(1, 2)
        labels = images.labels[batch].astype(np.int32)
        loss, accuracy = train_step(model, optimizer, pixels, labels)
        right.append(accuracy)
        if step % 100 == 0:
            mean = float(np.mean(jax.device_get(right[-100:])))
            report(f"step {step}: loss {float(loss):.3f}, accuracy {mean:.3f}")
    return float(np.mean(jax.device_get(right[-100:])))


def score(model: ConvNet, images: Images) -> float:
    """The share of images that are classified correctly."""
    model.eval()
    predict = nnx.jit(lambda model, pixels: model(pixels).argmax(-1))
    right = [
        np.asarray(predict(model, images.pixels[start : start + TEST_BATCH]))
        == images.labels[start : start + TEST_BATCH]
        for start in range(0, len(images.labels), TEST_BATCH)
    ]
    return float(np.concatenate(right).mean())


def parse(stages: str) -> list[tuple[str, int]]:
    """Levels and their steps, from "level:steps,level:steps".

    Raises:
      ValueError: an unknown level, or no positive number of steps.
    """
    parsed = []
    for stage in stages.split(","):
        level, _, steps = stage.partition(":")
        if not steps.isdecimal() or int(steps) == 0:
            raise expected("--stages", "level:steps", f"{stage!r}")
        parsed.append((known("--stages", level, pathfinder_shapes.LEVELS), int(steps)))
    return parsed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--stages", default="short:300,easy:1000,intermediate:800,hard:1800"
    )
    parser.add_argument("--images", type=int, default=20_000, help="of each stage")
    parser.add_argument("--test-images", type=int, default=2_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--norm", choices=NORMS, default="batch")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    try:
        stages = parse(options.stages)
    except ValueError as error:
        parser.error(str(error))
    steps = sum(count for _, count in stages)
    model, optimizer = make(options.width, options.norm, steps, options.rate)
    begin, rows = time.perf_counter(), []
    for seed, (level, count) in enumerate(stages):
        images = draw(level, seed, options.images)
        reached = train(model, optimizer, images, count, options.batch_size, print)
        test = score(model, draw(level, TEST_SEED, options.test_images))
        rows.append({"level": level, "steps": count})
        rows[-1] |= {"training_accuracy": 100 * reached, "test_accuracy": 100 * test}
        print(rows[-1], flush=True)
    result: dict[str, Any] = {
        **origin("pillow"),
        "norm": options.norm,
        "images_of_each_stage": options.images,
        "test_images": options.test_images,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "seconds": round(time.perf_counter() - begin),
        "stages": rows,
    }
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()
