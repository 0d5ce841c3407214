"""The released Pathfinder images: grey PNGs and their metadata.

A level's folder (`curv_contour_length_14` is the hard one) holds `imgs/<k>/sample_<n>
.png` and, for each `k`, `metadata/<k>.npy`. In LRA's release this is plain text, one
line per image, with the image's folder, its file and its label in columns 0, 1 and 3.
The generator itself (drewlinsley/pathfinder) writes true npy files with the same
columns, which are read as well. One released image, `pathfinder32/curv_baseline/imgs/0/
sample_172.png`, is empty; empty files are left out.
"""

import io
import os
import pathlib
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from lra_jax.data import checks, originals
from lra_jax.errors import expected, known
from lra_jax.files import read_bytes

FOLDERS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
"""The folder of each level."""

_NPY = b"\x93NUMPY"
_PNG = b"\x89PNG\r\n\x1a\n"
_LEAST_COLUMNS = 4
_MOST_METADATA = 64 << 20
# Allowance for the contents of a PNG besides its pixels.
_HEADER_BYTES = 1 << 16
_DAMAGE = (OSError, EOFError, SyntaxError, ValueError, struct.error, zlib.error)
# Of interlaced PNGs: the first row and column of each pass, and the steps between them.
_ADAM7 = (
    *((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4)),
    *((2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)),
)


class Sample(NamedTuple):
    """Attributes: the image's file; its label, 0 or 1."""

    file: pathlib.Path
    label: int


def find(path: str | os.PathLike, size: int, level: str) -> pathlib.Path:
    """Returns the folder of a level, given that folder or one above it.

    Args:
      path: the level's folder, `pathfinder<size>`, or that of the unpacked archive; of
        two releases in each other the inner one is used.
      size: side of the images.
      level: a key of `FOLDERS`.

    Raises:
      ValueError: there is no such folder or level, or the folder is another level's.
    """
    known("level", level, FOLDERS)
    root = checks.existing_path(path)
    if root.name in FOLDERS.values() and root.name != FOLDERS[level]:
        requirement = f"{FOLDERS[level]}, which has the images of level {level}"
        raise expected("--data.path", requirement, root)
    below = pathlib.Path(f"pathfinder{size}") / FOLDERS[level]
    for folder in (root / FOLDERS[level], *originals.in_release(root, below)):
        if (folder / "metadata").is_dir() and (folder / "imgs").is_dir():
            return folder
    got = f"{root}, {'a file; unpack it' if root.is_file() else 'without them'}"
    requirement = f"a folder with metadata/ and imgs/, or with {below}/"
    raise expected("--data.path", requirement, got)


def list_samples(
    folder: pathlib.Path,
) -> tuple[list[Sample], dict[str, list[pathlib.Path]]]:
    """The samples of a level in the order of its metadata, and the rows left out.

    Returns:
      The samples, each image once, and for each reason to leave rows out their files.

    Raises:
      ValueError: a file is missing or malformed, or an image has two labels; the
        message names file and line.
    """
    listed: dict[pathlib.Path, Sample] = {}
    again = []
    for metadata in metadata_files(folder):
        for place, columns in _rows(metadata):
            sample = _parse(folder, place, columns)
            first = listed.setdefault(sample.file, sample)
            if first.label != sample.label:
                raise expected(
                    place, f"the label {first.label}, as before", sample.label
                )
            if first is not sample:
                again.append(sample.file)
    if not listed:
        raise expected(str(folder / "metadata"), "names of images", "none")
    samples = [sample for sample in listed.values() if sample.file.stat().st_size]
    return samples, {
        "images without bytes": [x for x in listed if not x.stat().st_size],
        "second rows of an image": again,
    }


def find_unlisted(
    folder: pathlib.Path, listed: Iterable[pathlib.Path]
) -> list[pathlib.Path]:
    """The images of a level that are not among those listed, in order."""
    return sorted(set((folder / "imgs").rglob("*.png")).difference(listed))


