"""ListOps: nested list operations, the value of a tree of 501..1999 tokens in 0..9.

Generated with a seed, or read from the official files:

    dataset = prepare(data_dir, seed=0)
    dataset = prepare(data_dir, path="lra_release")

Token ids are a fixed table (`listops_language.TOKENS`). LRA gathers its vocabulary into
a hash set, whose order changes from process to process, so that a restored checkpoint
reads other tokens than it was trained on.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from lra_jax.data import builder, listops_files, listops_trees
from lra_jax.data.checks import check_integer
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.listops_files import write as write_tsv
from lra_jax.data.listops_language import (
    TOKENS,
    VOCAB_SIZE,
    Grammar,
    decode,
    encode,
    evaluate,
)

__all__ = [
    "TOKENS",
    "VOCAB_SIZE",
    "decode",
    "encode",
    "evaluate",
    "prepare",
    "write_tsv",
]

_NUM_CLASSES = 10


@dataclasses.dataclass(eq=False, kw_only=True)
class GeneratedConfig(builder.SequenceConfig):
    """Settings of generated trees."""

    seed: int
    sizes: dict[str, int]
    grammar: Grammar
    processes: int | None


@dataclasses.dataclass(eq=False, kw_only=True)
class FilesConfig(builder.SequenceConfig):
    """Settings of trees from the official files."""

    files: dict[str, Any]


class GeneratedListOps(builder.SequenceBuilder):
    """ListOps trees drawn from a seed."""

    name = "lra_listops"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}
    VOCAB_SIZE = VOCAB_SIZE
    NUM_CLASSES = _NUM_CLASSES
    DESCRIPTION = "ListOps of the Long-Range Arena, generated."

    def examples(self, dl_manager):
        """See the base class."""
        del dl_manager
        config: GeneratedConfig = self.builder_config
        trees = _trees(config)
        return {split: (count, trees) for split, count in config.sizes.items()}


class ListOpsFiles(builder.SequenceBuilder):
    """ListOps trees from the official files."""

    name = "lra_listops_files"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}
    VOCAB_SIZE = VOCAB_SIZE
    NUM_CLASSES = _NUM_CLASSES
    DESCRIPTION = "ListOps of the Long-Range Arena, from its files."

    def examples(self, dl_manager):
        """See the base class."""
        del dl_manager
        config: FilesConfig = self.builder_config
        return {
            split: (
                listops_files.count(file),
                listops_files.read(file, config.max_length),
            )
            for split, file in config.files.items()
        }


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    seed: int = 0,
    num_train: int = 96_000,
    num_valid: int = 2_000,
    num_test: int = 2_000,
    min_length: int = 500,
    max_length: int = 2_000,
    max_depth: int = 10,
    max_args: int = 10,
    processes: int | None = None,
    path: str | os.PathLike | None = None,
) -> SequenceDataset:
    """Opens ListOps, preparing it first where that was not done before.

    Args:
      data_dir: where prepared data live; None is tfds' own folder.
      seed: fixes every tree.
      num_train: training trees.
      num_valid: validation trees.
      num_test: test trees. All trees are distinct over the three splits.
      min_length: trees have more tokens than this.
      max_length: trees have fewer tokens than this.
      max_depth: nodes at this depth are digits; the root stands at depth 1.
      max_args: most arguments of an operator.
      processes: worker processes; None takes what the machine has. The trees do not
        depend on it.
      path: a folder with the official `basic_train.tsv`, `basic_val.tsv` and
        `basic_test.tsv`, or with the released archive. The files then decide; of the
        settings above only `data_dir` and `max_length`, the most tokens that they may
        have, are used.

    Returns:
      Splits `train`, `valid` and `test` of `tokens` and `label`.

    Raises:
      ValueError: a setting is wrong, or a file is missing or malformed.
      OSError: `data_dir` cannot be written, or its disk is full.
    """
    if path is not None:
        check_integer("max_length", max_length, 1)
        config = _files_config(path, max_length)
        return builder.prepare(ListOpsFiles, config, data_dir)
    grammar = Grammar(min_length, max_length, max_depth, max_args)
    sizes = {"train": num_train, "valid": num_valid, "test": num_test}
    check_integer("seed", seed, 0)
    for split, size in sizes.items():
        check_integer(f"num_{split}", size, 1)
    if processes is not None:
        check_integer("processes", processes, 1)
    config = _generated_config(seed, sizes, grammar, processes)
    return builder.prepare(GeneratedListOps, config, data_dir)


def _generated_config(seed, sizes, grammar, processes) -> GeneratedConfig:
    counts = "-".join(str(size) for size in sizes.values())
    return GeneratedConfig(
        name=(
            f"seed{seed}-{counts}-length{grammar.min_length}-{grammar.max_length}"
            f"-depth{grammar.max_depth}-args{grammar.max_args}"
        ),
        max_length=grammar.max_length,
        # Of 2000 tokens at most, LRA's trees have 1035 on average.
        expected_bytes=(grammar.max_length // 2 + 100) * sum(sizes.values()),
        seed=seed,
        sizes=sizes,
        grammar=grammar,
        processes=processes,
    )


def _files_config(path, max_length) -> FilesConfig:
    files = listops_files.find(path)
    stats = {file: file.stat() for file in files.values()}
    identity = [(str(f.resolve()), s.st_size, s.st_mtime_ns) for f, s in stats.items()]
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    return FilesConfig(
        name=f"{digest}-length{max_length}",
        max_length=max_length,
        # A token takes about six characters there.
        expected_bytes=sum(s.st_size for s in stats.values()) // 5 + 1,
        files=files,
    )


def _trees(config: GeneratedConfig) -> Iterator[tuple[np.ndarray, int]]:
    count = sum(config.sizes.values())
    batches = listops_trees.iterate(
        config.seed, count, config.grammar, config.processes
    )
    for batch in batches:
        yield from zip(batch.split(), batch.labels.tolist(), strict=True)
