"""The static description of a kernel call, and the feature maps kernels implement."""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp


def _elu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # exp is only applied to negative numbers: others could overflow.
    low = jnp.exp(jnp.minimum(x, 0.0))
    return jnp.where(x > 0, x + 1.0, low), jnp.where(x > 0, 1.0, low)


def _relu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(x, 0.0), jnp.where(x > 0, 1.0, 0.0)


def _sigmoid(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = 1.0 / (1.0 + jnp.exp(-x))
    return y, y * (1.0 - y)


def _silu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _sigmoid(x)[0]
    return x * y, y * (1.0 + x * (1.0 - y))


def _leaky_relu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(x >= 0, x, 0.01 * x), jnp.where(x >= 0, 1.0, 0.01)


def _identity(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.ones_like(x)


# phi and its derivative, of float32 arrays.
MAPS = {
    "elu": _elu,
    "identity": _identity,
    "leaky_relu": _leaky_relu,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "silu": _silu,
}
# A number whose features are zero, for maps with nonzero features at 0.
DEAD = {"elu": -1e4, "sigmoid": -1e4}
FeatureMap = str | Callable[[jax.Array], jax.Array]


def plus(arrays: Iterable[jax.Array]) -> jax.Array:
    """The sum of arrays of one shape."""
    return functools.reduce(operator.add, arrays)


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """The weights of linear attention, and what divides their sums.

    ``out_i = sum_j w_ij v_j / bound(sum_j w_ij)``, where
    ``w_ij = phi(q_i) . phi(k_j)`` times two optional factors.

    Attributes:
      feature_map: phi, by name or as a function of an array.
      denominator: "add" divides by the sum + eps, "clamp" by max(sum, eps), "absolute"
        by max(|sum|, eps), "none" by nothing.
      eps: see `denominator`.
      max_length: M, a number or `[B]`: multiplies w_ij by ``cos(pi (i - j) / 2M)``;
        None = no such factor.
      slopes: `[N]`: multiplies w_ij by ``exp(-slope |i - j|)``; None = no such factor.
        Needs T == S.
    """

    feature_map: FeatureMap = "identity"
    denominator: str = "none"
    eps: float = 0.0
    max_length: int | jax.Array | None = None
    slopes: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Linear attention: the settings of a call, static and hashable.

    Attributes:
      is_causal: sum over j <= i only.
      feature_map: one of `MAPS`.
      chunk: positions computed quadratically, C; not for CPUs.
      block: positions a program takes at a time, a multiple of `chunk`; not for CPUs.
      precision: of products of float32 operands; half-precision products are exact.
      target: "tpu", "gpu" or "cpu", whose kernels run.
      interpret: run them in Pallas' interpreter, on any backend.
      rotate: weight by the cosine of the distance (cosFormer).
      denominator: as in `Weighting`.
      eps: as in `Weighting`.
      decay: weight by an exponential of the distance. For this, "absolute" and packed
        documents only a CPU has kernels.
      packed: rows hold several documents, which do not see each other.
    """

    is_causal: bool
    feature_map: str
    chunk: int
    block: int
    precision: jax.lax.Precision | None
    target: str
    interpret: bool
    rotate: bool
    denominator: str
    eps: float
    decay: bool
    packed: bool

    @property
    def module(self) -> str:
        """The module of its kernels, below `lra_jax.kernels`."""
        if self.target == "cpu":
            return "cpu.programs"
        if self.target == "gpu":
            return "hopper.programs"
        return "tpu.causal" if self.is_causal else "tpu.product"

    @property
    def terms(self) -> int:
        """The number of feature products that sum to a weight: two with angles."""
        return 2 if self.rotate else 1

    def bound(self, den: jax.Array) -> jax.Array:
        """The divisor of the numerators."""
        if self.denominator == "none":
            return jnp.ones_like(den)
        clamped = jnp.where(den >= self.eps, den, self.eps)
        bounded = den + self.eps if self.denominator == "add" else clamped
        if self.eps:
            return bounded
        # Of a row without visible keys the numerator is zero as well.
        return jnp.where(bounded == 0.0, 1.0, bounded)

    def passes(self, den: jax.Array) -> jax.Array:
        """The derivative of `bound`, 0 or 1."""
        if self.denominator == "none":
            return jnp.zeros_like(den)
        if self.denominator == "add":
            return jnp.ones_like(den)
        return jnp.where(den >= self.eps, 1.0, 0.0)


class Inputs(NamedTuple):
    """The arrays of a call.

    Query, key, value, log_decay and beta have gradients.

    Callers pass boolean masks `[B, S]` and `[B, T]` and integer documents; the kernels
    get them as float32.

    Attributes:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads and the value's may be fewer in a call.
      value: `[B, S, N, Hv]`.
      mask: float32 `[B, 1, S]`, 1 at real keys; None = all are.
      query_mask: the same for the queries, `[B, 1, T]`; for Flow-Attention only.
      scale: the angle between neighbouring positions, float32 `[B]`; for linear
        attention only.
      slopes: the decay of neighbouring positions is exp(-slope), float32 `[B, N]`.
      documents: the number of each position's document, increasing along a row,
        float32 `[B, T]`; None = a row is one document.
      log_decay: of a `RecurrentSpec`, float32 `[B, T, N, H]` or, with `beta`,
        `[B, T, N]`; None = no decay.
      beta: the shares of the delta rule, float32 `[B, T, N]`; None = gated linear
        attention.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array | None = None
    query_mask: jax.Array | None = None
    scale: Any = None
    slopes: jax.Array | None = None
    documents: jax.Array | None = None
    log_decay: jax.Array | None = None
    beta: jax.Array | None = None


Gradients = tuple[jax.Array, jax.Array, jax.Array] | Inputs
"""The gradients of query, key and value; or an `Inputs` with those of other arrays."""


@dataclass(frozen=True, kw_only=True)
class FlowSpec:
    """Flow-Attention on a CPU, see `lra_jax.attention.flow.flow`.

    Attributes:
      is_causal: the causal definition.
      feature_map: one of `MAPS`.
      clip: bound on the conserved outgoing flow; None = none.
      eps: added to both factors of every inner product.
      extra_eps: added to the product.
    """

    is_causal: bool
    feature_map: str
    clip: float | None
    eps: float
    extra_eps: float

    target: ClassVar = "cpu"
    module: ClassVar = "cpu.flow"


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """Gated linear attention and the delta rule, see `lra_jax.attention.recurrent`.

    Attributes:
      is_causal: otherwise a query also reads a recurrence from the last position,
        before its own position is added.
      feature_map: one of `MAPS`, whose features of queries and keys are divided by
        their length; None = queries and keys are used as they are.
      eps: added to the square of the length.
    """

    is_causal: bool
    feature_map: str | None
    eps: float

    target: ClassVar = "cpu"
    module: ClassVar = "cpu.recurrent"


@dataclass(frozen=True, kw_only=True)
class ScanSpec:
    """A recurrence of single numbers, ``h_t = f_t h_(t-1) + x_t`` in each column.

    Attributes:
      forth: columns from this one on run from the last position to the first.
    """

    forth: int

    target: ClassVar = "cpu"
    module: ClassVar = "cpu.columns"


class Scanned(NamedTuple):
    """The arrays of a `ScanSpec`."""

    factors: jax.Array  # f, float32 [B, T, C]
    values: jax.Array  # x, float32 [B, T, C]
