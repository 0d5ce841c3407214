"""Images with a class each, all of one size, grey or in colour.

Pixels are uint8 and come row by row: `[rows * columns]` in grey, as in the digits, and
`[rows * columns, 3]` in colour, as in CIFAR-10 and in all folders of images::

    FOLDER/train/CLASS/NAME.png      FOLDER/CLASS/NAME.jpg
    FOLDER/valid/CLASS/NAME.png
    FOLDER/test/CLASS/NAME.png

``val`` is another name for ``valid``, and either may be missing, as may ``test``. Files
with other endings than .png, .jpg and .jpeg are left out.
"""

import os
import pathlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lra_jax.data import checks, image
from lra_jax.data.dataset import (
    SPLITS,
    SequenceDataset,
    Source,
    fingerprint,
    of_arrays,
)
from lra_jax.data.labels import class_words
from lra_jax.data.memory import hold_out
from lra_jax.errors import expected, reason
from lra_jax.files import open_regular

MOST_BYTES = 2 << 30
"""Folders with more bytes of pixels are read picture by picture, while training."""

_ENDINGS = (".png", ".jpg", ".jpeg")
_SPLITS = {"train": "train", "valid": "valid", "val": "valid", "test": "test"}

Labelled = tuple[np.ndarray, np.ndarray]
"""Images, or their files, and the label of each, integers `[n]`."""


class PictureSource(Source):
    """Pictures that are read from their files when they are needed, and scaled to
    ``side`` rows and columns."""

    def __init__(self, files: list[pathlib.Path], side: int):
        self._files, self._side = files, side

    @property
    def identity(self) -> str:
        """Differs from that of other files, and of these after a change."""
        return checks.digest(self._files)

    def read_all(self) -> np.ndarray:
        """The pixels of all pictures, uint8 `[n, side * side, 3]`."""
        rows = self.__getitems__(list(range(len(self))))
        return np.stack([row["tokens"] for row in rows])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        pixels = read_picture(self._files[index], self._side)
        return {"tokens": pixels.reshape(-1, 3)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.ndarray]]:
        with ThreadPoolExecutor() as threads:  # Pillow decodes outside Python's lock.
            return [*threads.map(self.__getitem__, indices)]


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
        self.num_classes, self.classes = len(classes), class_words(classes)
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
    """Reads images; for the settings, see `lra_jax.configs.images.ImagesData`, and for
    errors `read_picture` and `lra_jax.data.image.prepare`.

    A fifth of each class is held out for validation, chosen by the seed, unless the
    files have a validation split; of CIFAR-10 the last tenth, as in the Long-Range
    Arena. Without a test split, another fifth serves as one, the same for every seed.
    """
    if path is None:
        pixels, labels = _digits()
        splits = _hold_out({"train": (_resize(pixels, size), labels)}, seed)
        classes = [str(digit) for digit in range(10)]
        return ImageDataset("scikit-learn/digits", splits, (size, size), classes)
    place, shape = checks.existing_path(path), (size, size, 3)
    if image.is_cifar(place):
        splits = image.read_colour(place)
        splits = {x: (_resize(pixels, size), y) for x, (pixels, y) in splits.items()}
        return ImageDataset("cifar10", splits, shape, [*image.CLASSES])
    split_files, classes = _find_pictures(place)
    count = sum(len(labels) for _, labels in split_files.values())
    splits = {}
    for split, (files, labels) in _hold_out(split_files, seed).items():
        pictures = PictureSource(files.tolist(), size)
        fits = count * size**2 * 3 <= MOST_BYTES
        splits[split] = pictures.read_all() if fits else pictures, labels
    return ImageDataset(place.name, splits, shape, classes)


def _find_pictures(place: pathlib.Path) -> tuple[dict[str, Labelled], list[str]]:
    """The files of each split that a folder has, train at least, and its classes."""
    parts = {_SPLITS[x.name]: x for x in _folders(place) if x.name in _SPLITS}
    if "train" not in parts:
        parts = {"train": place}
    classes = [folder.name for folder in _folders(parts["train"])]
    if len(classes) < 2:
        needed = "a folder for each of two classes or more"
        raise expected(str(parts["train"]), needed, ", ".join(classes) or "none")
    split_files = {}
    for split, part in parts.items():
        files, labels = [], []
        for folder in _folders(part):
            if folder.name not in classes:
                needed = "a class of the training split"
                raise expected(str(folder), needed, folder.name)
            inside = [x for x in folder.iterdir() if x.suffix.lower() in _ENDINGS]
            if not inside:
                needed = f"pictures ending in {', '.join(_ENDINGS)}"
                raise expected(str(folder), needed, "none")
            files += sorted(inside)
            labels += [classes.index(folder.name)] * len(inside)
        split_files[split] = np.array(files, object), np.array(labels, np.int32)
    return split_files, classes


def _folders(place: pathlib.Path) -> list[pathlib.Path]:
    if not place.is_dir():
        raise expected("--data.path", "a folder of images, or CIFAR-10", place)
    inside = (x for x in place.iterdir() if x.is_dir() and not x.name.startswith("."))
    return sorted(inside)


def read_picture(file: pathlib.Path, side: int) -> np.ndarray:
    """A picture `uint8 [side, side, 3]`: the largest square in its middle, scaled.

    Raises:
      ValueError: it is neither PNG nor JPEG, or is damaged.
      OSError: it cannot be read.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    with open_regular(file) as stream:
        try:
            with Image.open(stream, formats=("PNG", "JPEG")) as opened:
                deep = opened.mode.startswith("I")
                opened.draft("RGB", (side, side))  # A JPEG is decoded no larger.
                square = ImageOps.fit(opened.convert("RGB"), (side, side))
        except Exception as error:  # Damaged files raise whatever their parser meets.
            is_other = isinstance(error, UnidentifiedImageError)
            got = "another kind of file" if is_other else reason(error)
            raise expected(str(file), "a PNG or JPEG image", got) from error
    if deep:  # Pillow would show nearly all of it as white.
        raise expected(str(file), "a PNG image of 8 bits a pixel", "16 bits a pixel")
    return np.asarray(square)


def _hold_out(splits: dict[str, Labelled], seed: int) -> dict[str, Labelled]:
    """Adds the splits that are missing, of the training images and their labels."""
    for split, its_seed in (("test", 0), ("valid", seed)):
        if split not in splits:
            images, labels = splits["train"]
            held = hold_out(labels, its_seed, split)
            others = {"train": (images[~held], labels[~held])}
            splits = splits | others | {split: (images[held], labels[held])}
    return splits


def _digits() -> Labelled:
    """The digits of scikit-learn, which is not imported: 1,797 of 8 x 8 pixels.

    Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI
    Machine Learning Repository, its test set.
    """
    needed = "images of your own, or `pip install lra_jax[images]` for the digits"
    parts = "datasets", "data", "digits.csv.gz"
    file = checks.find_installed("sklearn", *parts, needed=needed)
    table = np.loadtxt(file, delimiter=",")
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
