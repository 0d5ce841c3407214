"""MAD's in-context recall, with or without noise (Poli et al. 2024,
arXiv:2403.17844).

A sequence is a row of pairs ``k v``. Keys are drawn with replacement, and a repeated
key has the same value as before; values differ between sequences. The last pair repeats
an earlier key. A model predicts the next token: every one in training, in a test the
values of keys that have occurred before. In the noisy form each pair, with a
probability, is replaced by two tokens from a vocabulary of noise.

Source: athms/mad-lab, mad/data/instances.py, with several queries. Keys are the lower
half of the vocabulary without noise, values its upper half, followed by noise; the
last token is only a target, so a sequence of `length` has `length - 1` inputs.
"""

import numpy as np

from lra_jax.data import memory
from lra_jax.errors import expected


def examples(
    rng: np.random.Generator,
    count: int,
    *,
    training: bool,
    vocab_size: int,
    length: int,
    noise_vocab: int = 0,
    noise: float = 0.0,
) -> memory.Examples:
    """Draws sequences; in training every next token is a target."""
    real = vocab_size - noise_vocab
    if real < 4:
        wanted = f"at least 4 more than the {noise_vocab} of noise"
        raise expected("--data.vocab_size", wanted, vocab_size)
    if length < 4 or length % 2:
        raise expected("--data.length", "an even number of at least 4", length)
    if not 0 <= noise < 1:
        raise expected("--data.noise", "a number in [0, 1)", noise)
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
    return memory.whole(tokens[:, :-1], targets[:, 1:])
