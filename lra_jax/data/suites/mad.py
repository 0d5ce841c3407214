"""The six tests of MAD (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid
Architectures", arXiv:2403.17844); fuzzy recall has its own file.

Source: athms/mad-lab, mad/data/instances.py.
"""

import functools
from typing import Any

import numpy as np

from lra_jax.data import memory
from lra_jax.data.suites import fuzzy_recall
from lra_jax.errors import expected


def prepare(
    *,
    task: str,
    seed: int,
    num_train: int,
    num_valid: int,
    num_test: int,
    **settings: Any,
) -> memory.MemoryDataset:
    """Draws the examples of a test; the settings are those of `lra_jax.configs.mad`."""
    if task in SAME:
        learnt = tested = functools.partial(SAME[task], **settings)
    else:
        draw = functools.partial(RECALLS[task], **settings)
        learnt, tested = (functools.partial(draw, training=x) for x in (True, False))
    splits = {
        "train": (num_train, learnt),
        "valid": (num_valid, tested),
        "test": (num_test, tested),
    }
    sizes = {name: settings["vocab_size"] for name in ("vocab_size", "num_classes")}
    return memory.generate(task, seed, splits, **sizes)


_BOOK = 12345  # The seed of memorisation's table there, whatever the sequences.


def draw_compress(
    rng: np.random.Generator, count: int, *, vocab_size: int, length: int
) -> memory.Examples:
    """Compression: random tokens, followed by a special token.

    The model must compress all of them into the vector of that last position, from
    which a small decoder (`lra_jax.models.tokens.AutoEncoder`) reconstructs every
    token; as in the source, the last one too.
    """
    if vocab_size < 3:
        raise expected("--data.vocab_size", "at least 3", vocab_size)
    if length < 2:
        raise expected("--data.length", "at least 2", length)
    tokens = rng.integers(vocab_size - 1, size=(count, length))
    tokens[:, -1] = vocab_size - 1
    return memory.from_targets(tokens, tokens)


