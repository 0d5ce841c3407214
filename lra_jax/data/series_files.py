"""Time series from files: the ``.ts`` format of the UEA and UCR archives, and ``.npz``.

A ``.ts`` file has comments (``#``, ``%``), a header, and one example per line::

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
from lra_jax.data.labels import Kind, names_of, parse_number
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

    @property
    def names(self) -> set[str]:
        """The classes that the labels name."""
        return {x for one in self.labels.tolist() for x in names_of(one, self.kind)}

    def at(self, chosen: np.ndarray) -> "Series":
        """Selects examples by booleans, `[n]`."""
        values = list(itertools.compress(self.values, chosen))
        return self._replace(values=values, labels=self.labels[chosen])


def find(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The files at a path: one ``.npz``, or ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``. A
    folder is read as the only pair in it, or as the pair of its own name.

    Raises:
      ValueError: a missing file, or a folder without one pair.
    """
    place = checks.existing_path(path)
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
        checks.existing_path(file)
    return files


def read(path: str | os.PathLike[str]) -> dict[str, Series]:
    """The splits at a path, see `find`: train and test, and valid if there is one.

    Raises:
      ValueError: a file is malformed; the message names it, and the line or the array.
      OSError: it cannot be read.
    """
    files = find(path)
    if len(files) == 1:
        splits = _read_npz(files[0])
    else:
        splits = {"train": read_ts(files[0]), "test": read_ts(files[1])}
    train = splits["train"]
    place, width = str(files[-1]), train.values[0].shape[1]
    for split, series in splits.items():
        if series.values[0].shape[1] != width:
            got = series.values[0].shape[1]
            raise expected(place, f"{width} channels, as in training", got)
        if series.kind != train.kind:
            raise expected(place, "labels of one kind", f"others in {split}")
        unknown = series.names - train.names
        if unknown:
            raise expected(place, "classes of the training split", min(unknown))
    return splits


def read_ts(file: pathlib.Path) -> Series:
    """The examples of a ``.ts`` file; for errors, see `read`."""
    header: dict[str, list[str]] = {}
    values: list[np.ndarray] = []
    labels: list[str | float] = []
    for number, line in enumerate(read_lines(file), 1):
        text = line.strip()
        if not text or text[:1] in b"#%":
            continue
        try:
            row = text.decode("utf-8")
            if "data" not in header:
                _read_header(row, header)
                continue
            steps, label = _example(row, header)
            if values and steps.shape[1] != values[0].shape[1]:
                needed = f"{values[0].shape[1]} channels, as in the first example"
                raise expected("example", needed, steps.shape[1])
        except ValueError as error:
            raise within(f"{file}, line {number}", error) from None
        values.append(steps)
        labels.append(label)
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
        raise expected("header", "@data before the examples", checks.shorten(row))
    name, *words = row[1:].split() or [""]
    header[name.lower()] = words
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
        raise expected("example", needed, checks.shorten(row))
    columns = [_numbers(channel) for channel in channels]
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        got = " and ".join(map(str, sorted(lengths)))
        raise expected("example", "channels of one length", f"{got} steps")
    if _is_true(header.get("targetlabel")):
        return np.stack(columns, 1), parse_number("label", label)
    return np.stack(columns, 1), known("label", label.strip(), header["classlabel"][1:])


def _numbers(text: str) -> np.ndarray:
    """The numbers of a text, `[T]`, NaN for those that are missing."""
    try:
        numbers = np.array(text.replace("?", "nan").split(","), np.float64)
    except ValueError as error:
        wrong = reason(error).rpartition(": ")[2]
        raise expected("value", "a number", wrong) from None
    if _overflows(numbers):
        raise expected("value", "a finite float32 number", checks.shorten(text))
    return numbers


def _overflows(numbers: np.ndarray) -> bool:
    """Whether some are infinite in float32; their deviation might be in float64."""
    return bool((np.abs(numbers) > np.finfo(np.float32).max).any())


def _read_npz(file: pathlib.Path) -> dict[str, Series]:
    """The splits of an ``.npz`` file."""
    arrays, splits = checks.read_npz(file), {}
    for split in SPLITS:
        if split == "valid" and "valid_values" not in arrays:
            continue
        try:
            splits[split] = _split(split, arrays)
        except ValueError as error:
            raise within(str(file), error) from None
    return splits


def _split(split: str, arrays: dict[str, np.ndarray]) -> Series:
    """The examples of one split, from its arrays."""
    values, lengths, labels = (f"{split}_{x}" for x in ("values", "lengths", "labels"))
    if values in arrays and arrays[values].ndim == 2:
        arrays[values] = arrays[values][:, :, None]
    steps = checks.take(arrays, values, "numbers [n, T, C]", "fiu", [None] * 3)
    count, most = steps.shape[:2]
    marks = arrays.get(labels, np.array(None))
    several = marks.ndim == 2 and {*np.unique(marks).tolist()} == {0, 1}
    if several:
        names = [",".join(map(str, np.flatnonzero(row))) for row in marks]
        arrays[labels] = np.array(names)
    arrays.setdefault(lengths, np.full(count, most))
    needed = f"one for each of {count} examples"
    ends = checks.take(arrays, lengths, needed, "iu", [count])
    answers = checks.take(arrays, labels, needed, "fiuUb", [count])
    if ends.min() < 1 or ends.max() > most:
        raise expected(lengths, f"1 to T={most}", f"{ends.min()} to {ends.max()}")
    rows = [x[:n].astype(np.float64) for x, n in zip(steps, ends, strict=True)]
    if any(map(_overflows, rows)):
        raise expected(values, "finite float32 numbers, or NaN", "larger ones")
    if answers.dtype.kind != "f":
        return Series(rows, answers.astype(str), bool(several))
    if np.isnan(answers).any() or _overflows(answers):
        raise expected(labels, "finite float32 numbers", "others")
    return Series(rows, answers.astype(np.float64))
