"""The measured limits of the machine, and the minimal work of a case.

Two rates are measured first: bytes copied per second, and arithmetic per second of a
matrix product in the dtype. A case cannot be faster than its *floor*, the larger of

- its arguments and results, moved once, at the copy rate;
- its arithmetic at the product rate, if its least arithmetic is known.

The share of the roofline is the floor divided by the measured time. Least arithmetic:
softmax 4 T S H per head (half of it if causal; 3 times with the backward pass, 3.5
times if that recomputes the weights); per step of a state `[H, H]` 2 H^2 to add to it
and 2 H^2 to read it, with two states for cosFormer, and for the delta rule 2 H^2 to
read what it will replace; Linformer with learned projections 8 T K H; and the dense
layers of a model: its MLPs, and those of the four projections that the mechanism has.
All of these take three times as much with the backward pass.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.benchmarking.cases import FUSED, MODEL_WORKS, Case
from lra_jax.benchmarking.works import find

# Operations of a step of the recurrent form, in units of H^2; multiplying and adding
# are two.
_LINEAR = {
    **dict.fromkeys(("linear", "flow", "norm", "retention", "lightning", "gla"), 4),
    **dict.fromkeys(("delta", "gated_delta"), 6),
    "cosformer": 8,
}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Attributes: bytes copied (read and written), and flops by dtype, per second."""

    bytes_per_second: float
    flops_per_second: dict[str, float]

    def floor(self, case: Case, least_bytes: int) -> tuple[float, str]:
        """The least seconds of a case, and what sets them, "bytes" or "arithmetic"."""
        seconds = least_bytes / self.bytes_per_second
        arithmetic = least_flops(case) / self.flops_per_second[case.dtype]
        return (
            (arithmetic, "arithmetic") if arithmetic > seconds else (seconds, "bytes")
        )


def measure_roofline(dtypes: list[str], quick: bool = False) -> Roofline:
    """Measures both rates on the first device, with matrices in each of the dtypes; the
    best of ten times, or if quick of two, roughly."""
    if quick:
        size, rows, repeats = 1 << 20, 128, 2
    elif jax.default_backend() == "cpu":
        size, rows, repeats = 256_000_000, 2048, 10  # Beyond any cache.
    else:
        size, rows, repeats = 1_000_000_000, 8192, 10
    source = jnp.zeros((size // 4,), jnp.float32)
    # The old copy is reused, so that no new memory is touched.
    copy = jax.jit(lambda x, _: x + 1, donate_argnums=1, keep_unused=True)
    seconds = _fastest(copy, source, jnp.ones_like(source), repeats)
    rates = {}
    for dtype in dtypes:
        matrix = jnp.ones((rows, rows), jnp.dtype(dtype)) / rows
        product = jax.jit(lambda x, y: x @ y)
        rates[dtype] = 2 * rows**3 / _fastest(product, matrix, matrix, repeats)
    return Roofline(2 * size / seconds, rates)


def _fastest(
    function: Callable[..., jax.Array], first: Any, second: Any, repeats: int
) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        second = function(first, second).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])  # The first one compiles.


def least_flops(case: Case) -> float:
    """The least arithmetic of a case; 0 if unknown."""
    if case.work == "decode":
        return 0.0
    backward = case.work in ("forward+backward", "train")
    tokens = case.batch_size * case.length
    if case.work not in MODEL_WORKS:
        heads = case.heads * case.batch_size
        return heads * _attention_flops(case, case.head_dim, backward)
    model = case.model
    head_dim = model.embed_dim // model.num_heads
    attention = _attention_flops(case, head_dim, backward)
    mechanism, _ = find(case.attention)
    wide = len(mechanism.projections) * model.embed_dim + 2 * model.mlp_dim
    dense = tokens * 2 * model.embed_dim * wide * (3 if backward else 1)
    heads = case.batch_size * model.num_heads
    return model.num_layers * (dense + heads * attention)


def _attention_flops(case: Case, head_dim: int, backward: bool) -> float:
    """For one head of one sample."""
    if case.name in ("softmax", FUSED):
        pairs = case.length**2 / (2 if case.causal else 1)
        recomputes = case.name == FUSED or "blocks" in case.attention
        longer = 3.5 if recomputes else 3
        return 4 * pairs * head_dim * (longer if backward else 1)
    times = 3 if backward else 1
    if case.name == "linformer":
        _, options = find(case.attention)
        features = options.get("features", 256)
        # Other projections have no K: their slots are windows.
        learned = options.get("projection", "linear") == "linear"
        if not learned or not isinstance(features, int):
            return 0.0
        slots = min(features, case.length)
        return 8 * case.length * slots * head_dim * times
    return _LINEAR.get(case.name, 0) * case.length * head_dim**2 * times