def draw_memorise(
    rng: np.random.Generator, count: int, *, vocab_size: int, length: int
) -> memory.Examples:
    """Memorisation: a row of ``key ?``; at every ``?`` the target is the key's value.

    It is the same in all sequences: the model must store the table of values in its
    weights, since the sequences themselves do not reveal it.

    The last token of the vocabulary is ``?``, keys are the lower half of the others,
    and values a permutation of the upper half.
    """
    if vocab_size < 5:
        raise expected("--data.vocab_size", "at least 5", vocab_size)
    if length < 2 or length % 2:
        raise expected("--data.length", "an even number of at least 2", length)
    book = make_book(vocab_size)
    keys = rng.integers(len(book), size=(count, length // 2))
    tokens = np.full((count, 2 * keys.shape[1]), vocab_size - 1)
    tokens[:, 0::2] = keys
    targets = np.full_like(tokens, memory.NO_TARGET)
    targets[:, 1::2] = book[keys]
    return memory.from_targets(tokens, targets)


def make_book(vocab_size: int) -> np.ndarray:
    """The value of each key, `[keys]`."""
    num_keys = (vocab_size - 1) // 2
    values = np.arange(num_keys, vocab_size - 1)
    return np.random.default_rng(_BOOK).permutation(values)[:num_keys]


def draw_selective_copy(
    rng: np.random.Generator, count: int, *, vocab_size: int, length: int, copied: int
) -> memory.Examples:
    """Selective copying.

    Tokens to copy, each in a random place among blanks, then a marker, then as many
    blanks, at which the targets are the tokens in order::

        tokens   _ a _ _ b _ c ! _ _ _
        targets  . . . . . . . . a b c

    The last token of the vocabulary is the marker, the one before it the blank. As in
    the source, each blank falls before any of the tokens to copy with the same
    probability, so that the last of them is never followed by one.
    """
    if vocab_size < 4:
        raise expected("--data.vocab_size", "at least 4", vocab_size)
    if length <= 2 * copied + 1:
        needed = f"more than {2 * copied + 1} for {copied} tokens to copy"
        raise expected("--data.length", needed, length)
    blank = vocab_size - 2
    blanks = length - 2 * copied - 1
    letters = rng.integers(blank, size=(count, copied))
    before = rng.multinomial(blanks, np.full(copied, 1 / copied), size=count)
    tokens = np.full((count, length), blank)
    places = np.cumsum(before, axis=1) + np.arange(copied)
    np.put_along_axis(tokens, places, letters, 1)
    tokens[:, -copied - 1] = vocab_size - 1
    targets = np.full_like(tokens, memory.NO_TARGET)
    targets[:, -copied:] = letters
    return memory.from_targets(tokens, targets)


def draw_recall(
    rng: np.random.Generator,
    count: int,
    *,
    training: bool,
    vocab_size: int,
    length: int,
    noise_vocab: int = 0,
    noise: float = 0.0,
) -> memory.Examples:
    """In-context recall, with or without noise.

    A sequence is a row of pairs ``k v``. Keys are drawn with replacement, and a
    repeated key has the same value as before; values differ between sequences. The last
    pair repeats an earlier key. A model predicts the next token: every one in training,
    in a test the values of keys that have occurred before. In the noisy form each pair,
    with a probability, is replaced by two tokens from a vocabulary of noise.

    There are more queries than in the source. Keys are the lower half of the vocabulary
    without noise, values its upper half, followed by noise; the last token is only a
    target, so a sequence of `length` has `length - 1` inputs.
    """
    real = vocab_size - noise_vocab
    if real < 4:
        needed = f"at least 4 more than the {noise_vocab} of noise"
        raise expected("--data.vocab_size", needed, vocab_size)
    if length < 4 or length % 2:
        raise expected("--data.length", "an even number of at least 4", length)
    num_keys, pairs = real // 2, length // 2
    book = rng.integers(num_keys, real, size=(count, num_keys))
    keys = rng.integers(num_keys, size=(count, pairs))
    is_noise = rng.random((count, pairs)) < noise
    # One pair before the last is real, so that there is a key to query.
    is_noise[np.arange(count), rng.integers(pairs - 1, size=count)] = False
    is_noise[:, -1] = False
    shown = np.zeros((count, num_keys), bool)
    repeated = np.zeros((count, pairs), bool)
    for key in range(num_keys):
        here = (keys[:, :-1] == key) & ~is_noise[:, :-1]
        shown[:, key] = here.any(1)
        repeated[:, :-1] |= here & (np.cumsum(here, 1) > 1)
    # The last key is one of those shown, all equally likely.
    keys[:, -1] = np.where(shown, rng.random(shown.shape), -1).argmax(1)
    repeated[:, -1] = True
    tokens = np.zeros((count, 2 * pairs), np.int64)
    tokens[:, 0::2] = keys
    tokens[:, 1::2] = np.take_along_axis(book, keys, 1)
    if noise_vocab:
        drawn = rng.integers(real, vocab_size, size=tokens.shape)
        tokens = np.where(np.repeat(is_noise, 2, axis=1), drawn, tokens)
    targets = tokens.copy()
    if not training:
        targets[:, 0::2] = memory.NO_TARGET
        targets[:, 1::2][~repeated] = memory.NO_TARGET
    return memory.from_targets(tokens[:, :-1], targets[:, 1:])


SAME = {
    "mad-compress": draw_compress,
    "mad-memorise": draw_memorise,
    "mad-selective-copy": draw_selective_copy,
}
"""Generators with the same sequences in training and test."""
RECALLS = {
    "mad-fuzzy-recall": fuzzy_recall.examples,
    "mad-recall": draw_recall,
    "mad-noisy-recall": draw_recall,
}
"""Generators with other targets in a test than in training."""
