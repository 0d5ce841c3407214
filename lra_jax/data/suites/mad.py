"""The six tests of MAD (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid
Architectures", arXiv:2403.17844), each in its own file."""

import functools
from typing import Any

from lra_jax.data import memory
from lra_jax.data.suites import (
    compress,
    fuzzy_recall,
    memorise,
    recall,
    selective_copy,
)

# Generators with the same sequences in training and test, and with different ones.
SAME = {
    "mad-compress": compress.examples,
    "mad-memorise": memorise.examples,
    "mad-selective-copy": selective_copy.examples,
}
RECALLS = {
    "mad-fuzzy-recall": fuzzy_recall.examples,
    "mad-recall": recall.examples,
    "mad-noisy-recall": recall.examples,
}


def prepare(
    *,
    task: str,
    seed: int,
    num_train: int,
    num_valid: int,
    num_test: int,
    vocab_size: int,
    **settings: Any,
) -> memory.MemoryDataset:
    """Draws the examples of a test.

    Args:
      task: its name.
      seed: fixes every example.
      num_train, num_valid, num_test: number of examples of each.
      vocab_size: number of tokens, including those with a special meaning.
      **settings: further settings of the generator.
    """
    settings["vocab_size"] = vocab_size
    if task in SAME:
        learnt = tested = functools.partial(SAME[task], **settings)
    else:
        draw = functools.partial(RECALLS[task], **settings)
        learnt, tested = (functools.partial(draw, training=x) for x in (True, False))
    return memory.generate(
        task,
        seed,
        {
            "train": (num_train, learnt),
            "valid": (num_valid, tested),
            "test": (num_test, tested),
        },
        vocab_size=vocab_size,
        num_classes=vocab_size,
    )
