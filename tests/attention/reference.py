"""Every mechanism written from its formula: numpy, float64, dense, one head at a time.

Independent of the package. A hidden key is one that is left out of the arrays, not one
that is masked, so these also say what exact padding means. Layout `[B, T, N, H]`,
`[B, S, N, H]`, `[B, S, N, Hv]`; masks are boolean `[B, S]` and `[B, T]`.
"""

from collections.abc import Callable

import numpy as np

Head = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _each_head(q, k, v, mask, head: Head) -> np.ndarray:
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


def _row_softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def softmax(q, k, v, mask=None, causal=False) -> np.ndarray:
    def head(q, k, v, where):
        logits = q @ k.T / np.sqrt(q.shape[-1])
        if not causal:
            return _row_softmax(logits) @ v
        out = np.zeros((len(q), v.shape[-1]))
        for i in range(len(q)):
            seen = where <= i
            if seen.any():
                out[i] = _row_softmax(logits[i, seen]) @ v[seen]
        return out

    return _each_head(q, k, v, mask, head)


def _earlier(rows: int, where: np.ndarray, causal: bool) -> np.ndarray:
    """1 where a query may see a key, `[T, visible keys]`."""
    seen = where[None] <= np.arange(rows)[:, None]
    return seen.astype(float) if causal else np.ones_like(seen, float)


def linear(q, k, v, mask=None, eps=1e-6, causal=False) -> np.ndarray:
    def phi(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def head(q, k, v, where):
        scores = phi(q) @ phi(k).T * _earlier(len(q), where, causal)
        return scores @ v / (scores.sum(-1, keepdims=True) + eps)

    return _each_head(q, k, v, mask, head)


def decayed(q, k, v, slopes) -> np.ndarray:
    """``sum_{j <= i} (q_i . k_j) exp(-slope (i - j)) v_j``, not normalised."""
    distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for n, slope in enumerate(np.asarray(slopes, np.float64)):
        weights = np.where(distance < 0, 0, np.exp(-slope * np.maximum(distance, 0)))
        for b in range(q.shape[0]):
            out[b, :, n] = (q[b, :, n] @ k[b, :, n].T * weights) @ v[b, :, n]
    return out


def cosformer(
    q, k, v, mask=None, max_length=None, eps=1e-6, causal=False
) -> np.ndarray:
    longest = max(q.shape[1], k.shape[1]) if max_length is None else max_length

    def head(q, k, v, where):
        distance = np.arange(len(q))[:, None] - where[None]
        scores = np.maximum(q, 0) @ np.maximum(k, 0).T
        scores = scores * np.cos(np.pi / 2 * distance / longest)
        scores = scores * _earlier(len(q), where, causal)
        return scores @ v / np.maximum(scores.sum(-1, keepdims=True), eps)

    return _each_head(q, k, v, mask, head)


def flow(q, k, v, mask=None, query_mask=None, clip=1.0, eps=1e-6) -> np.ndarray:
    def phi(x):
        return 1 / (1 + np.exp(-x))

    def one_head(q, k, v):
        a, b = phi(q), phi(k)
        incoming = (a + eps) @ (b.sum(0) + eps)
        outgoing = (b + eps) @ (a.sum(0) + eps)
        sink = (a + eps) @ ((b / outgoing[:, None]).sum(0) + eps)
        source = (b + eps) @ ((a / incoming[:, None]).sum(0) + eps)
        if clip is not None:
            source = np.clip(source, -clip, clip)
        competition = _row_softmax(source) * len(k)
        allocation = 1 / (1 + np.exp(-sink * len(q) / len(k)))
        weights = allocation[:, None] * (a / incoming[:, None]) @ b.T
        return (weights * competition) @ v

    out = np.zeros((*q.shape[:3], v.shape[-1]))
    rows = np.ones(q.shape[:2], bool) if query_mask is None else np.asarray(query_mask)
    for n in range(q.shape[0]):
        if rows[n].any():
            sample = None if mask is None else np.asarray(mask)[n : n + 1]
            out[n, rows[n]] = _each_head(
                np.asarray(q)[n, rows[n]][None],
                k[n : n + 1],
                v[n : n + 1],
                sample,
                lambda q, k, v, _: one_head(q, k, v),
            )[0]
    return out


def flow_causal(q, k, v, mask=None, clip=1.0, eps=1e-6) -> np.ndarray:
    """The authors' causal form, position by position; a hidden one does not exist."""

    def phi(x):
        return 1 / (1 + np.exp(-x))

    def one_head(q, k, v):
        a, b, count = phi(q), phi(k), np.arange(1, len(q) + 1)
        out, logits = np.zeros((len(q), v.shape[-1])), np.zeros(len(q))
        incoming, outgoing, competition = (np.zeros(len(q)) for _ in range(3))
        for i in range(len(q)):
            past = slice(0, i + 1)
            incoming[i] = (a[i] + eps) @ (b[past].sum(0) + eps)
            outgoing[i] = (b[i] + eps) @ (a[past].sum(0) + eps)
            to_sink = (b[past] * (count / outgoing)[past, None]).sum(0)
            to_source = (a[past] * (count / incoming)[past, None]).sum(0)
            sink = (a[i] + eps) @ (to_sink + eps) / count[i]
            logits[i] = (b[i] + eps) @ (to_source + eps) / count[i]
            if clip is not None:
                logits[i] = np.clip(logits[i], -clip, clip)
            competition[i] = _row_softmax(logits[past])[-1] * count[i]
            weights = a[i] @ b[past].T / incoming[i] * competition[past]
            out[i] = weights @ v[past] / (1 + np.exp(-sink))
        return out

    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    real = np.ones(q.shape[:2], bool) if mask is None else np.asarray(mask)
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    with np.errstate(divide="ignore"):  # counts over flows that are still to come
        for b in range(q.shape[0]):
            rows = np.flatnonzero(real[b])
            for n in range(q.shape[2]):
                kn, vn = (n * x.shape[2] // q.shape[2] for x in (k, v))
                head = one_head(q[b, rows, n], k[b, rows, kn], v[b, rows, vn])
                out[b, rows, n] = head
    return out


def linformer(q, k, v, e, f, mask=None) -> np.ndarray:
    """The linear projection: slots are sums over the visible positions."""
    heads = q.shape[2]
    mask = np.ones(k.shape[:2], bool) if mask is None else np.asarray(mask)
    e, f = (np.asarray(x, np.float64) for x in (e, f))
    e, f = (np.broadcast_to(x, (heads, *x.shape[-2:])) for x in (e, f))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(q.shape[0]):
        where = np.flatnonzero(mask[b])
        for n in range(heads):
            kn, vn = n * k.shape[2] // heads, n * v.shape[2] // heads
            keys = e[n][:, where] @ np.asarray(k, np.float64)[b, where, kn]
            values = f[n][:, where] @ np.asarray(v, np.float64)[b, where, vn]
            logits = np.asarray(q, np.float64)[b, :, n] @ keys.T
            out[b, :, n] = _row_softmax(logits / np.sqrt(q.shape[-1])) @ values
    return out


def linformer_pooled(q, k, v, window, kind, mask=None) -> np.ndarray:
    """Mean or max over the visible positions of each window that has any."""
    reduce = {"mean": np.mean, "max": np.max}[kind]

    def head(q, k, v, where):
        groups = [where // window == slot for slot in np.unique(where // window)]
        keys = np.stack([reduce(k[group], axis=0) for group in groups])
        values = np.stack([reduce(v[group], axis=0) for group in groups])
        return _row_softmax(q @ keys.T / np.sqrt(q.shape[-1])) @ values

    return _each_head(q, k, v, mask, head)
