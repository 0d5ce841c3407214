"""MEGA's damped moving average, before the attention (Ma et al. 2023, "Mega: Moving
Average Equipped Gated Attention", section 3.1)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention.inputs import accumulation_dtype
from lra_jax.attention.recurrent.columns import scan_columns

_BLOCK = 32


class MovingAverage(nnx.Module):
    """``y_t = silu(sum_e eta_e s_(t, e) + omega x_t)`` for each column separately.

    ``s_(t, e) = alpha_e beta_e x_t + (1 - alpha_e delta_e) s_(t-1, e)`` for each of
    ``size`` averages, with alpha and delta in (0, 1). Without ``is_causal`` there are
    as many from the other end, with their own arrays; they begin one position later,
    so that x_t counts only once.

    Masked positions count as zeros, so padding does not change a sequence's output. An
    average is a convolution, ``sum_e eta_e alpha_e beta_e (1 - alpha_e delta_e)^j`` at
    distance j. It is computed in blocks of 32 positions, in O(T), so that later inputs,
    as long as they are finite, do not change a bit of what comes before; for packed
    rows it is a scan, which needs ``size`` times the memory of the input.

    Source: the paper and facebookresearch/mega. Deviations: that code's sum from the
    other end counts x_t again, and it computes the convolution by a Fourier transform,
    whose rounding errors spread over the whole sequence.

    Args:
      features: number of columns D.
      size: averages per column and direction, E.
      is_causal: from the left only.
      rngs: for initialisation, as in that code: alpha and delta logits N(0, 0.2^2),
        beta alternating between 1 and -1 with N(0, 0.02^2) added, eta and omega
        N(0, 1), eta divided by sqrt(E).
    """

    def __init__(
        self, features: int, size: int, *, is_causal: bool = False, rngs: nnx.Rngs
    ):
        self.size = size
        ends = 1 if is_causal else 2
        shape = (ends, size, features)

        def normal(std: float, *shape: int) -> jax.Array:
            return nnx.initializers.normal(std)(rngs.params(), shape, jnp.float32)

        signs = jnp.where(jnp.arange(size) % 2 == 0, 1.0, -1.0)[None, :, None]
        self.alpha = nnx.Param(normal(0.2, *shape))
        self.delta = nnx.Param(normal(0.2, *shape))
        self.beta = nnx.Param(normal(0.02, *shape) + signs)
        self.eta = nnx.Param(normal(size**-0.5, *shape))
        self.omega = nnx.Param(normal(1.0, features))

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`.

        Args:
          x: the inputs.
          mask: boolean `[B, T]`, True at real positions.
          segment_ids: documents of packed rows, `[B, T]`, which do not mix.
        """
        if mask is not None:
            x = jnp.where(mask[:, :, None], x, 0)
        wide = x.astype(accumulation_dtype(x))
        parameters = self.alpha, self.delta, self.beta, self.eta, self.omega
        alpha, delta, beta, eta, omega = (p[...].astype(wide.dtype) for p in parameters)
        fades = jax.nn.sigmoid(alpha)
        decay = 1 - fades * jax.nn.sigmoid(delta)
        taken = fades * beta
        if segment_ids is None:
            mixed = _by_blocks(wide, decay, taken, eta)
        else:
            mixed = _by_scan(wide, segment_ids, decay, taken, eta)
        out = jax.nn.silu(mixed + wide * omega[None, None])
        return out.astype(x.dtype)


def _by_blocks(
    x: jax.Array, decay: jax.Array, taken: jax.Array, eta: jax.Array
) -> jax.Array:
    """``y_t = sum_e eta_e s_(t, e)``, with ``s_t = taken x_t + decay s_(t-1)``, and
    likewise from the other end, one position later.

    Args:
      x: `[B, T, D]`.
      decay, taken, eta: `[1 or 2, E, D]`.
    """
    mixed = _from_the_left(x, decay[0], taken[0], eta[0])
    if len(decay) == 2:
        others = decay[1], taken[1], eta[1]
        later = jnp.flip(_from_the_left(jnp.flip(x, 1), *others), 1)
        mixed = mixed + jnp.pad(later[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return mixed


def _from_the_left(
    x: jax.Array, decay: jax.Array, taken: jax.Array, eta: jax.Array
) -> jax.Array:
    """``y_t`` of one direction: a product with a triangular matrix within each block,
    plus what the E states carry in from earlier blocks."""
    batch, length, features = x.shape
    count = -(-length // _BLOCK)
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    # Saturated sigmoids give a decay of 0, whose logarithm is infinite.
    rate = jnp.log(jnp.maximum(decay, jnp.finfo(x.dtype).tiny))
    steps = jnp.arange(_BLOCK + 1, dtype=x.dtype)[:, None, None]
    powers = jnp.exp(rate[None] * steps)
    kernel = (powers[:-1] * (taken * eta)[None]).sum(1)
    place = np.arange(_BLOCK)
    back = place[:, None] - place[None]
    triangle = jnp.where((back >= 0)[:, :, None], kernel[np.maximum(back, 0)], 0)
    blocks = jnp.pad(x, ((0, 0), (0, -length % _BLOCK), (0, 0)))
    blocks = blocks.reshape(batch, count, _BLOCK, features)
    inside = product("tsd,bcsd->bctd", triangle, blocks)
    added = product("sed,bcsd->cbed", powers[-2::-1] * taken[None], blocks)

    def step(state: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state * powers[-1][None] + new, state

    start = jnp.zeros((batch, *decay.shape), x.dtype)
    _, before = jax.lax.scan(step, start, added)
    carried = product("ted,cbed->bctd", powers[1:] * eta[None], before)
    return (inside + carried).reshape(batch, count * _BLOCK, features)[:, :length]


def _by_scan(
    x: jax.Array,
    segment_ids: jax.Array,
    decay: jax.Array,
    taken: jax.Array,
    eta: jax.Array,
) -> jax.Array:
    """`_by_blocks`, but position by position, restarting at every document."""
    batch, length, features = x.shape
    ids = segment_ids
    starts = ids != jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    mixed = jnp.zeros_like(x)
    for way, edges in zip(range(len(decay)), (starts, ends), strict=False):
        size = decay.shape[1]
        factors = jnp.where(edges[:, :, None, None], 0.0, decay[way][None, None])
        values = x[:, :, None] * taken[way][None, None]
        shape = (batch, length, size * features)
        states, _ = scan_columns(
            factors.reshape(shape), values.reshape(*shape, 1), reverse=way == 1
        )
        states = states.reshape(batch, length, size, features)
        if way == 1:
            later = jnp.pad(states[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
            states = jnp.where(ends[:, :, None, None], 0.0, later)
        mixed = mixed + (states * eta[way][None, None]).sum(2)
    return mixed
