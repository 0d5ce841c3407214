"""The sparse patterns from their definitions, pair by pair: plain Python and numpy.

Independent of the package: `attention` is a dense softmax over the keys that a pattern
lets a query see, and that the mask does not hide.
"""

import functools

import numpy as np

from ..mechanisms import Case

_BITS = 0xFFFFFFFF


def local(i: int, j: int, window: int = 64, block: int | None = None) -> bool:
    if block is not None:
        return i // block == j // block
    return abs(i - j) <= window


def longformer(i: int, j: int, window: int = 64, global_tokens: int = 1) -> bool:
    return abs(i - j) <= window or min(i, j) < global_tokens


def sparse(
    i: int, j: int, stride: int, pattern: str = "strided", summary: int | None = None
) -> bool:
    if pattern == "strided":
        return abs(i - j) <= stride or (i - j) % stride == 0
    summary = min(8, stride) if summary is None else summary
    return i // stride == j // stride or j % stride in range(stride)[-summary:]


def _hash(seed: int, head: int, row: int, number: int) -> int:
    bits = seed & _BITS
    for word in (head, row, number):
        bits ^= word
        bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _BITS
        bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _BITS
        bits ^= bits >> 16
    return bits


def random_blocks(
    head: int, row: int, last: int, num_random: int, seed: int, causal: bool
) -> list[int]:
    """Floyd's sample without replacement, from hashed numbers."""
    if causal:
        free = list(range(1, row - 1))
    elif 0 < row < last:
        free = [block for block in range(1, last) if abs(block - row) > 1]
    else:
        free = []
    if len(free) <= num_random:
        return free
    picks: list[int] = []
    for number in range(num_random):
        top = len(free) - num_random + number
        drawn = _hash(seed, head, row, number) % (top + 1)
        picks.append(top if drawn in picks else drawn)
    return [free[pick] for pick in picks]


def _bigbird(
    length: int,
    heads: int,
    real: int,
    causal: bool,
    block: int = 64,
    num_random: int = 3,
    seed: int = 0,
) -> np.ndarray:
    count, last = -(-length // block), (real - 1) // block
    met = np.zeros((heads, count, count), bool)
    for head in range(heads):
        for row in range(count):
            for column in range(count):
                met[head, row, column] = abs(row - column) <= 1 or column == 0
                if not causal and (row == 0 or last in (row, column)):
                    met[head, row, column] = True
            met[head, row, random_blocks(head, row, last, num_random, seed, causal)] = (
                True
            )
    place = np.arange(length) // block
    return met[:, place][:, :, place]


def visible(
    name: str, length: int, heads: int, real: int, causal: bool, **options
) -> np.ndarray:
    """`[N, T, T]`, True where a query (row) may see a key; ``real`` positions exist."""
    if name == "bigbird":
        seen = _bigbird(length, heads, real, causal, **options)
    else:
        rule = {"local": local, "longformer": longformer, "sparse": sparse}[name]
        one = [[rule(i, j, **options) for j in range(length)] for i in range(length)]
        seen = np.broadcast_to(np.array(one), (heads, length, length))
    return seen & np.tri(length, dtype=bool) if causal else seen


def weights(name: str, q, k, mask=None, causal: bool = False, **options) -> np.ndarray:
    """The dense matrix `[B, N, T, T]`."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    batch, length, heads, width = q.shape
    mask = np.ones((batch, length), bool) if mask is None else np.asarray(mask)
    out = np.zeros((batch, heads, length, length))
    for b in range(batch):
        real = int(np.flatnonzero(mask[b]).max(initial=-1)) + 1
        seen = visible(name, length, heads, real, causal, **options) & mask[b]
        for n in range(heads):
            scores = q[b, :, n] @ k[b, :, n * k.shape[2] // heads].T / np.sqrt(width)
            for i in range(length):
                where = np.flatnonzero(seen[n, i])
                if where.size:
                    row = np.exp(scores[i, where] - scores[i, where].max())
                    out[b, n, i, where] = row / row.sum()
    return out


def attention(
    name: str, q, k, v, mask=None, causal: bool = False, **options
) -> np.ndarray:
    """Dense attention over the pairs that a pattern allows, `[B, T, N, Hv]`."""
    matrix = weights(name, q, k, mask, causal, **options)
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    if mask is not None:  # what a padded place holds may be anything
        v = np.where(np.asarray(mask)[:, :, None, None], v, 0)
    return np.einsum("bnts,bsnv->btnv", matrix, v)


CASES = {
    name: Case(functools.partial(attention, name), options, mean=True)
    for name, options in {
        "local": {"window": 2},
        "longformer": {"window": 1, "global_tokens": 2},
        "bigbird": {"block": 1, "num_random": 1},
        "sparse": {"stride": 3},
    }.items()
}
