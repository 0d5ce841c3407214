"""Images with a class each, all of one size, grey or in colour.

Pixels are uint8 and come row by row: `[rows * columns]` in grey, as in the digits, and
`[rows * columns, 3]` in colour, as in CIFAR-10 and in all folders of images.
"""

import gzip
import io
import os
from collections.abc import Mapping

import numpy as np

from lra_jax.data import checks, image
from lra_jax.data.dataset import SPLITS, SequenceDataset, fingerprint, of_arrays
from lra_jax.data.image_folders import PictureSource, find_pictures
from lra_jax.data.labels import named
from lra_jax.data.memory import hold_out
from lra_jax.files import read_bytes

MOST_BYTES = 2 << 30
"""Folders with more bytes of pixels are read picture by picture, while training."""


class ImageDataset(SequenceDataset):
    """Images in memory or in files, with the interface of a dataset.

    Args:
      name: name of the dataset.
      splits: train, valid and test: the images, uint8 `[n, *shape]` or a source that
        reads them from files, and their labels, integers `[n]`.
      shape: `(rows, columns)`, or `(rows, columns, 3)` in colour.
      classes: the word of each label.
    """

    def __init__(
        self,
        name: str,
        splits: Mapping[str, tuple[np.ndarray | PictureSource, np.ndarray]],
        shape: tuple[int, ...],
        classes: list[str],
    ):
        self.name, self.vocab_size = name, 256
        rows, columns, *colours = shape
        self.image_shape, self.token_shape = (rows, columns), tuple(colours)
        self.max_length = rows * columns
        self.num_classes, self.classes = len(classes), named(classes)
        self.raw = {"kind": "pixels", "shape": list(shape)}
        self._sources, self._labels, self._lengths = {}, {}, {}
        parts: list[str | np.ndarray] = []
        for split in SPLITS:
            images, labels = splits[split]
            self._labels[split] = labels.astype(np.int32)
            self._lengths[split] = np.full(len(labels), self.max_length, np.int32)
            if isinstance(images, PictureSource):
                self._sources[split], identity = images, images.identity
            else:
                flat = images.reshape(len(images), -1, *colours)
                self._sources[split] = of_arrays(flat, self._lengths[split])
                identity = fingerprint(flat)
            parts += [f"{split} {identity}", self._labels[split]]
        self.fingerprint = fingerprint(*parts)


def prepare(
    *, path: str | os.PathLike[str] | None, size: int, seed: int
) -> ImageDataset:
    """Reads images.

    Args:
      path: a folder with a folder for each class, see `image_folders`; CIFAR-10's
        archive or its folder, see `lra_jax.data.image`; None = scikit-learn's digits.
      size: rows and columns to which images are scaled.
      seed: chooses the examples held out for validation: a fifth of each class, unless
        the files have a validation split; of CIFAR-10 the last tenth, as in the
        Long-Range Arena. Without a test split another fifth, always the same, is that.

    Raises:
      ValueError: there are no such files, or they are malformed.
      OSError: a file cannot be read.
    """
    if path is None:
        pixels, labels = _digits()
        splits = _hold_out({"train": (_resize(pixels, size), labels)}, seed)
        classes = [str(digit) for digit in range(10)]
        return ImageDataset("scikit-learn/digits", splits, (size, size), classes)
    place, shape = checks.existing(path), (size, size, 3)
    if image.is_cifar(place):
        splits = image.read_colour(place)
        splits = {x: (_resize(pixels, size), y) for x, (pixels, y) in splits.items()}
        return ImageDataset("cifar10", splits, shape, [*image.CLASSES])
    found, classes = find_pictures(place)
    count = sum(len(labels) for _, labels in found.values())
    splits = {}
    for split, (files, labels) in _hold_out(found, seed).items():
        pictures = PictureSource(files.tolist(), size)
        fits = count * size**2 * 3 <= MOST_BYTES
        splits[split] = pictures.read_all() if fits else pictures, labels
    return ImageDataset(place.name, splits, shape, classes)


def _hold_out(
    splits: dict[str, tuple[np.ndarray, np.ndarray]], seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Adds the splits that are missing, of the training images and their labels."""
    for split, its_seed in (("test", 0), ("valid", seed)):
        if split not in splits:
            images, labels = splits["train"]
            held = hold_out(labels, its_seed, split)
            others = {"train": (images[~held], labels[~held])}
            splits = splits | others | {split: (images[held], labels[held])}
    return splits


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The digits of scikit-learn, which is not imported: 1,797 of 8 x 8 pixels.

    Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI
    Machine Learning Repository, its test set.
    """
    needed = "images of your own, or `pip install lra_jax[images]` for the digits"
    parts = "datasets", "data", "digits.csv.gz"
    file = checks.find_installed("sklearn", *parts, needed=needed)
    text = gzip.decompress(read_bytes(file)).decode()
    table = np.loadtxt(io.StringIO(text), delimiter=",")
    # Ink from 0 to 16.
    pixels = np.rint(table[:, :-1] * 255 / 16).astype(np.uint8)
    return pixels.reshape(-1, 8, 8), table[:, -1].astype(np.int32)


def _resize(pixels: np.ndarray, side: int) -> np.ndarray:
    """Images `[n, rows, columns, ...]`, scaled to this many rows and columns."""
    if pixels.shape[1:3] == (side, side):
        return pixels
    from PIL import Image

    scaled = (Image.fromarray(one).resize((side, side)) for one in pixels)
    return np.stack([np.asarray(one) for one in scaled])
