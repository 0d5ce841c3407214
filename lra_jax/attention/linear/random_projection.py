"""Performer's random projection: drawn once, orthogonal in blocks, never trained."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def performer_projection(
    rng_key: jax.Array,
    features: int,
    head_dim: int,
    *,
    scaling: int = 0,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Draws a projection whose rows are orthogonal in blocks of H.

    Directions are uniform on the sphere: the blocks are Q of a QR decomposition with
    its signs corrected, without which every kernel value has a bias (the published code
    has it).

    Args:
      rng_key: a key of ``jax.random``.
      features: M.
      head_dim: H.
      scaling: 0 gives the rows the lengths of independent normal vectors, so that each
        is N(0, I), as the estimate of the softmax kernel needs; 1 the length sqrt(H).
      dtype: of the projection.

    Returns:
      `[M, H]`.

    Raises:
      ValueError: a size is not positive, or another scaling.
    """
    for name, size in {"features": features, "head_dim": head_dim}.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")
    if scaling not in (0, 1):
        raise ValueError(f"scaling: expected 0 or 1, got {scaling!r}")
    direction_key, norm_key = jax.random.split(rng_key)
    blocks = -(-features // head_dim)
    normal = jax.random.normal(direction_key, (blocks, head_dim, head_dim), dtype)
    q, r = jnp.linalg.qr(normal)
    # A decomposition may choose the signs of r's diagonal; LAPACK's choice gives the
    # rows of q a mean. With all of them positive q is uniform (Haar).
    diagonal = jnp.diagonal(r, axis1=1, axis2=2)[:, None]
    q = q * jnp.where(diagonal < 0, -1, 1).astype(dtype)
    rows = jnp.swapaxes(q, 1, 2).reshape(-1, head_dim)[:features]
    if scaling == 1:
        return rows * jnp.asarray(math.sqrt(head_dim), dtype)
    normal = jax.random.normal(norm_key, (features, head_dim), dtype)
    return rows * jnp.linalg.norm(normal, axis=1, keepdims=True)


def performer_parameters(
    rng_key: jax.Array,
    *,
    head_dim: int,
    features: int | None = None,
    scaling: int = 0,
    dtype: Any = jnp.float32,
    **_: Any,
) -> dict[str, jax.Array]:
    """Makes the array that `performer_attention` takes as a keyword; never trained.

    Args:
      rng_key: a key of ``jax.random``.
      head_dim: H.
      features: M; None = int(H ln H), at least H, as in lucidrains/performer-pytorch:
        of the order that the paper's theorem asks for.
      scaling: see `performer_projection`.
      dtype: of the array.
      **_: further keywords, so that every mechanism can be called alike; ignored.

    Returns:
      `projection`, `[M, H]`.

    Raises:
      ValueError: as `performer_projection`.
    """
    if features is None:
        features = max(head_dim, int(head_dim * math.log(head_dim)))
    matrix = performer_projection(
        rng_key, features, head_dim, scaling=scaling, dtype=dtype
    )
    return {"projection": matrix}
