"""Time series from files: the ``.ts`` format of the UEA and UCR archives, and ``.npz``.

A ``.ts`` file has comments (``#``, ``%``), a header, and an example a line::

    @problemName Vowels
    @timeStamps false
    @univariate false
    @dimensions 2
    @classLabel true ae oe
    @data
    1.5,1.2,?:0.1,0.4,0.3:ae

Commas separate steps, colons channels, and the last field is the label: one of the
classes of the header, or with ``@targetLabel true`` a number. ``?`` and ``NaN`` are
missing values. Examples may differ in length. Source: Bagnall et al. 2018, "The UEA
multivariate time series classification archive", arXiv:1811.00075.

An ``.npz`` file has ``train_values`` and ``test_values``, `[n, T, C]` or `[n, T]`, and
``train_labels`` and ``test_labels``, `[n]`: integers or text for classes, floats for
numbers; or `[n, classes]` of 0 and 1 where a series has any number of the classes.
``train_lengths`` and ``test_lengths``, `[n]`, are for unequal lengths, and
``valid_values`` and so on for a validation split.
"""

import itertools
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lra_jax.data import checks
from lra_jax.data.dataset import SPLITS
from lra_jax.data.labels import Kind, names_of
from lra_jax.errors import expected, known, reason, within
from lra_jax.files import read_lines

_TRAIN, _TEST = "_TRAIN.ts", "_TEST.ts"


class Series(NamedTuple):
    """Examples of one split.

    Attributes:
      values: `[T, C]` floats for each example; NaN where a value is missing.
      labels: `[n]`, text for classes, floats for numbers.
      several: whether a label names any number of classes, as in "0,2".
    """

    values: list[np.ndarray]
    labels: np.ndarray
    several: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of the labels."""
        if self.labels.dtype.kind == "f":
            return "numbers"
        return "multi" if self.several else "classes"

    def at(self, chosen: np.ndarray) -> "Series":
        """Selects examples by booleans, `[n]`."""
        values = list(itertools.compress(self.values, chosen))
        return self._replace(values=values, labels=self.labels[chosen])


def find(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The files at a path: one ``.npz``, or ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``.

    Args:
      path: one of the files, or a folder of one pair; of several, the pair is taken
        that has the folder's name.

    Raises:
      ValueError: a missing file, or a folder without one pair.
    """
    place = checks.existing(path)
    if place.is_dir():
        names = sorted(file.name for file in place.glob(f"*{_TRAIN}"))
        named = f"{place.name}{_TRAIN}"
        if named not in names and len(names) != 1:
            got = f"{place}, with {', '.join(names) or 'none'}"
            raise expected("--data.path", f"a folder with one NAME{_TRAIN}", got)
        place /= named if named in names else names[0]
    elif place.suffix == ".npz":
        return [place]
    name = place.name.removesuffix(_TRAIN).removesuffix(_TEST)
    files = [place.with_name(f"{name}{end}") for end in (_TRAIN, _TEST)]
    if place not in files:
        needed = f"a file NAME{_TRAIN} or .npz, or a folder"
        raise expected("--data.path", needed, place)
    for file in files:
        checks.existing(file)
    return files


def read(path: str | os.PathLike[str]) -> dict[str, Series]:
    """The splits at a path, see `find`: train and test, and valid if there is one.

    Raises:
      ValueError: a file is malformed; the message names it, and the line or the array.
      OSError: it cannot be read.
    """
    files = find(path)
    if len(files) == 1:
        splits = read_npz(files[0])
    else:
        splits = {"train": read_ts(files[0]), "test": read_ts(files[1])}
    train = splits["train"]
    for split, series in splits.items():
        place = str(files[-1])
        widths = [one.values[0].shape[1] for one in (train, series)]
        if widths[0] != widths[1]:
            raise expected(place, f"{widths[0]} channels, as in training", widths[1])
        if series.kind != train.kind:
            raise expected(place, "labels of one kind", f"others in {split}")
        taught, used = (
            {name for x in one.labels.tolist() for name in names_of(x, one.kind)}
            for one in (train, series)
        )
        if used - taught:
            raise expected(place, "classes of the training split", min(used - taught))
    return splits


def read_ts(file: pathlib.Path) -> Series:
    """The examples of a ``.ts`` file.

    Raises:
      ValueError: it is malformed; the message names file and line.
      OSError: it cannot be read.
    """
    header: dict[str, list[str]] = {}
    values: list[np.ndarray] = []
    labels: list[str | float] = []
    for number, line in enumerate(read_lines(file), 1):
        text = line.strip()
        if not text or text[:1] in b"#%":
            continue
        try:
            row = text.decode("utf-8")
            if "data" in header:
                steps, label = _example(row, header)
                if values and steps.shape[1] != values[0].shape[1]:
                    needed = f"{values[0].shape[1]} channels, as in the first example"
                    raise expected("example", needed, steps.shape[1])
                values.append(steps)
                labels.append(label)
            else:
                _read_header(row, header)
        except ValueError as error:
            raise within(f"{file}, line {number}", error) from None
    if not values:
        raise expected(str(file), "examples after @data", "none")
    stated, width = header.get("dimensions"), values[0].shape[1]
    if stated and stated[0] != str(width):
        needed = f"{stated[0]} channels, as @dimensions says"
        raise expected(str(file), needed, width)
    return Series(values, np.array(labels))


