"""Pictures in folders, PNG and JPEG, one folder for each class.

    FOLDER/train/CLASS/NAME.png      FOLDER/CLASS/NAME.jpg
    FOLDER/valid/CLASS/NAME.png
    FOLDER/test/CLASS/NAME.png

``val`` is another name for ``valid``, and either may be missing, as may ``test``. Files
with other endings than .png, .jpg and .jpeg are left out.
"""

import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lra_jax.data.checks import digest
from lra_jax.data.dataset import Source
from lra_jax.errors import expected, reason
from lra_jax.files import open_regular

ENDINGS = (".png", ".jpg", ".jpeg")
_SPLITS = {"train": "train", "valid": "valid", "val": "valid", "test": "test"}

Pictures = tuple[np.ndarray, np.ndarray]
"""Files `[n]`, and the label of each, `int32 [n]`."""


def find_pictures(place: pathlib.Path) -> tuple[dict[str, Pictures], list[str]]:
    """The pictures of each split that a folder has, train at least, and its classes.

    Raises:
      ValueError: not a folder of folders of pictures; the message names the folder.
    """
    parts = {_SPLITS[x.name]: x for x in _folders(place) if x.name in _SPLITS}
    if "train" not in parts:
        parts = {"train": place}
    classes = [folder.name for folder in _folders(parts["train"])]
    if len(classes) < 2:
        needed = "a folder for each of two classes or more"
        raise expected(str(parts["train"]), needed, ", ".join(classes) or "none")
    return {x: _pictures(folder, classes) for x, folder in parts.items()}, classes


def _folders(place: pathlib.Path) -> list[pathlib.Path]:
    if not place.is_dir():
        raise expected("--data.path", "a folder of images, or CIFAR-10", place)
    inside = (x for x in place.iterdir() if x.is_dir() and not x.name.startswith("."))
    return sorted(inside)


def _pictures(place: pathlib.Path, classes: list[str]) -> Pictures:
    files, labels = [], []
    for folder in _folders(place):
        if folder.name not in classes:
            raise expected(str(folder), "a class of the training split", folder.name)
        inside = [x for x in folder.iterdir() if x.suffix.lower() in ENDINGS]
        if not inside:
            needed = f"pictures ending in {', '.join(ENDINGS)}"
            raise expected(str(folder), needed, "none")
        files += sorted(inside)
        labels += [classes.index(folder.name)] * len(inside)
    return np.array(files, object), np.array(labels, np.int32)


class PictureSource(Source):
    """Pictures that are read from their files when they are needed, and scaled to as
    many rows and columns, see `lra_jax.data.dataset.Source`."""

    def __init__(self, files: list[pathlib.Path], side: int):
        self._files, self._side = files, side

    @property
    def identity(self) -> str:
        """Differs from that of other files, and of these after a change."""
        return digest(self._files)

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
