"""Gated attention units and FLASH from their formulas: numpy, float64, pair by pair.

Independent of the package. Layout and masks as in `reference`; q is z, k is not read.
"""

import math

import numpy as np

from ..mechanisms import Case


def bucket(distance: int, causal: bool) -> int:
    """T5's bucket of key minus query position."""
    count, first = 32, 0
    if causal:
        distance = max(-distance, 0)
    else:
        count = 16
        first = 16 if distance > 0 else 0
        distance = abs(distance)
    half = count // 2
    if distance < half:
        return first + distance
    far = half + int(math.log(distance / half) / math.log(128 / half) * half + 1e-9)
    return first + min(far, count - 1)


def _activation(name: str, x: float) -> float:
    if name == "relu2":
        return max(x, 0.0) ** 2
    mean, deviation = math.sqrt(0.5), math.sqrt(1 / (4 * math.pi))
    return 0.5 * (1 + math.erf((x - mean) / (deviation * math.sqrt(2))))


def _rotate(x: np.ndarray) -> np.ndarray:
    half = x.shape[1] // 2
    rates = 10000.0 ** -np.linspace(0, 1, half)
    turn = np.exp(1j * np.arange(len(x))[:, None] * rates)
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * turn
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def _heads(z, n, scale, offset, rotate) -> list[np.ndarray]:
    """The unit's queries, then its keys."""
    made = [z * scale[c, n] + offset[c, n] for c in range(len(scale))]
    return [_rotate(x) for x in made] if rotate else made


def gau(q, k, v, mask=None, causal=False, **options) -> np.ndarray:
    return _units(q, v, mask, causal, _gau_row, **options)


def flash(q, k, v, mask=None, causal=False, rotate=True, **options) -> np.ndarray:
    return _units(q, v, mask, causal, _flash_row, rotate=rotate, **options)


def _units(q, v, mask, causal, row, *, scale, offset, rotate=False, **options):
    q, v = np.asarray(q, np.float64), np.asarray(v, np.float64)
    scale, offset = (np.asarray(x, np.float64) for x in (scale, offset))
    mask = np.ones(q.shape[:2], bool) if mask is None else np.asarray(mask)
    batch, length, heads, _ = q.shape
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b in range(batch):
        for n in range(heads):
            made = _heads(q[b, :, n], n, scale, offset, rotate)
            values = v[b, :, n * v.shape[2] // heads]
            for i in range(length):
                seen = [j for j in np.flatnonzero(mask[b]) if not causal or j <= i]
                for j, weight in row(i, seen, made, n, causal, **options):
                    out[b, i, n] += weight * values[j]
    return out


def _gau_row(
    i, seen, made, n, causal, *, relative_bias, activation="relu2", length=None
):
    for j in seen:
        score = made[0][i] @ made[1][j] / (length or len(seen))
        yield (
            j,
            _activation(activation, score + relative_bias[bucket(j - i, causal), n]),
        )


def _flash_row(
    i, seen, made, n, causal, *, relative_bias, chunk, activation="relu2", length=None
):
    near, far, near_key, far_key = made
    summed = [j for j in seen if not causal or j // chunk < i // chunk]
    for j in summed:
        yield j, far[i] @ far_key[j] / (length or len(summed))
    for j in seen:
        if j // chunk == i // chunk:
            score = near[i] @ near_key[j] / chunk
            score += relative_bias[bucket(j - i, causal), n]
            yield j, _activation(activation, score)


def arrays(count: int, heads: int, head_dim: int) -> dict[str, np.ndarray]:
    """The arrays of a unit that makes so many queries and keys of one projection."""
    rng = np.random.default_rng(count)
    shapes = {"scale": (count, heads, head_dim), "offset": (count, heads, head_dim)}
    shapes["relative_bias"] = (32, heads)
    return {k: rng.normal(size=x).astype("float32") / 2 for k, x in shapes.items()}


# Squares of products of queries have no room beyond 1e9.
CASES = {
    "gau": Case(gau, lambda *sizes: arrays(2, *sizes), largest=1e9),
    "flash": Case(
        flash,
        lambda *sizes: arrays(4, *sizes) | {"chunk": 3},
        signed=True,
        paired=True,
        largest=1e9,
    ),
}
