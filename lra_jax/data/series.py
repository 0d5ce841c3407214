"""Time series: real vectors `[T, C]` with a class or a number each.

As in the code of Flowformer and of Zerveas et al. 2021 (arXiv:2010.02803), gaps are
filled by linear interpolation, ends by the nearest value, and then each channel is
standardised by its mean and deviation over all steps of the training split. A channel
without any value is at the mean. Series are cut at the longest of the training split.
"""

import os
import pathlib
from collections.abc import Mapping

import numpy as np

from lra_jax.data import checks, memory, series_files
from lra_jax.data.dataset import SPLITS, SequenceDataset, fingerprint
from lra_jax.data.labels import code_labels
from lra_jax.data.series_files import Series


class SeriesDataset(SequenceDataset):
    """Time series in memory, with the interface of a dataset.

    Numbers to predict are standardised as well, by those of the training split.

    Args:
      name: name of the dataset.
      splits: train, valid and test.
      max_length: series are cut after this many steps; None = at the longest of the
        training split.

    Attributes:
      token_shape: `(C,)`.

    Raises:
      ValueError: fewer than two classes.
    """

    step_parts = ("step",)

    def __init__(
        self, name: str, splits: Mapping[str, Series], max_length: int | None = None
    ):
        self.name, train = name, splits["train"]
        longest = max(map(len, train.values))
        self.max_length = longest if max_length is None else min(max_length, longest)
        self.vocab_size = train.values[0].shape[1]
        self.token_shape = (self.vocab_size,)
        self.token_dtype = np.dtype(np.float32)
        filled = {x: list(map(fill_gaps, splits[x].values)) for x in SPLITS}
        steps = np.concatenate(filled["train"])
        present = ~np.isnan(steps).all(0)
        mean, deviation = np.zeros((2, self.vocab_size))
        mean[present] = np.nanmean(steps[:, present], 0)
        deviation[present] = np.nanstd(steps[:, present], 0)
        deviation[deviation == 0] = 1

        def standardise(steps: np.ndarray) -> np.ndarray:
            scaled = (steps[: self.max_length] - mean) / deviation
            return np.nan_to_num(scaled).astype(np.float32)

        values = {x: list(map(standardise, filled[x])) for x in SPLITS}
        self._hold(values)
        code = code_labels(self, train.kind, train.labels.tolist())
        self._labels = {x: code(splits[x].labels.tolist()) for x in SPLITS}
        self.decode = describe
        scales = {"mean": mean.tolist(), "deviation": deviation.tolist()}
        self.raw = {"kind": "vectors", **scales, **self.raw_answers}
        parts: list[str | np.ndarray] = []
        for x in SPLITS:
            parts += [f"{x} {self._lengths[x].tolist()}", *values[x], self._labels[x]]
        self.fingerprint = fingerprint(*parts)


def describe(values: np.ndarray) -> str:
    """The size of a series `[T, C]` and its first step, for display."""
    steps, channels = values.shape
    first = " ".join(f"{value:.3g}" for value in values[0, :8].tolist())
    more = " ..." if channels > 8 else ""
    return f"{steps} steps of {channels} channels, from {first}{more}"


def fill_gaps(values: np.ndarray) -> np.ndarray:
    """Replaces each NaN of `[T, C]` by linear interpolation between its neighbours in
    time, or by the nearest value at an end; a channel of NaN alone stays."""
    gaps = np.isnan(values)
    filled, steps = values.copy(), np.arange(len(values))
    for channel in np.flatnonzero(gaps.any(0) & ~gaps.all(0)):
        known = ~gaps[:, channel]
        filled[:, channel] = np.interp(steps, steps[known], values[known, channel])
    return filled


def prepare(
    *,
    path: str | os.PathLike[str] | None,
    max_length: int | None,
    validation: str,
    seed: int,
) -> SeriesDataset:
    """Reads the series of a path, see `series_files.find`; for the other settings, see
    `lra_jax.configs.series.SeriesData`, and for errors `series_files.read`."""
    files = series_files.find(_japanese_vowels() if path is None else path)
    splits = series_files.read(files[0])
    if validation == "test":
        splits["valid"] = splits["test"]
    elif "valid" not in splits:
        splits |= hold_out(splits["train"], seed)
    name = files[0].stem.removesuffix("_TRAIN")
    return SeriesDataset(name, splits, max_length)


def hold_out(train: Series, seed: int) -> dict[str, Series]:
    """Splits a training split into train and valid, a fifth of each class if each
    example has one."""
    groups = train.labels if train.kind == "classes" else np.zeros(len(train.labels))
    held = memory.hold_out(groups, seed, "valid")
    return {"train": train.at(~held), "valid": train.at(held)}


def _japanese_vowels() -> pathlib.Path:
    """The folder of JapaneseVowels in the package aeon, which is not imported.

    Source: Kudo, Toyama and Shimbo 1999, "Multidimensional curve classification using
    passing-through regions"; 9 speakers, 12 channels, 270 and 370 utterances.
    """
    needed = "series of your own, or `pip install lra_jax[series]` for JapaneseVowels"
    parts = "datasets", "data", "JapaneseVowels"
    return checks.find_installed("aeon", *parts, needed=needed)
