"""From a prepared dataset to padded batches, with grain.

Training batches are planned by `batches.BatchPlan`, so grain's part is small: reading,
padding, prefetching, and a position that a checkpoint can hold. Elements are dicts of
numpy arrays:

    tokens   uint8   [batch, bucket length]   0 beyond a sequence's end
    lengths  int32   [batch]
    labels   int32   [batch]
    weights  float32 [batch]                  evaluation only: 0 for a filler row

Larger vocabularies have tokens of a wider dtype, and real vectors are float32 `[batch,
bucket length, C]`. Numbers to predict are float32 labels. If labels belong to positions
they are `[batch, K]`, -1 where a row has fewer than K, and there are also

    positions  int32 [batch, K]

Rows of text, which are already packed, are passed on as their dataset makes them:
`tokens`, `segment_ids` and `labels`, all `[batch, T]`.

A task with pairs of sequences has a `tokens` and a `lengths` for each, with the suffix
given by its builder (`tokens_1`, `lengths_1`, `tokens_2`, ...).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lra_jax.data import buckets as bucketing
from lra_jax.data.batches import Batch, plan_evaluation
from lra_jax.data.buckets import Buckets
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.packing import pack
from lra_jax.data.stages import Curriculum, LengthWarmup, StagedPlan, choose_groups
from lra_jax.errors import expected

if TYPE_CHECKING:
    import grain

Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""``(tokens of one example, generator) -> tokens`` of the same length."""


def bucket_lengths(dataset: SequenceDataset, buckets: Buckets) -> tuple[int, ...]:
    """Returns the lengths to which batches of any split are padded, increasing.

    Args:
      dataset: a prepared dataset.
      buckets: see `buckets.resolve_buckets`, which chooses by the training lengths.

    Raises:
      ValueError: they are not increasing integers, or too short for the data.
    """
    longest = max(int(dataset.lengths(split).max()) for split in dataset.splits)
    lengths = _example_lengths(dataset, dataset.splits[0])
    return bucketing.resolve_buckets(buckets, lengths, longest, dataset.max_length)


def train_iterator(
    dataset: SequenceDataset,
    *,
    batch_size: int,
    seed: int,
    num_steps: int,
    buckets: Buckets = "auto",
    length_warmup: str = "",
    curriculum: str = "",
    groups: Sequence[float] = (),
    augment: Augment | None = None,
    packing: int = 0,
    shard: tuple[int, int] = (0, 1),
    num_threads: int = 2,
) -> "grain.DatasetIterator[dict[str, np.ndarray]]":
    """Returns the batches of a training run.

    Batch i is a function of `seed` and i (and of the data, buckets and batch size), on
    any number of hosts and after any restart. `get_state` and `set_state` use the index
    of the next batch; Orbax accepts the iterator itself.

    Args:
      dataset: a prepared dataset.
      batch_size: examples per batch, over all hosts.
      seed: fixes the order of the examples.
      num_steps: batches in the run.
      buckets: the lengths to pad to, see `bucket_lengths`.
      length_warmup: how much of each sequence the first batches hold, see
        `LengthWarmup`.
      curriculum: which examples the first batches hold, see `Curriculum`.
      groups: the same for examples in groups, see `stages.choose_groups`.
      augment: applied to every sequence of every batch, with a generator that is a
        function of the seed, the step and the row; None = the data are not changed.
      packing: pack the examples of each batch into rows of the longest bucket; their
        number is a multiple of this (`data.packing`); 0 = one example per row.
      shard: this host's index and the number of hosts; the host gets its rows of every
        batch, and reads no others.
      num_threads: threads that read ahead; 0 reads when asked.

    Raises:
      ValueError: lengths, stages or the shard do not fit the data or the batch, or
        `length_warmup` is given for images.
    """
    import grain  # Takes a second, and imports jax.

    rows = _shard_rows(batch_size, shard)
    lengths = bucket_lengths(dataset, buckets)
    train_lengths = _example_lengths(dataset, "train")
    if groups:
        stages = choose_groups(groups, len(train_lengths), num_steps)
    else:
        parsed = Curriculum.parse(curriculum, num_steps)
        stages = parsed.choose(train_lengths, batch_size, num_steps)
    plan = StagedPlan(
        stages,
        train_lengths,
        buckets=lengths[-1:] if packing else lengths,
        batch_size=batch_size,
        seed=seed,
    )
    reader = _Reader(dataset, "train")
    warmup = LengthWarmup.parse(length_warmup, num_steps)
    if warmup.stages and dataset.image_shape is not None:
        needed = "none for images, which it would cut"
        raise expected("--train.length_warmup", needed, f"{length_warmup!r}")

    def load(step: int) -> dict[str, np.ndarray]:
        batch = plan[step]
        chosen = Batch(batch.length, batch.ids[rows])
        numbers = range(batch_size)[rows] if augment else ()
        draws = [_generator(seed, step, row, _AUGMENTATION) for row in numbers]
        loaded = reader.read(chosen, warmup.limit(step), augment, draws)
        return pack(loaded, lengths[-1], packing) if packing else loaded

    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=16)
    steps = grain.MapDataset.range(num_steps)
    return iter(steps.map(load).to_iter_dataset(options))


