"""Mixtures of the images of a batch, with the labels of both.

Each image is mixed with the one at the mirrored place in the batch, with one share s
for all, drawn from a Beta distribution:

  mixup   s x + (1 - s) x', rounded (Zhang et al. 2018, arXiv:1710.09412).
  cutmix  a rectangle of 1 - s of the area is that of x' (Yun et al. 2019,
          arXiv:1905.04899); s is then the share that the image really keeps.

With both, half of the batches have each, as in DeiT (arXiv:2012.12877). The loss is s
times that of the image's label plus 1 - s times that of the other's; the accuracy is
that of its own label.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.tasks.base import Batch, Sums

Pair = tuple[jax.Array, jax.Array]


def mix_batches(loss: Any, grid: tuple[int, int], mixup: float, cutmix: float) -> Any:
    """A task's loss on mixtures of the images of each batch, which has labels `[B]`.

    ``mixup`` and ``cutmix`` are both parameters of the Beta distribution; 0 = not used.
    """
    kinds = [functools.partial(_blend, alpha=mixup)] * (mixup > 0)
    kinds += [functools.partial(_cut, alpha=cutmix, grid=grid)] * (cutmix > 0)

    def mixed_loss(model: Any, batch: Batch, rngs: nnx.Rngs) -> Sums:
        kind, draw = jax.random.split(rngs.dropout())
        tokens, share = kinds[0](batch["tokens"], draw)
        if len(kinds) == 2:
            pairs = zip(kinds[1](batch["tokens"], draw), (tokens, share), strict=True)
            is_cut = jax.random.bernoulli(kind)
            tokens, share = (jnp.where(is_cut, *pair) for pair in pairs)
        mixed = {"tokens": tokens, "other_labels": batch["labels"][::-1]}
        return loss(model, {**batch, **mixed, "share": share}, rngs)

    return mixed_loss


def _blend(tokens: jax.Array, key: jax.Array, alpha: float) -> Pair:
    share = jax.random.beta(key, alpha, alpha)
    pixels = tokens.astype(jnp.float32)
    mixed = share * pixels + (1 - share) * pixels[::-1]
    return jnp.rint(mixed).astype(tokens.dtype), share


def _cut(
    tokens: jax.Array, key: jax.Array, alpha: float, grid: tuple[int, int]
) -> Pair:
    size, middle = jax.random.split(key)
    side = jnp.sqrt(1 - jax.random.beta(size, alpha, alpha))
    rows, columns = (
        # Cut off at the borders of the image.
        jnp.abs((np.arange(length, dtype=np.float32) + 0.5) / length - at) < side / 2
        for length, at in zip(grid, jax.random.uniform(middle, (2,)), strict=True)
    )
    cut = (rows[:, None] & columns[None]).reshape(1, -1)
    mask = cut.reshape(cut.shape + (1,) * (tokens.ndim - 2))
    return jnp.where(mask, tokens[::-1], tokens), 1 - cut.mean(dtype=jnp.float32)