def metadata_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The metadata files of a level, by number.

    Raises:
      ValueError: there are none, or one has no number.
    """
    files = list((folder / "metadata").glob("*.npy"))
    for file in files:
        if not file.stem.isdecimal():
            raise expected(str(file), "a number for its name", repr(file.stem))
    if not files:
        raise expected(str(folder / "metadata"), ".npy files", "none")
    return sorted(files, key=lambda file: int(file.stem))


def read(samples: Iterable[Sample], size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields each image, `uint8 [size * size]` row by row, and its label.

    Raises:
      ValueError: a file is not a PNG, is truncated, or is not grey and of that size.
    """
    for sample in samples:
        yield _pixels(sample.file, size).ravel(), sample.label


def _pixels(file: pathlib.Path, size: int) -> np.ndarray:
    """The pixels of a PNG, after checking in its header that it is grey and fits."""
    requirement = f"a grey PNG of {size} x {size} pixels with 8 bits"
    stored = file.stat().st_size
    if stored > _HEADER_BYTES + 2 * size**2:
        raise expected(str(file), requirement, f"{stored:,} bytes")
    data = read_bytes(file)
    try:
        # Pillow warns about large images.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=["PNG"])
        kind = image.mode, (image.height, image.width)
        if kind == ("L", (size, size)):
            image.verify()
            _check_pixels(data, size)
            return np.asarray(Image.open(io.BytesIO(data), formats=["PNG"]))
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        raise expected(str(file), "a whole PNG", error) from None
    raise expected(str(file), requirement, "{} of shape {}".format(*kind))


def _check_pixels(data: bytes, size: int) -> None:
    """Refuses a PNG without its end, or with too few pixels, as Pillow does not.

    It would fill the others with zeros.
    """
    depth, interlaced = data[24], data[28]
    grid = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    sides = [
        (len(range(row, size, rows)), len(range(column, size, columns)))
        for row, column, rows, columns in grid
    ]
    # Each row of a pass begins with the number of its filter.
    needed = sum(high * (1 + -(-wide * depth // 8)) for high, wide in sides if wide)
    stored, place, kind = b"", len(_PNG), b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"IDAT":
            stored += data[place + 8 : place + 8 + length]
        place += length + 12
    if place > len(data):
        raise EOFError("no last chunk")
    if len(zlib.decompressobj().decompress(stored, needed)) < needed:
        raise EOFError("fewer pixels than rows and columns")


def _rows(file: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the file and line number of each row, and its columns."""
    data = read_bytes(file, _MOST_METADATA)
    try:
        if data.startswith(_NPY):
            rows = _npy_rows(data)
        else:
            rows = [line.split() for line in data.decode("utf-8-sig").splitlines()]
    # The last two come from headers nested too deeply, or of huge tables.
    except (ValueError, TypeError, EOFError, RecursionError, MemoryError) as error:
        raise expected(str(file), "a table of metadata", error) from None
    for number, columns in enumerate(rows, start=1):
        if columns:
            yield f"{file}, line {number}", columns


def _npy_rows(data: bytes) -> list[list[str]]:
    """The rows of an npy file of strings; under Python 2 they were bytes."""
    table = np.load(io.BytesIO(data), allow_pickle=False)
    if table.dtype.kind not in "SU" or table.ndim != 2 or not table.nbytes:
        raise ValueError(f"{table.dtype} of shape {table.shape}")
    return table.astype(str).tolist()


def _parse(folder: pathlib.Path, place: str, columns: list[str]) -> Sample:
    if len(columns) < _LEAST_COLUMNS:
        raise expected(place, f"at least {_LEAST_COLUMNS} columns", len(columns))
    below, name, _, label = columns[:_LEAST_COLUMNS]
    if label not in ("0", "1"):
        raise expected(place, "a label of 0 or 1", checks.shorten(label))
    file = folder / below / name
    if ".." in file.parts or not file.is_relative_to(folder) or not file.is_file():
        raise expected(place, f"an image {below}/{name}", "no such file")
    return Sample(file, int(label))