# Ends the entropy of augmentation's generators. It must not be 0: trailing zeros do not
# count, so row 0 would have the generator that orders an epoch.
_AUGMENTATION = 2


def _generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


class EvalBatches:
    """Batches of one split in which every example counts once; iterate repeatedly.

    They have the shapes of training. `weights` is 1 for a row that counts and 0 for one
    that fills the last batch of a bucket (a repeated example, so that every value is
    defined). The weights of all rows on all hosts sum to the number of examples.

    Args:
      dataset: a prepared dataset.
      split: the split to read; a part of the test is padded to its own longest example.
      buckets: the lengths to pad to, see `bucket_lengths`.
      batch_size: rows per batch, over all hosts.
      shard: this host's index and the number of hosts.

    Raises:
      ValueError: there is no such split, or lengths or the shard do not fit.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        split: str,
        buckets: Buckets = "auto",
        batch_size: int = 32,
        *,
        shard: tuple[int, int] = (0, 1),
    ):
        lengths = _split_buckets(dataset, split, bucket_lengths(dataset, buckets))
        self._rows = _shard_rows(batch_size, shard)
        self._reader = _Reader(dataset, split)
        self._plan = plan_evaluation(
            _example_lengths(dataset, split), buckets=lengths, batch_size=batch_size
        )

    def __len__(self) -> int:
        return len(self._plan)

    def examples(self) -> Iterator[np.ndarray]:
        """The indices of the examples that count in each batch, in order."""
        for batch, counted in self._plan:
            yield batch.ids[:counted]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for (length, ids), counted in self._plan:
            weights = (np.arange(len(ids)) < counted).astype(np.float32)
            batch = self._reader.read(Batch(length, ids[self._rows]))
            yield batch | {"weights": weights[self._rows]}


def eval_shapes(dataset: SequenceDataset, buckets: tuple[int, ...]) -> int:
    """The most shapes that batches of `EvalBatches` can have over all splits."""
    shapes = {
        (width, dataset.labels(split).shape[1:])
        for split in (*dataset.splits, *dataset.parts)
        for width in _split_buckets(dataset, split, buckets)
    }
    return len(shapes)


def _split_buckets(
    dataset: SequenceDataset, split: str, buckets: tuple[int, ...]
) -> tuple[int, ...]:
    """The lengths to which evaluation batches of a split are padded."""
    if split in dataset.parts:
        return (int(dataset.lengths(split).max()),)
    return buckets


def read_examples(
    dataset: SequenceDataset, split: str, indices: Sequence[int]
) -> dict[str, np.ndarray]:
    """Returns chosen examples as one batch, padded to the longest of them.

    Raises:
      ValueError: there is no such split or example.
    """
    count = dataset.num_examples(split)
    for index in indices:
        if not 0 <= index < count:
            raise expected("example", f"0..{count - 1} of the {split} split", index)
    ids = np.array(indices, np.int32)
    length = int(_example_lengths(dataset, split)[ids].max())
    return _Reader(dataset, split).read(Batch(length, ids))


class _Reader:
    """Reads examples of a split and pads them."""

    def __init__(self, dataset: SequenceDataset, split: str):
        self._dataset, self._split = dataset, split
        self._source = dataset.source(split)
        self._labels = dataset.labels(split)
        self._positions = dataset.positions(split)
        self._sequences = dataset.sequences
        self._dtype, self._shape = dataset.token_dtype, dataset.token_shape

    def read(
        self,
        batch: Batch,
        limit: int | None = None,
        augment: Augment | None = None,
        draws: Sequence[np.random.Generator] = (),
    ) -> dict[str, np.ndarray]:
        """The examples of a batch, with at most `limit` tokens of each sequence.

        They are augmented before they are cut, each with its own generator.
        """
        whole_rows = self._dataset.batch(self._split, batch.ids)
        if whole_rows is not None:
            return whole_rows
        records = self._source.__getitems__(batch.ids.tolist())
        width = min(batch.length, limit or batch.length)
        arrays = {}
        for name in self._sequences:
            tokens = np.zeros((len(records), width, *self._shape), self._dtype)
            lengths = np.zeros(len(records), np.int32)
            for row, record in enumerate(records):
                whole = record[name]
                if augment is not None:
                    whole = augment(whole, draws[row])
                lengths[row] = min(len(whole), width)
                tokens[row, : lengths[row]] = whole[:width]
            arrays[name] = tokens
            arrays[name.replace("tokens", "lengths", 1)] = lengths
        if self._positions is not None:
            arrays["positions"] = self._positions[batch.ids]
        labels = self._labels[batch.ids]
        is_number = labels.dtype.kind == "f"
        return arrays | {"labels": labels.astype(np.float32 if is_number else np.int32)}


def _example_lengths(dataset: SequenceDataset, split: str) -> np.ndarray:
    """The length that determines an example's bucket: for a pair, the longer one."""
    lengths = dataset.lengths(split)
    return lengths if lengths.ndim == 1 else lengths.max(axis=1)


def _shard_rows(batch_size: int, shard: tuple[int, int]) -> slice:
    index, count = shard
    if not 0 <= index < count:
        raise expected("shard", "(index, count) with index < count", shard)
    if batch_size % count:
        raise expected("batch_size", f"a multiple of the {count} shards", batch_size)
    rows = batch_size // count
    return slice(index * rows, (index + 1) * rows)
