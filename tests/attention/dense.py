"""Parts shared by the formulas of the mechanisms: numpy, float64, dense, head by head.

Independent of the package. A hidden key is one that is left out of the arrays, not one
that is masked, so these also say what exact padding means. Layout `[B, T, N, H]`,
`[B, S, N, H]`, `[B, S, N, Hv]`; masks are boolean `[B, S]` and `[B, T]`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# ``f(q, k, v, positions of the keys)`` of one head.
Head = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def each_head(q, k, v, mask, head: Head) -> np.ndarray:
    """Runs ``head(q, k, v, positions of the keys)`` on the visible keys alone."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, length, heads, _ = q.shape
    mask = np.ones(k.shape[:2], bool) if mask is None else np.asarray(mask)
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b in range(batch):
        where = np.flatnonzero(mask[b])
        if where.size == 0:
            continue
        for n in range(heads):
            kn, vn = n * k.shape[2] // heads, n * v.shape[2] // heads
            out[b, :, n] = head(q[b, :, n], k[b, where, kn], v[b, where, vn], where)
    return out


def row_softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def masked_rows(scores, seen, values) -> np.ndarray:
    """Softmax over what each row sees; rows that see nothing are zero."""
    out = np.zeros((len(scores), values.shape[-1]))
    for i in range(len(scores)):
        if seen[i].any():
            out[i] = row_softmax(scores[i, seen[i]]) @ values[seen[i]]
    return out


def samples(q, k, v, mask) -> Iterator[Any]:
    """Every sample and head: indices, query, key, value `[T, H]` and mask `[S]`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    mask = np.ones(k.shape[:2], bool) if mask is None else np.asarray(mask)
    for b in range(q.shape[0]):
        hidden = ~mask[b][:, None]
        for n in range(q.shape[2]):
            one = (x[b, :, n * x.shape[2] // q.shape[2]] for x in (k, v))
            yield (b, n), q[b, :, n], *(np.where(hidden, 0, x) for x in one), mask[b]


def seen(rows: int, where: np.ndarray, causal: bool) -> np.ndarray:
    """1 where a query may see a key, `[T, visible keys]`."""
    past = where[None] <= np.arange(rows)[:, None]
    return past.astype(float) if causal else np.ones_like(past, float)


def elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def normed(out: np.ndarray, norm: str | None, axes, eps: float) -> np.ndarray:
    if norm == "layer":
        out = out - out.mean(axes, keepdims=True)
    scale = 1 if norm is None else np.sqrt((out**2).mean(axes, keepdims=True) + eps)
    return out / scale


def each_slope(q, k, v, mask, slopes, head) -> np.ndarray:
    """`each_head`, with the head's slope before the other arguments."""
    heads = []
    for n, slope in enumerate(np.asarray(slopes, np.float64)):
        kn, vn = (n * x.shape[2] // q.shape[2] for x in (k, v))
        arrays = q[:, :, n : n + 1], k[:, :, kn : kn + 1], v[:, :, vn : vn + 1]
        heads.append(each_head(*arrays, mask, functools.partial(head, slope)))
    return np.concatenate(heads, 2)


def fading(slope: float, rows: int, where: np.ndarray, causal: bool) -> np.ndarray:
    """exp(-slope |i - j|), `[T, visible keys]`, zero where a query may not see."""
    distance = np.abs(np.arange(rows)[:, None] - where[None])
    return np.exp(-slope * distance) * seen(rows, where, causal)
