"""Gated linear attention and the delta rule as recurrences: numpy, float64.

Independent of the package. Position by position, one head at a time; a hidden position
is left out. Gates are `gates` of the key, so that the common tests need no more arrays.
"""

import functools
from typing import Any

import numpy as np

from ..mechanisms import Case

# Of each mechanism: the gate's name, what it is of, and of how many columns.
GATES = {
    "gla": {"log_decay": "decay"},
    "delta": {"beta": "share"},
    "gated_delta": {"beta": "share", "log_decay": "head_decay"},
    "hgrn": {"log_decay": "head_decay"},
}


def gates(name: str, key: Any, xp: Any = np) -> dict[str, Any]:
    """Gates made of a key `[..., n, H]`, by numpy or by jax.numpy."""
    if name not in GATES:
        return {}
    # A gate of garbage has no derivative; garbage in gates has a test of its own.
    one = key.dtype.type(1)
    key = xp.where(xp.isfinite(key), key, one)
    slope = xp.logaddexp(key - one, xp.zeros_like(key))
    made = {
        "decay": -slope,
        "head_decay": -slope[..., 0],
        "share": (xp.tanh(key[..., -1] / 2) + 1) / 2,
    }
    return {gate: made[kind] for gate, kind in GATES[name].items()}


def _silu_unit(x: np.ndarray) -> np.ndarray:
    x = x / (1 + np.exp(-x))
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def _states(k, v, real, beta, decay):
    """The state after each position."""
    state = np.zeros((k.shape[1], v.shape[1]))
    for t in range(len(k)):
        if real[t]:
            if decay is not None:
                state = np.exp(decay[t]).reshape(-1, 1) * state
            old = 0 if beta is None else state.T @ k[t]
            share = 1 if beta is None else beta[t]
            state = state + share * np.outer(k[t], v[t] - old)
        yield state


def _run(q, k, v, mask, causal, beta, decay, norm, eps=1e-6) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    mask = np.ones(k.shape[:2], bool) if mask is None else np.asarray(mask)
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            of = [x if x is None else _head(x, b, n, q) for x in (k, v, beta, decay)]
            keys, values, shares, decays = of
            rows = q[b, :, n]
            forth = list(_states(keys, values, mask[b], shares, decays))
            out[b, :, n] = [s.T @ x for s, x in zip(forth, rows, strict=True)]
            if causal:
                continue
            back = [None if x is None else x[::-1] for x in (keys, values)]
            more = [None if x is None else x[::-1] for x in (shares, decays)]
            behind = list(_states(*back, mask[b][::-1], *more))[::-1]
            for t in range(len(rows) - 1):
                out[b, t, n] += behind[t + 1].T @ rows[t]
    if norm is None:
        return out
    return out / np.sqrt((out**2).mean(-1, keepdims=True) + eps)


def _head(x, b, n, q):
    x = np.asarray(x, np.float64)
    return x[b, :, n * x.shape[2] // q.shape[2]]


def gla(q, k, v, mask=None, causal=False, norm="rms") -> np.ndarray:
    decay = gates("gla", k)["log_decay"]
    return _run(q, k, v, mask, causal, None, decay, norm)


def delta(q, k, v, mask=None, causal=False, norm="rms") -> np.ndarray:
    beta = gates("delta", k)["beta"]
    q, k = (_silu_unit(np.asarray(x, np.float64)) for x in (q, k))
    return _run(q, k, v, mask, causal, beta, None, norm)


def gated_delta(q, k, v, mask=None, causal=False, norm="rms") -> np.ndarray:
    made = gates("gated_delta", k)
    q, k = (_silu_unit(np.asarray(x, np.float64)) for x in (q, k))
    return _run(q, k, v, mask, causal, made["beta"], made["log_decay"], norm)


CASES = {
    name: Case(
        formula,
        gates=functools.partial(gates, name),
        signed=True,
        normalised=True,
        level={"norm": "rms"},
    )
    for name, formula in (("gla", gla), ("delta", delta), ("gated_delta", gated_delta))
}