def _read_header(row: str, header: dict[str, list[str]]) -> None:
    """Adds a line of the header, and checks that the examples can be read."""
    if not row.startswith("@"):
        raise expected("header", "@data before the examples", checks.shortened(row))
    name, *words = row[1:].split() or [""]
    header[name.lower()] = words
    if name.lower() == "timestamps" and _is_true(words):
        raise expected("@timeStamps", "false: steps are evenly spaced", "true")
    if name.lower() == "data" and not (
        _is_true(header.get("classlabel")) or _is_true(header.get("targetlabel"))
    ):
        raise expected("header", "@classLabel true or @targetLabel true", "neither")


def _is_true(words: list[str] | None) -> bool:
    return bool(words) and words[0].lower() == "true"


def _example(
    row: str, header: Mapping[str, list[str]]
) -> tuple[np.ndarray, str | float]:
    """The values `[T, C]` of an example, and its label."""
    *channels, label = row.split(":")
    if not channels:
        needed = "channels and a label, separated by colons"
        raise expected("example", needed, checks.shortened(row))
    columns = [_numbers(channel, "value", gaps=True) for channel in channels]
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        got = " and ".join(map(str, sorted(lengths)))
        raise expected("example", "channels of one length", f"{got} steps")
    if _is_true(header.get("targetlabel")):
        return np.stack(columns, 1), float(_numbers(label, "label")[0])
    return np.stack(columns, 1), known("label", label.strip(), header["classlabel"][1:])


def _numbers(text: str, name: str, gaps: bool = False) -> np.ndarray:
    """The numbers of a text, `[T]`; with `gaps`, NaN for those that are missing."""
    words = text.replace("?", "nan").split(",") if gaps else [text]
    try:
        numbers = np.array(words, np.float64)
    except ValueError as error:
        wrong = reason(error).rpartition(": ")[2]
        raise expected(name, "a number", wrong) from None
    if _overflows(numbers) or (np.isnan(numbers).any() and not gaps):
        raise expected(name, "a finite float32 number", checks.shortened(text))
    return numbers


def _overflows(numbers: np.ndarray) -> bool:
    """Whether some are infinite in float32; their deviation might be in float64."""
    return bool((np.abs(numbers) > np.finfo(np.float32).max).any())


def read_npz(file: pathlib.Path) -> dict[str, Series]:
    """The splits of an ``.npz`` file.

    Raises:
      ValueError: it is malformed; the message names the file and the array.
      OSError: it cannot be read.
    """
    arrays, splits = checks.read_npz(file), {}
    for split in SPLITS:
        if split == "valid" and "valid_values" not in arrays:
            continue
        try:
            splits[split] = _split(split, arrays)
        except ValueError as error:
            raise within(str(file), error) from None
    return splits


def _split(split: str, arrays: Mapping[str, np.ndarray]) -> Series:
    """The examples of one split, from its arrays."""
    for name in (f"{split}_values", f"{split}_labels"):
        if name not in arrays:
            raise expected(name, "an array", "none")
    values, labels = arrays[f"{split}_values"], arrays[f"{split}_labels"]
    values = values[:, :, None] if values.ndim == 2 else values
    if values.ndim != 3 or values.dtype.kind not in "fiu" or 0 in values.shape:
        got = f"{values.dtype}{list(values.shape)}"
        raise expected(f"{split}_values", "numbers [n, T, C]", got)
    count, most = values.shape[:2]
    lengths = arrays.get(f"{split}_lengths", np.full(count, most))
    several = labels.ndim == 2 and {*np.unique(labels).tolist()} == {0, 1}
    if several:
        labels = np.array([",".join(map(str, np.flatnonzero(x))) for x in labels])
    for name, array, kinds in (("lengths", lengths, "iu"), ("labels", labels, "fiuUb")):
        if array.shape != (count,) or array.dtype.kind not in kinds:
            got = f"{array.dtype}{list(array.shape)}"
            raise expected(f"{split}_{name}", f"one for each of {count} examples", got)
    if lengths.min() < 1 or lengths.max() > most:
        got = f"{lengths.min()} to {lengths.max()}"
        raise expected(f"{split}_lengths", f"1 to T={most}", got)
    rows = [x[:n].astype(np.float64) for x, n in zip(values, lengths, strict=True)]
    if any(map(_overflows, rows)):
        needed = "finite float32 numbers, or NaN"
        raise expected(f"{split}_values", needed, "larger ones")
    if labels.dtype.kind != "f":
        return Series(rows, labels.astype(str), bool(several))
    if np.isnan(labels).any() or _overflows(labels):
        raise expected(f"{split}_labels", "finite float32 numbers", "others")
    return Series(rows, labels.astype(np.float64))
