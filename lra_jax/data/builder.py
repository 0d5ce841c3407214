"""The base of every task's data: a tfds builder of labelled token sequences.

A task's file defines a builder, and a config whose name contains every setting, so that
different settings never share a folder:

    class Builder(SequenceBuilder):
        name = "lra_mytask"
        VOCAB_SIZE = 256
        NUM_CLASSES = 2

    def examples(root):
        return {"train": (25_000, iterator), "test": (25_000, iterator)}

    config = SequenceConfig(name="seed0", max_length=100, examples=examples, ...)
    dataset = prepare(Builder, config, data_dir)

tfds writes the records as array_record without TensorFlow, streamed shard by shard in
the order given. (`GeneratorBasedBuilder` would collect a whole split in memory, and
need TensorFlow beyond 1 GB.) Lengths and labels go into the metadata of the dataset, so
that batches are planned without reading records. tfds writes everything into a folder
with a temporary name and renames it at the end, so a killed run leaves nothing that
could be mistaken for data.
"""

import contextlib
import dataclasses
import errno
import hashlib
import io
import itertools
import logging
import math
import os
import pathlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import file_utils

from lra_jax import progress, seals, signals
from lra_jax.data.dataset import SequenceDataset, Source
from lra_jax.errors import check_path, expected, on_one_line, writable
from lra_jax.files import expand_home, lock

_SHARD_BYTES = 128 << 20
_STALE_SECONDS = 3600

_logger = logging.getLogger(__name__)


Splits = Mapping[str, tuple[int, Iterable[tuple[Any, ...]]]]
"""For each split, its number of examples, and the examples.

An example is its sequences, each `uint8 [length]`, then its label. The splits are
consumed one after another, in order.
"""


@dataclasses.dataclass(eq=False, kw_only=True)
class SequenceConfig(tfds.core.BuilderConfig):
    """The settings of one prepared dataset.

    Attributes:
      max_length: the longest sequence that the model must accept.
      expected_bytes: the approximate size on disk, to check the free space.
      examples: makes or reads the examples, given the folder of all prepared data.
      image_shape: rows and columns, if a sequence is an image read row by row; every
        example must then have that many pixels.
    """

    max_length: int
    expected_bytes: int
    examples: Callable[[pathlib.Path], Splits]
    image_shape: tuple[int, int] | None = None


