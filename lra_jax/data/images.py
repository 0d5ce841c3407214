"""Images with a class each, all of one size, grey or in colour.

Pixels are uint8 and come row by row: `[rows * columns]` in grey, as in the digits, and
`[rows * columns, 3]` in colour, as in CIFAR-10 and in all folders of images.
"""

import gzip
import io
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lra_jax.data import checks, image
from lra_jax.data.dataset import (
    SPLITS,
    SequenceDataset,
    Source,
    fingerprint,
    of_arrays,
)
from lra_jax.data.image_folders import PictureSource, find_pictures
from lra_jax.data.labels import named
from lra_jax.data.memory import hold_out
from lra_jax.files import read_bytes

MOST_BYTES = 2 << 30
"""Folders with more bytes of pixels are read picture by picture, while training."""

_DIGITS = "scikit-learn/digits"


class Images(NamedTuple):
    """Images of one split.

    Attributes:
      pixels: random access to them.
      labels: `[n]`, integers.
      fingerprint: of the pixels.
    """

    pixels: Source
    labels: np.ndarray
    fingerprint: str


class ImageDataset(SequenceDataset):
    """Images in memory or in files, with the interface of a dataset.

    Args:
      name: name of the dataset.
      splits: train, valid and test.
      shape: `(rows, columns)`, or `(rows, columns, 3)` in colour.
      classes: the word of each label.
    """

    def __init__(
        self,
        name: str,
        splits: Mapping[str, Images],
        shape: tuple[int, ...],
        classes: list[str],
    ):
        self.name, self.vocab_size = name, 256
        rows, columns, *colours = shape
        self.image_shape, self.token_shape = (rows, columns), tuple(colours)
        self.max_length = rows * columns
        self.num_classes, self.classes = len(classes), named(classes)
        self._sources = {split: splits[split].pixels for split in SPLITS}
        self._labels = {x: splits[x].labels.astype(np.int32) for x in SPLITS}
        self._lengths = {
            split: np.full(len(labels), self.max_length, np.int32)
            for split, labels in self._labels.items()
        }
        self.raw = {"kind": "pixels", "shape": list(shape)}
        parts: list[str | np.ndarray] = []
        for split in SPLITS:
            parts += [f"{split} {splits[split].fingerprint}", self._labels[split]]
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
        Long-Range Arena.

    Raises:
      ValueError: there are no such files, or they are malformed.
      OSError: a file cannot be read.
    """
    if path is None:
        return _digits(size, seed)
    place = checks.existing(path)
    if image.is_cifar(place):
        splits = {
            split: in_memory(_resize(pixels, size), labels)
            for split, (pixels, labels) in image.read_colour(place).items()
        }
        return ImageDataset("cifar10", splits, (size, size, 3), [*image.CLASSES])
    return _folder(place, size, seed)


def in_memory(pixels: np.ndarray, labels: np.ndarray) -> Images:
    """Images `uint8 [n, rows, columns]` or `[n, rows, columns, 3]` as a split."""
    count, rows, columns, *colours = pixels.shape
    flat = np.ascontiguousarray(pixels.reshape(count, rows * columns, *colours))
    source = of_arrays(flat, np.full(count, rows * columns))
    return Images(source, labels, fingerprint(flat))


def _folder(place: pathlib.Path, side: int, seed: int) -> ImageDataset:
    """The images of a folder, in memory if they fit."""
    found, classes = find_pictures(place)
    _hold_out(found, seed)
    in_all = sum(len(labels) for _, labels in found.values()) * side**2 * 3
    splits = {}
    for split, (files, labels) in found.items():
        source = PictureSource(files.tolist(), side)
        if in_all <= MOST_BYTES:
            rows = source.__getitems__(list(range(len(files))))
            pixels = np.stack([row["tokens"] for row in rows])
            splits[split] = in_memory(pixels.reshape(-1, side, side, 3), labels)
        else:
            splits[split] = Images(source, labels, checks.digest(files))
    return ImageDataset(place.name, splits, (side, side, 3), classes)


def _hold_out(found: dict[str, tuple[np.ndarray, np.ndarray]], seed: int) -> None:
    """Makes the splits that are missing, of the training images and their labels."""
    for split, its_seed in (("test", 0), ("valid", seed)):
        if split not in found:
            images, labels = found["train"]
            held = hold_out(labels, its_seed, split)
            found[split] = images[held], labels[held]
            found["train"] = images[~held], labels[~held]


def _digits(side: int, seed: int) -> ImageDataset:
    """The digits of scikit-learn, which is not imported: 1,797 of 8 x 8 pixels.

    A fifth of each class, always the same, is the test split.

    Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI
    Machine Learning Repository, its test set.
    """
    needed = "images of your own, or `pip install lra_jax[images]` for the digits"
    parts = "datasets", "data", "digits.csv.gz"
    file = checks.find_installed("sklearn", *parts, needed=needed)
    text = gzip.decompress(read_bytes(file)).decode()
    table = np.loadtxt(io.StringIO(text), delimiter=",")
    # Ink from 0 to 16.
    pixels = np.rint(table[:, :-1] * 255 / 16).astype(np.uint8).reshape(-1, 8, 8)
    found = {"train": (_resize(pixels, side), table[:, -1].astype(np.int32))}
    _hold_out(found, seed)
    splits = {split: in_memory(*images) for split, images in found.items()}
    return ImageDataset(_DIGITS, splits, (side, side), [str(x) for x in range(10)])


def _resize(pixels: np.ndarray, side: int) -> np.ndarray:
    """Images `[n, rows, columns, ...]`, scaled to this many rows and columns."""
    if pixels.shape[1:3] == (side, side):
        return pixels
    from PIL import Image

    scaled = (Image.fromarray(one).resize((side, side)) for one in pixels)
    return np.stack([np.asarray(one) for one in scaled])
