"""ListOps: nested list operations, the value of a tree of 501..1999 tokens in 0..9.

Generated with a seed, or read from the official files:

    dataset = prepare(data_dir, seed=0)
    dataset = prepare(data_dir, path="lra_release")

Token ids are a fixed table (`listops_language.TOKENS`). LRA builds its vocabulary from
a hash set, whose order changes from process to process, so that a restored checkpoint
reads different tokens from those it was trained on.
"""

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from lra_jax.data import builder, checks, listops_files, listops_trees
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


class GeneratedListOps(builder.SequenceBuilder):
    """ListOps of the Long-Range Arena, generated."""

    name = "lra_listops"
    VOCAB_SIZE = VOCAB_SIZE
    NUM_CLASSES = 10


class ListOpsFiles(GeneratedListOps):
    """ListOps of the Long-Range Arena, from its files."""

    name = "lra_listops_files"


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    seed: int = 0,
    num_train: int = 96_000,
    num_valid: int = 2_000,
    num_test: int = 2_000,
    processes: int | None = None,
    path: str | os.PathLike | None = None,
    **grammar: int,
) -> SequenceDataset:
    """Opens ListOps, preparing it first if necessary.

    All trees are distinct across the splits, and do not depend on the number of
    processes. With a path, see `listops_files.find`, they come from files; of the other
    settings only `max_length`, the maximum number of tokens, is used.

    Args:
      data_dir: see `builder.prepare`.
      seed, num_train, num_valid, num_test, processes, path: see
        `lra_jax.configs.listops.ListOpsData`.
      **grammar: see `listops_language.Grammar`.

    Returns:
      Splits of `tokens` and `label`; for errors, see `listops_files`, `Grammar` and
      `builder.prepare`.
    """
    if path is not None:
        return _from_files(path, grammar.get("max_length", 2_000), data_dir)
    rules = Grammar(**grammar)
    sizes = {"train": num_train, "valid": num_valid, "test": num_test}
    counts = "-".join(map(str, sizes.values()))
    total = sum(sizes.values())

    def examples(_: pathlib.Path) -> builder.Splits:
        trees = _trees(seed, total, rules, processes)
        return {split: (count, trees) for split, count in sizes.items()}

    config = builder.SequenceConfig(
        name=(
            f"seed{seed}-{counts}-length{rules.min_length}-{rules.max_length}"
            f"-depth{rules.max_depth}-args{rules.max_args}"
        ),
        max_length=rules.max_length,
        # LRA's trees have 1035 tokens on average, and at most 2000.
        expected_bytes=(rules.max_length // 2 + 100) * total,
        examples=examples,
    )
    return builder.prepare(GeneratedListOps, config, data_dir)


def _from_files(
    path: str | os.PathLike, max_length: int, data_dir: str | os.PathLike | None
) -> SequenceDataset:
    files = listops_files.find(path)
    config = builder.SequenceConfig(
        name=f"{checks.digest(files.values())}-length{max_length}",
        max_length=max_length,
        # A token takes about six characters in the files.
        expected_bytes=sum(f.stat().st_size for f in files.values()) // 5 + 1,
        examples=lambda root: {
            split: (listops_files.count(file), listops_files.read(file, max_length))
            for split, file in files.items()
        },
    )
    return builder.prepare(ListOpsFiles, config, data_dir)


def _trees(
    seed: int, count: int, grammar: Grammar, processes: int | None
) -> Iterator[tuple[np.ndarray, int]]:
    for batch in listops_trees.iterate(seed, count, grammar, processes):
        yield from zip(batch.split(), batch.labels.tolist(), strict=True)