class SequenceBuilder(tfds.core.ShardBasedBuilder, skip_registration=True):
    """A tfds builder of uint8 sequences and an integer label."""

    VERSION = tfds.core.Version("1.0.0")
    SEQUENCES: ClassVar[tuple[str, ...]] = ("tokens",)
    VOCAB_SIZE: ClassVar[int]
    NUM_CLASSES: ClassVar[int]
    builder_config: Any  # A SequenceConfig; tfds would also allow None.

    @property
    def root(self) -> pathlib.Path:
        """The folder of all prepared data."""
        return pathlib.Path(self.data_path).parents[2]

    def _info(self) -> tfds.core.DatasetInfo:
        sequence = tfds.features.Tensor(
            shape=(None,), dtype=np.uint8, encoding=tfds.features.Encoding.BYTES
        )
        features = {name: sequence for name in self.SEQUENCES}
        label = tfds.features.Scalar(dtype=np.int64)
        return _Info(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict({**features, "label": label}),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,
        )

    def _shard_iterators_per_split(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, list[Callable[[], Iterator[tuple[int, dict[str, Any]]]]]]:
        del dl_manager  # It would need TensorFlow; archives.py does the downloads.
        splits = self.builder_config.examples(self.root)
        total = sum(count for count, _ in splits.values())
        record_bytes = max(1, self.builder_config.expected_bytes // total)
        per_shard = max(1, _SHARD_BYTES // record_bytes)
        metadata: Any = self.info.metadata
        metadata["splits"] = {}
        shards, digest = {}, hashlib.blake2b(digest_size=16)
        for split, (count, examples) in splits.items():
            records = self._records(split, count, examples, digest)
            num_shards = -(-count // per_shard)
            edges = [count * i // num_shards for i in range(num_shards + 1)]
            sizes = [stop - start for start, stop in itertools.pairwise(edges)]
            # The shards share one iterator: tfds writes them in this order.
            shards[split] = [partial(itertools.islice, records, n) for n in sizes]
        return shards

    def _records(
        self, split: str, count: int, examples: Iterable[tuple[Any, ...]], digest: Any
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields ``(key, record)`` of a split's examples, recorded and checked."""
        lengths: dict[str, list[int]] = {name: [] for name in self.SEQUENCES}
        labels: list[int] = []
        metadata: Any = self.info.metadata
        metadata["splits"][split] = {"lengths": lengths, "labels": labels}
        key = -1
        taken = itertools.islice(examples, count)
        if not sys.stderr.isatty():  # On a terminal, tfds shows a bar.
            # Not on stdout, which may be the output of a command.
            taken = progress.track(taken, f"{split} examples", count, progress.aside)
        for key, (*arrays, label) in enumerate(taken):
            record = dict(zip(self.SEQUENCES, arrays, strict=True))
            self._check(f"{split} example {key + 1}", record, label)
            _add_example(digest, split, label, record.values())
            for name in self.SEQUENCES:
                lengths[name].append(len(record[name]))
            labels.append(int(label))
            # Complete once the last record has been taken.
            metadata["fingerprint"] = digest.hexdigest()
            yield key, {**record, "label": int(label)}
        if key + 1 < count:
            raise expected(split, f"{count} examples", key + 1)

    def _check(self, place: str, record: dict[str, np.ndarray], label: int):
        if not 0 <= label < self.NUM_CLASSES:
            raise expected(place, f"a label of 0..{self.NUM_CLASSES - 1}", label)
        for name in self.SEQUENCES:
            ids = record[name]
            if not len(ids) or ids.max() >= self.VOCAB_SIZE:
                got = f"one of {ids.max()}" if len(ids) else "none"
                raise expected(place, f"ids below {self.VOCAB_SIZE} in {name}", got)
        shape = self.builder_config.image_shape
        for array in record.values() if shape else ():
            if array.shape != (math.prod(shape),):
                needed = f"an image of {shape[0]} x {shape[1]} pixels"
                raise expected(place, needed, f"{array.size} numbers")


class _Info(tfds.core.DatasetInfo):
    """A description that tfds does not look up online: ours are not there, and each
    attempt would leave an empty folder in the system's temporary one."""

    def initialize_from_bucket(self) -> None:
        """Does nothing."""


class PreparedDataset(SequenceDataset):
    """The examples of a builder whose data are prepared."""

    def __init__(self, builder: Any):
        self._builder = builder
        self.name: str = builder.info.full_name
        self.folder = str(builder.data_path)
        self.splits = tuple(builder.info.splits)
        self.sequences = builder.SEQUENCES
        self.vocab_size, self.num_classes = builder.VOCAB_SIZE, builder.NUM_CLASSES
        self.max_length: int = builder.builder_config.max_length
        self.image_shape = builder.builder_config.image_shape
        metadata: Any = builder.info.metadata
        self.fingerprint: str = metadata["fingerprint"]
        self._lengths, self._labels = {}, {}
        for split, columns in metadata["splits"].items():
            lengths = [columns["lengths"][name] for name in self.sequences]
            lengths = np.array(lengths, np.int32)
            self._lengths[split] = lengths[0] if len(lengths) == 1 else lengths.T
            self._labels[split] = np.array(columns["labels"], np.int32)

    def source(self, split: str) -> Source:
        records = self._builder.as_data_source(split=self._check_split(split))
        return _Records(records, self.folder)


class _Records(Source):
    """A source whose errors name the folder, since a disk can fail during a run."""

    def __init__(self, source: Any, folder: str):
        self._source, self._folder = source, folder

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        try:
            return self._source.__getitems__(indices)
        except Exception as error:  # From array_record, in its own words.
            needed = "expected records that can be read"
            message = f"{self._folder}: {needed}, got {on_one_line(error)}"
            raise OSError(message) from error


def prepare(
    builder_class: type[SequenceBuilder],
    config: SequenceConfig,
    data_dir: str | os.PathLike | None = None,
) -> SequenceDataset:
    """Opens a dataset, preparing it first if necessary.

    Safe against being killed, and against other processes preparing the same data.

    Args:
      builder_class: the task's builder.
      config: its settings.
      data_dir: folder of prepared data; None = tfds' own folder.

    Raises:
      OSError: the disk is full, or fails.
      ValueError: the settings or the source files are invalid, or the folder cannot be
        written.
    """
    if data_dir is not None:
        data_dir = os.path.abspath(expand_home(data_dir, "--data.dir"))
    root, folder = file_utils.get_data_dir_and_dataset_dir(
        given_data_dir=data_dir,
        builder_name=builder_class.name,
        config_name=config.name,
        version=builder_class.VERSION,
    )
    folder = pathlib.Path(folder)
    check_path("--data.dir", folder)
    if not folder.exists():
        with writable("--data.dir", "a folder", root):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder.parent / ".lock"):
            if not folder.exists():
                _write(_build(builder_class, config, root), folder)
    return _open(folder, lambda: _build(builder_class, config, root))


def _build(builder_class, config, data_dir) -> SequenceBuilder:
    with _quiet():
        return builder_class(
            config=config, data_dir=str(data_dir), file_format="array_record"
        )


def _open(
    folder: pathlib.Path, build: Callable[[], SequenceBuilder]
) -> SequenceDataset:
    """The data of a folder, after checking that every byte is unchanged.

    A folder without a seal, from a run killed at the very end, is read through, and
    then sealed.
    """
    again = f"delete {folder} and prepare the data again"
    sealed, damage = seals.read(folder)
    if damage:
        raise expected(str(folder), "data as prepared", f"{damage}; {again}")
    try:
        builder = build()
        if not builder.is_prepared():
            raise ValueError("no dataset_info.json, or no features.json")
        dataset = PreparedDataset(builder)
        if sealed is None and _read_fingerprint(dataset) != dataset.fingerprint:
            raise ValueError("other examples")
    except Exception as error:  # A damaged file can cause any error in tfds.
        got = f"{on_one_line(error)}; {again}"
        raise expected(str(folder), "prepared data", got) from None
    if sealed is None:
        with contextlib.suppress(OSError):  # The folder may be read-only.
            seals.write(folder, name=dataset.name)
    elif sealed["name"] != dataset.name:
        raise expected(str(folder), dataset.name, f"{sealed['name']}; {again}")
    return dataset


def _read_fingerprint(dataset: SequenceDataset) -> str:
    """The fingerprint of the examples and labels on disk."""
    digest = hashlib.blake2b(digest_size=16)
    for split in dataset.splits:
        columns = zip(
            dataset.lengths(split).tolist(),
            dataset.labels(split).tolist(),
            dataset.source(split),
            strict=True,
        )
        for lengths, label, record in columns:
            arrays = [record[name] for name in dataset.sequences]
            if np.ravel(lengths).tolist() != [len(array) for array in arrays]:
                raise ValueError("lengths of other examples")
            if label != record["label"]:
                raise ValueError("labels of other examples")
            _add_example(digest, split, label, arrays)
    return digest.hexdigest()


def _add_example(
    digest: "hashlib.blake2b", split: str, label: int, arrays: Iterable[np.ndarray]
) -> None:
    """Adds an example to a fingerprint."""
    digest.update(f"{split} {label}".encode())
    for array in arrays:
        digest.update(f" {len(array)} ".encode() + array.tobytes())


def _write(builder: SequenceBuilder, path: pathlib.Path):
    _remove_leftovers(path)
    needed = builder.builder_config.expected_bytes
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        reason = f"the data need about {needed:,} bytes, and {free:,} are free"
        raise OSError(errno.ENOSPC, reason, str(path))
    _logger.info("Preparing %s in %s", builder.info.full_name, path)
    start = time.perf_counter()
    try:
        with _quiet(), _own_randomness(), signals.raise_in_context():
            builder.download_and_prepare()
        seals.write(path, name=builder.info.full_name)
    except OSError:
        # Another machine that shares the folder, but not its lock, may have been first.
        if not path.is_dir():
            raise
    except RuntimeError as error:
        # This is how array_record reports system errors.
        if "() failed: " not in str(error):
            raise
        raise OSError(errno.EIO, str(error)) from error
    _logger.info("Prepared in %.1f s", time.perf_counter() - start)


@contextlib.contextmanager
def _own_randomness():
    """Makes tfds draw its temporary name independently of the user's seeds.

    Otherwise hosts that share a folder and a seed would write into the same one.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def _remove_leftovers(path: pathlib.Path):
    """Removes remains of killed runs; a recent folder may belong to another machine."""
    for folder in path.parent.glob(f"incomplete.*_{path.name}"):
        touched = [entry.stat().st_mtime for entry in (folder, *folder.iterdir())]
        if time.time() - max(touched) > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _quiet():
    """Silences tfds' messages, but not its progress bars on a terminal."""
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    absl_logger.setLevel(logging.ERROR)
    tfds.display_progress_bar(enable=sys.stderr.isatty())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.display_progress_bar(enable=True)
        absl_logger.setLevel(level)
