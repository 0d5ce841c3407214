"""Synthesizer, Sinkhorn and Reformer from their formulas: numpy, float64, dense.

Independent of the package. Layout and masks as in `reference`.
"""

import numpy as np


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _masked_rows(scores, seen, values) -> np.ndarray:
    """Softmax over what each row sees; rows that see nothing are zero."""
    out = np.zeros((len(scores), values.shape[-1]))
    for i in range(len(scores)):
        if seen[i].any():
            out[i] = _softmax(scores[i, seen[i]]) @ values[seen[i]]
    return out


def _samples(q, k, v, mask):
    """Every sample and head: indices, query, key, value `[T, H]` and mask `[S]`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    mask = np.ones(k.shape[:2], bool) if mask is None else np.asarray(mask)
    for b in range(q.shape[0]):
        hidden = ~mask[b][:, None]
        for n in range(q.shape[2]):
            one = (x[b, :, n * x.shape[2] // q.shape[2]] for x in (k, v))
            yield (b, n), q[b, :, n], *(np.where(hidden, 0, x) for x in one), mask[b]


def synthesizer(
    q, k, v, mask=None, causal=False, *, variant, first, first_bias=None, **more
) -> np.ndarray:
    """The four variants; ``more`` holds ``second`` and ``second_bias``."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    second, second_bias = more.get("second"), more.get("second_bias")

    def layer(x, kernel, bias, n):
        scores = np.maximum(x, 0) @ np.asarray(kernel, np.float64)[n]
        return scores if bias is None else scores + np.asarray(bias, np.float64)[n]

    for (b, n), queries, _, values, real in _samples(q, k, v, mask):
        rows, columns = len(queries), len(values)
        if variant == "dense":
            scores = layer(queries, first, first_bias, n)[:, :columns]
        elif variant == "factorised_dense":
            x = layer(queries, first, first_bias, n)
            y = layer(queries, second, second_bias, n)
            width = y.shape[1]
            scores = np.stack(
                [x[:, j // width] * y[:, j % width] for j in range(columns)], 1
            )
        elif variant == "random":
            scores = np.asarray(first, np.float64)[n, :rows, :columns]
        else:
            scores = np.asarray(first, np.float64)[n, :rows]
            scores = scores @ np.asarray(second, np.float64)[n, :columns].T
        seen = np.broadcast_to(real, scores.shape)
        seen = seen & np.tri(rows, columns, dtype=bool) if causal else seen
        out[b, :, n] = _masked_rows(scores, seen, values)
    return out


def sinkhorn(
    q,
    k,
    v,
    mask=None,
    *,
    sort_kernel,
    sort_bias=None,
    block,
    iterations=8,
    temperature=0.75,
) -> np.ndarray:
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for (b, n), queries, keys, values, real in _samples(q, k, v, mask):
        sizes = [real[s : s + block].sum() for s in range(0, len(keys), block)]
        live = np.flatnonzero(sizes)
        if live.size == 0:
            continue
        fill = [(0, -len(keys) % block), (0, 0)]
        keys_by_block = np.pad(keys, fill).reshape(-1, block, keys.shape[1])[live]
        values_by_block = np.pad(values, fill).reshape(-1, block, values.shape[1])[live]
        real_by_block = np.pad(real, fill[0]).reshape(-1, block)[live]
        means = keys_by_block.sum(1) / np.array(sizes)[live, None]
        scores = means @ np.asarray(sort_kernel, np.float64)[n][:, live]
        if sort_bias is not None:
            scores = scores + np.asarray(sort_bias, np.float64)[n, live]
        sorting = np.exp(scores / temperature)
        for _ in range(iterations):
            sorting = sorting / sorting.sum(1, keepdims=True)
            sorting = sorting / sorting.sum(0, keepdims=True)
        for number, own in enumerate(live):
            rows = slice(own * block, min((own + 1) * block, len(queries)))
            both_keys = np.concatenate(
                [keys_by_block[number], np.tensordot(sorting[number], keys_by_block, 1)]
            )
            both_values = np.concatenate(
                [
                    values_by_block[number],
                    np.tensordot(sorting[number], values_by_block, 1),
                ]
            )
            seen = np.concatenate([real_by_block[number], real_by_block.any(0)])
            scores = queries[rows] @ both_keys.T / np.sqrt(queries.shape[1])
            seen = np.broadcast_to(seen, scores.shape)
            out[b, rows, n] = _masked_rows(scores, seen, both_values)
    return out


def reformer(
    q, k, v, mask=None, *, chunk, num_buckets, num_hashes=2, seed=0
) -> np.ndarray:
    """Position by position; hidden ones do not exist."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    rng = np.random.default_rng(seed)
    rotations = rng.normal(size=(num_hashes, q.shape[3], num_buckets // 2))
    for (b, n), queries, _, values, real in _samples(q, k, v, mask):
        where = np.flatnonzero(real)
        x, values = queries[where], values[where]
        met = np.zeros((len(x), len(x)), bool)
        for rotation in rotations:
            turned = x @ rotation
            bucket = np.concatenate([turned, -turned], -1).argmax(-1)
            places = sorted(range(len(x)), key=lambda i: (bucket[i], i))
            number = {i: place // chunk for place, i in enumerate(places)}
            for i in range(len(x)):
                for j in range(len(x)):
                    near = number[i] - number[j] in (0, 1)
                    met[i, j] |= bucket[i] == bucket[j] and near
        np.fill_diagonal(met, False)
        np.fill_diagonal(met, ~met.any(-1))
        keys = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
        out[b, where, n] = _masked_rows(x @ keys.T / np.sqrt(x.shape[1]), met, values)
    return out


def luna(q, k, v, mask=None, causal=False, *, memory) -> np.ndarray:
    """Packed by the memory and unpacked; causal by means over what was seen."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    scale = q.shape[-1] ** -0.5
    for (b, n), queries, keys, values, real in _samples(q, k, v, mask):
        slots = np.asarray(memory, np.float64)[b % len(memory), :, n]
        where = np.flatnonzero(real)
        scores = slots @ keys[where].T * scale
        if not causal:
            if where.size:
                packed = _softmax(scores)
                unpack = _softmax(queries @ (packed @ keys[where]).T * scale)
                out[b, :, n] = unpack @ packed @ values[where]
            continue
        pack = np.where(scores > 0, scores + 1, np.exp(np.minimum(scores, 0)))
        for i, x in enumerate(queries):
            seen = where <= i
            if seen.any():
                past = pack[:, seen] / seen.sum()
                unpack = _softmax(past @ keys[where[seen]] @ x * scale)
                out[b, i, n] = unpack @ past @ values[where[seen]]
    return out
