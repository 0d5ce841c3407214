"""Every mechanism written from its formula: numpy, float64, dense, one head at a time.

Independent of the package. A hidden key is one that is left out of the arrays, not one
that is masked, so these also say what exact padding means. Layout `[B, T, N, H]`,
`[B, S, N, H]`, `[B, S, N, Hv]`; masks are boolean `[B, S]` and `[B, T]`.
"""

import functools
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


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear(q, k, v, mask=None, eps=1e-6, causal=False) -> np.ndarray:
    def head(q, k, v, where):
        scores = _elu(q) @ _elu(k).T * _earlier(len(q), where, causal)
        return scores @ v / (scores.sum(-1, keepdims=True) + eps)

    return _each_head(q, k, v, mask, head)


def norm(
    q, k, v, mask=None, causal=False, norm="rms", per_head=False, eps=1e-6, phi=_elu
) -> np.ndarray:
    def head(q, k, v, where):
        return (phi(q) @ phi(k).T * _earlier(len(q), where, causal)) @ v

    out = _each_head(q, k, v, mask, head)
    return _normed(out, norm, 3 if per_head else (2, 3), eps)


def _each_slope(q, k, v, mask, slopes, head) -> np.ndarray:
    """`_each_head`, with the head's slope before the other arguments."""
    heads = []
    for n, slope in enumerate(np.asarray(slopes, np.float64)):
        kn, vn = (n * x.shape[2] // q.shape[2] for x in (k, v))
        arrays = q[:, :, n : n + 1], k[:, :, kn : kn + 1], v[:, :, vn : vn + 1]
        heads.append(_each_head(*arrays, mask, functools.partial(head, slope)))
    return np.concatenate(heads, 2)


def _fading(slope: float, rows: int, where: np.ndarray, causal: bool) -> np.ndarray:
    """exp(-slope |i - j|), `[T, visible keys]`, zero where a query may not see."""
    distance = np.abs(np.arange(rows)[:, None] - where[None])
    return np.exp(-slope * distance) * _earlier(rows, where, causal)


def lightning(
    q, k, v, mask=None, causal=False, slopes=None, norm=None, eps=1e-6
) -> np.ndarray:
    """Not normalised, or by the root mean square over all heads."""
    heads = q.shape[2]
    if slopes is None:
        power = max(p for p in (1, 2, 4, 8) if p <= heads)
        slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
        slopes += [2 ** (-4 * (n + 1) / power) for n in range(0, 2 * power, 2)]
        slopes = slopes[:heads]

    def head(slope, q, k, v, where):
        return (q @ k.T * _fading(slope, len(q), where, causal)) @ v

    return _normed(_each_slope(q, k, v, mask, slopes, head), norm, (2, 3), eps)


def _normed(out: np.ndarray, norm: str | None, axes, eps: float) -> np.ndarray:
    if norm == "layer":
        out = out - out.mean(axes, keepdims=True)
    scale = 1 if norm is None else np.sqrt((out**2).mean(axes, keepdims=True) + eps)
    return out / scale


def retention(
    q, k, v, mask=None, causal=False, slopes=None, rotate=True, norm="layer", eps=1e-6
) -> np.ndarray:
    """The parallel form of the paper, with complex numbers for the rotation."""
    gammas = 1 - 2.0 ** (-5 - np.arange(q.shape[2]))
    slopes = -np.log(gammas) if slopes is None else slopes
    theta = 1 / 10000 ** np.linspace(0, 1, q.shape[3] // 2)

    def turned(x, places):
        if not rotate:
            return x
        numbers = x[:, 0::2] + 1j * x[:, 1::2]
        return numbers * np.exp(1j * places[:, None] * theta)

    def head(slope, q, k, v, where):
        rows = np.arange(len(q))
        scores = (turned(q, rows) @ turned(k, where).conj().T).real
        scores = scores / np.sqrt(q.shape[1])
        span = np.arange(where[0], where[-1] + 1)
        total = _fading(slope, len(q), span, causal)
        if causal:  # a query behind the last real position looks back from its own
            total = _fading(slope, len(q), np.arange(where[0], len(q)), causal)
        total = np.where(total.any(1), total.sum(1), 1)
        scores *= _fading(slope, len(q), where, causal) / np.sqrt(total)[:, None]
        bound = np.maximum(np.abs(scores.sum(-1, keepdims=True)), 1)
        return scores / bound @ v

    return _normed(_each_slope(q, k, v, mask, slopes, head), norm, 3, eps)


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


def flow(
    q,
    k,
    v,
    mask=None,
    query_mask=None,
    clip: float | None = 30.0,
    eps=1e-6,
    competition=True,
    allocation=True,
) -> np.ndarray:
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
        weights = (a / incoming[:, None]) @ b.T
        if allocation:
            weights = weights / (1 + np.exp(-sink * len(q) / len(k)))[:, None]
        if competition:
            weights = weights * _row_softmax(source) * len(k)
        return weights @ v

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


def flow_causal(
    q,
    k,
    v,
    mask=None,
    clip: float | None = 30.0,
    eps=1e-6,
    competition=True,
    allocation=True,
) -> np.ndarray:
    """The authors' causal form, position by position; a hidden one does not exist."""

    def phi(x):
        return 1 / (1 + np.exp(-x))

    def one_head(q, k, v):
        a, b, count = phi(q), phi(k), np.arange(1, len(q) + 1)
        out, logits = np.zeros((len(q), v.shape[-1])), np.zeros(len(q))
        incoming, outgoing = np.zeros(len(q)), np.zeros(len(q))
        shares = np.ones(len(q))
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
            if competition:
                shares[i] = _row_softmax(logits[past])[-1] * count[i]
            out[i] = a[i] @ b[past].T / incoming[i] * shares[past] @ v[past]
            if allocation:
                out[i] /= 1 + np.exp(-sink)
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


def performer(q, k, v, mask=None, projection=None, causal=False) -> np.ndarray:
    """Weights in proportion to ``sum_r exp(w_r . q' + w_r . k' - |k'|^2 / 2)``."""
    w = np.asarray(projection, np.float64)

    def head(q, k, v, where):
        q, k = (x / x.shape[-1] ** 0.25 for x in (q, k))
        exponents = (q @ w.T)[:, None] + (k @ w.T - (k**2).sum(-1)[:, None] / 2)
        top = exponents.max(-1)
        logits = top + np.log(np.exp(exponents - top[..., None]).sum(-1))
        seen = _earlier(len(q), where, causal) > 0
        top = np.where(seen, logits, -np.inf).max(-1, keepdims=True)
        # A row that sees nothing has no largest logit; its weights stay zero.
        top = np.where(np.isfinite(top), top, 0)
        weights = np.where(seen, np.exp(np.minimum(logits - top, 0)), 0)
        return weights @ v / np.maximum(weights.sum(-1, keepdims=True), 1e-300)

    return _each_head(q, k, v, mask, head)


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


def fnet(q, k, v, mask=None) -> np.ndarray:
    """The transform of each sample up to its last visible position."""
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    mask = np.ones(v.shape[:2], bool) if mask is None else np.asarray(mask)
    out = np.zeros(v.shape)
    for b in range(v.shape[0]):
        real = np.flatnonzero(mask[b]).max(initial=-1) + 1
        if real:
            x = np.where(mask[b, :real, None, None], v[b, :real], 0)
            spectrum = np.fft.fft2(x.reshape(real, -1), norm="ortho")
            out[b, :real] = spectrum.real.reshape(x.shape)
    return out


def nystrom(
    q, k, v, mask=None, query_mask=None, num_landmarks=64, iterations=6
) -> np.ndarray:
    """Landmarks are means of the segments of what is visible, evenly dealt."""

    def landmarks(x):
        segment = np.arange(len(x)) * num_landmarks // len(x)
        return np.stack([x[segment == one].mean(0) for one in np.unique(segment)])

    def head(q, k, v, where):
        root = q.shape[-1] ** 0.5
        query_marks, key_marks = landmarks(q), landmarks(k)
        first = _row_softmax(q @ key_marks.T / root)
        middle = _row_softmax(query_marks @ key_marks.T / root)
        last = _row_softmax(query_marks @ k.T / root)
        inverse = middle.T / middle.sum(0).max() / middle.sum(1).max()
        one = np.eye(len(middle))
        for _ in range(iterations):
            step = middle @ inverse
            inverse = inverse @ (13 * one - step @ (15 * one - step @ (7 * one - step)))
            inverse = inverse / 4
        return first @ inverse @ last @ v

    out = np.zeros((*q.shape[:3], v.shape[-1]))
    rows = np.ones(q.shape[:2], bool) if query_mask is None else np.asarray(query_mask)
    for b in range(q.shape[0]):
        if rows[b].any():
            sample = None if mask is None else np.asarray(mask)[b : b + 1]
            arrays = np.asarray(q)[b, rows[b]][None], k[b : b + 1], v[b : b + 1]
            out[b, rows[b]] = _each_head(*arrays, sample, head)[0]
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
