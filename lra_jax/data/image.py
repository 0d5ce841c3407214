"""Image: CIFAR-10 in grey, 32 x 32 pixels read row by row, ten classes.

    dataset = prepare(data_dir)
    dataset = prepare(data_dir, path="cifar-10-binary.tar.gz")

From the original archive (given, or downloaded), its folder ``cifar-10-batches-bin``,
or MEGA's files of pixels (``token_files``). Of the archive's 50,000 training images the
first 90 % are for training and the last 10 % for validation, as in the Long-Range
Arena; its TensorFlow dataset, however, has them in a shuffled order, so the two sets
differ from these.

Grey values are those of TensorFlow's ``rgb_to_grayscale`` on bytes: the weighted mean
.2989 R + .5870 G + .1140 B of values in [0, 1], in float32, times 255.5, truncated.
"""

import os
import pathlib

import numpy as np

from lra_jax.data import archives, builder, originals, token_files
from lra_jax.data.dataset import SequenceDataset
from lra_jax.errors import expected
from lra_jax.files import read_bytes

ARCHIVE = archives.Archive(
    name="cifar-10-binary.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
SHAPE = (32, 32)
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship"),
    "truck",
)

_PIXELS = SHAPE[0] * SHAPE[1]
_RECORD = 1 + 3 * _PIXELS
# Images in each file of the archive.
_MOST_IMAGES = 10_000
_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = "test_batch.bin"
_NAMES = (*_TRAIN, _TEST)


class GreyCifar(builder.SequenceBuilder):
    """Image of the Long-Range Arena: CIFAR-10 in grey."""

    name = "lra_image"
    VOCAB_SIZE = 256
    NUM_CLASSES = 10


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    path: str | os.PathLike | None = None,
) -> SequenceDataset:
    """Opens the task's data, preparing them first if necessary.

    Args:
      data_dir, path: see `originals.locate`; the path may also be the folder in it.

    Returns:
      Splits of `tokens`, `uint8 [1024]`, and `label`; for errors, see
      `originals.locate` and `builder.prepare`.
    """
    source = originals.locate(ARCHIVE, path, _files)

    def examples(root: pathlib.Path) -> builder.Splits:
        if source.layout is None:
            return _split(source.open(root))
        sizes = 256, len(CLASSES), _PIXELS
        return token_files.examples(source.layout, *sizes, exact=True)

    config = builder.SequenceConfig(
        name=source.name,
        max_length=_PIXELS,
        expected_bytes=60_000 * (_PIXELS + 50) if path is None else 1,
        image_shape=SHAPE,
        examples=examples,
    )
    return builder.prepare(GreyCifar, config, data_dir)


def grey(colour: np.ndarray) -> np.ndarray:
    """`uint8 [n, 3, pixels]` to `uint8 [n, pixels]`, as TensorFlow computes it."""
    weights = np.array([0.2989, 0.5870, 0.1140], np.float32)
    scaled = colour.astype(np.float32) * np.float32(1 / 255)
    mean = np.einsum("ncp,c->np", scaled, weights)
    return (mean * np.float32(255.5)).astype(np.uint8)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files in a folder on which the data depend."""
    files = [originals.inside(path, _FOLDER) / name for name in _NAMES]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        got = f"{path} without {', '.join(missing)}"
        raise originals.unknown(ARCHIVE, _FOLDER, got)
    return files


def _read(path: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images in colour, and labels, of each file of the archive, or of its folder."""
    if path.is_dir():
        return {
            file.name: _parse(file, read_bytes(file, _MOST_IMAGES * _RECORD))
            for file in _files(path)
        }
    parts = {}
    with archives.open_members(ARCHIVE, path) as contents:
        for member, content in contents:
            folder, _, name = member.rpartition("/")
            if folder == _FOLDER and name in _NAMES:
                data = content.read(_MOST_IMAGES * _RECORD + 1)
                parts[name] = _parse(f"{path}: {member}", data)
    missing = [name for name in _NAMES if name not in parts]
    if missing:
        raise expected(str(path), f"{_FOLDER}/{', '.join(missing)}", "none")
    return parts


def _parse(place: object, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images `uint8 [n, 3, 1024]` and labels `[n]` of one file."""
    if not data or len(data) % _RECORD:
        needed = f"images of 32 x 32 in colour with a label, {_RECORD} bytes each"
        raise expected(str(place), needed, f"{len(data):,} bytes in total")
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    labels = records[:, 0]
    unknown = np.flatnonzero(labels >= len(CLASSES))
    if unknown.size:
        place = f"{place}, image {unknown[0] + 1}"
        raise expected(place, "a label of 0..9", labels[unknown[0]])
    return records[:, 1:].reshape(-1, 3, _PIXELS), labels


def is_cifar(path: pathlib.Path) -> bool:
    """Whether a path is a file, or a folder with CIFAR-10 or its archive."""
    inside = (ARCHIVE.name, _FOLDER, _TEST)
    return path.is_file() or any((path / name).exists() for name in inside)


def read_colour(
    path: pathlib.Path,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images `uint8 [n, 32, 32, 3]` and labels `[n]` of each split of CIFAR-10, from
    its archive or its folder, or the folder in it; for errors, see `prepare`."""
    place = originals.locate(ARCHIVE, path, _files).open(path)
    return {
        split: (np.moveaxis(colour.reshape(-1, 3, *SHAPE), 1, -1), labels)
        for split, (colour, labels) in _parts(place).items()
    }


def _parts(path: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images `uint8 [n, 3, 1024]` and labels `[n]` of each split."""
    files = _read(path)
    images = np.concatenate([files[name][0] for name in _TRAIN])
    labels = np.concatenate([files[name][1] for name in _TRAIN])
    held_out = len(images) // 10
    if not held_out:
        raise expected(str(path), "at least 10 training images", len(images))
    cut = len(images) - held_out
    return {
        "train": (images[:cut], labels[:cut]),
        "valid": (images[cut:], labels[cut:]),
        "test": files[_TEST],
    }


def _split(path: pathlib.Path) -> builder.Splits:
    splits = {}
    for split, (colour, labels) in _parts(path).items():
        pieces = np.array_split(colour, len(colour) // _MOST_IMAGES + 1)
        pixels = np.concatenate([grey(piece) for piece in pieces])
        splits[split] = len(pixels), zip(pixels, labels.tolist(), strict=True)
    return splits
