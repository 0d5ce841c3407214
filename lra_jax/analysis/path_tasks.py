"""Data of the path experiments (Dong, Cordonnier and Loukas 2021, section 4.2): each
a function of a seed, with a label for every token."""

from typing import NamedTuple

import numpy as np


class TokenTask(NamedTuple):
    """Sequences with a label for each token.

    Attributes:
      inputs: token ids `int32 [n, T]`, or points `float32 [n, T, 2]`.
      labels: `int32 [n, T]`; -1 where a token is padding.
    """

    inputs: np.ndarray
    labels: np.ndarray

    @property
    def majority(self) -> float:
        """Accuracy of always answering with the most frequent label."""
        labels = self.labels[self.labels >= 0]
        return float(np.bincount(labels).max() / len(labels))


def sorting(count: int, seed: int) -> TokenTask:
    """Eight digits, repeats allowed; the labels are the same digits in order."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(10, size=(count, 8), dtype=np.int32)
    return TokenTask(inputs, np.sort(inputs, 1))


def convex_hull(count: int, seed: int) -> TokenTask:
    """Ten points, uniform in a square of side 10 that is itself shifted by N(0, 3.3);
    the label says whether a point is a vertex of their convex hull."""
    from scipy.spatial import ConvexHull

    rng = np.random.default_rng(seed)
    points = rng.uniform(0, 10, (count, 10, 2))
    points += rng.normal(0, 3.3, (count, 1, 2))
    labels = np.zeros((count, 10), np.int32)
    for label, sample in zip(labels, points, strict=True):
        label[ConvexHull(sample).vertices] = 1
    return TokenTask(points.astype(np.float32), labels)


def memorisation(count: int, seed: int, longest: int, vocab_size: int) -> TokenTask:
    """Random texts with a random bit for each token.

    Deviation: the paper uses sentence pairs from RTE. Here words are drawn by Zipf's
    law, and lengths uniformly between a quarter of the longest and the longest.
    """
    rng = np.random.default_rng(seed)
    size = (count, longest)
    inputs = draw_words(vocab_size, size, rng)
    lengths = rng.integers(max(longest // 4, 1), longest + 1, count)
    labels = rng.integers(2, size=size, dtype=np.int32)
    real = np.arange(longest) < lengths[:, None]
    return TokenTask(np.where(real, inputs, 0), np.where(real, labels, -1))


def draw_words(
    vocab_size: int, size: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Random ids, int32, as frequent as words are.

    The r-th most frequent has probability proportional to ``1 / (r + 2.7)`` (Zipf's law
    with Mandelbrot's shift).
    """
    shares = 1 / (np.arange(vocab_size) + 2.7)
    return rng.choice(vocab_size, size, p=shares / shares.sum()).astype(np.int32)


def circle(count: int) -> np.ndarray:
    """Points in order around a circle of radius 0.3, `float32 [count, 2]`."""
    angles = np.arange(count) * (2 * np.pi / count)
    return (0.3 * np.stack([np.cos(angles), np.sin(angles)], 1)).astype(np.float32)
