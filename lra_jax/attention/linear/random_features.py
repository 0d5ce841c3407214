"""Random features: how Performer turns a kernel into inner products.

For w ~ N(0, I), ``exp(x . y) = E[phi(x) phi(y)]`` with
``phi(x) = exp(w . x - |x|^2 / 2)``, which is never negative. M draws of w are the rows
of a projection W; rows that are orthogonal within a block of H lower the variance. A
kernel may also be defined by its features, ``phi(x) = f(W x) + eps``.

The exponents grow with the norm of x, so exp needs a reference to subtract. Here each
feature of the keys has its own, its largest exponent ``c_r = max_j g_jr``, and each
query has one, ``max_r (a_ir + c_r)``: every factor is then at most 1, every denominator
at least 1, and the references cancel exactly, whatever the norms.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs, packed
from lra_jax.attention.causal.prefix import exp_visible
from lra_jax.errors import expected

SOFTMAX = "softmax"
_MAPS = feature_maps.FEATURE_MAPS | {"exp": jnp.exp}


@dataclass(frozen=True)
class Options:
    """Which features are computed: the options of `performer_attention`.

    Raises:
      ValueError: an unknown name, or conflicting options.
    """

    kernel: feature_maps.FeatureMap
    hyperbolic: bool
    feature_eps: float
    scale: float | None
    precision: jax.lax.PrecisionLike
    dtype: Any  # of the computation

    def __post_init__(self) -> None:
        if not callable(self.kernel) and self.kernel not in (SOFTMAX, *_MAPS):
            choices = f"one of {sorted((SOFTMAX, *_MAPS))} or a function of one array"
            raise expected("kernel", choices, f"{self.kernel!r}")
        inputs.check_flag("hyperbolic", self.hyperbolic)
        if self.hyperbolic and not self.softmax:
            pairs = "False, since pairs exp(+-W x) are features of kernel='softmax'"
            raise expected("hyperbolic", pairs, f"True with kernel={self.kernel!r}")
        inputs.check_eps(self.feature_eps, "feature_eps")
        if self.scale is not None:
            inputs.check_number("scale", self.scale)

    @property
    def softmax(self) -> bool:
        """Whether the features are those of the softmax kernel."""
        return self.kernel == SOFTMAX

    def matrix(self, projection: jax.Array | None, head_dim: int) -> jax.Array | None:
        """The matrix W of all features; None = the features are f of x itself.

        Raises:
          ValueError: the projection does not fit the head width, or is missing.
        """
        if projection is None and not self.softmax:
            return None
        sizes, source = (None, head_dim), "performer_parameters"
        projection = inputs.check_array(
            "projection", projection, "M H", *sizes, source=source
        )
        if not projection.shape[0]:
            raise expected("projection", "at least one row", projection.shape)
        if self.hyperbolic:
            return jnp.concatenate([projection, -projection])
        return projection

    def rescale(self, x: jax.Array) -> jax.Array:
        """``x' = x / H^(1/4)``, or x times the option ``scale``."""
        scale = x.shape[-1] ** -0.25 if self.scale is None else self.scale
        return x * jnp.asarray(scale, x.dtype)

    def project(self, x: jax.Array, matrix: jax.Array | None) -> jax.Array:
        """``W x'``: `[..., H]` -> `[..., M]`."""
        x = self.rescale(x)
        if matrix is None:
            return x
        matrix = matrix.astype(x.dtype)
        return jnp.einsum("...h,mh->...m", x, matrix, precision=self.precision)


def features(
    query: jax.Array,
    key: jax.Array,
    matrix: jax.Array | None,
    mask: jax.Array | None,
    options: Options,
    rows: packed.Packed | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The features of queries and keys, up to factors that cancel in the quotient.

    They are `[B, T, N, M]` and `[B, S, N, M]`, not hidden. Query and key are float32 or
    wider, the key's padding is zero, and each document has its own reference.
    """
    queries, keys = options.project(query, matrix), options.project(key, matrix)
    if not options.softmax:
        kernel = options.kernel
        phi = kernel if callable(kernel) else _MAPS[kernel]
        eps = jnp.asarray(options.feature_eps, queries.dtype)
        return phi(queries) + eps, phi(keys) + eps
    # The query's norm is a factor of all its weights, and is left out.
    keys = keys - half_square(options.rescale(key))
    visible = jnp.ones((1, 1), bool) if mask is None else mask
    visible = visible[..., None, None]
    keys = jnp.where(visible, keys, lowest(keys.dtype))
    if rows is None:
        top = keys.max(1, keepdims=True)
    else:
        top = rows.over(jax.ops.segment_max, keys, 1)
    top = jax.lax.stop_gradient(top)
    return lift(queries, top)[0], exp_visible(keys - top, visible)


def lift(queries: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Query features for key features relative to ``top``, scaled to a maximum of 1.

    Args:
      queries: exponents, `[..., M]`.
      top: reference of each key feature, broadcastable, without a gradient.

    Returns:
      The features `[..., M]`, and the exponent `[...]` by which they were lowered.
    """
    queries = queries + top
    peak = jax.lax.stop_gradient(queries.max(-1))
    return jnp.exp(queries - peak[..., None]), peak


def half_square(x: jax.Array) -> jax.Array:
    """``|x|^2 / 2`` over the last axis, which is kept with size 1."""
    return jnp.square(x).sum(-1, keepdims=True) / 2


def lowest(dtype: Any) -> jax.Array:
    """The exponent of hidden entries; finite, so that differences are finite too."""
    return jnp.asarray(jnp.finfo(dtype).min / 4, dtype)


def performer_projection(
    rng_key: jax.Array,
    features: int,
    head_dim: int,
    *,
    scaling: int = 0,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Draws a projection whose rows are orthogonal in blocks of H.

    Directions are uniform on the sphere: each block is the Q of a QR decomposition with
    corrected signs. Without the correction every kernel value is biased, as in the
    published code.

    Args:
      rng_key: a key of ``jax.random``.
      features: M.
      head_dim: H.
      scaling: 0 gives the rows the lengths of independent normal vectors, so that each
        is N(0, I), as estimating the softmax kernel requires; 1 gives length sqrt(H).
      dtype: of the projection.

    Returns:
      `[M, H]`.

    Raises:
      ValueError: a size is not positive, or the scaling is not 0 or 1.
    """
    inputs.check_size("features", features)
    inputs.check_size("head_dim", head_dim)
    if scaling not in (0, 1):
        raise expected("scaling", "0 or 1", f"{scaling!r}")
    direction_key, norm_key = jax.random.split(rng_key)
    blocks = -(-features // head_dim)
    # There is no QR decomposition in half precision.
    wide = inputs.accumulation_dtype(jnp.zeros((), dtype))
    normal = jax.random.normal(direction_key, (blocks, head_dim, head_dim), wide)
    q, r = jax.lax.map(_qr, normal)
    # The signs of r's diagonal are arbitrary; with LAPACK's choice the rows of q have a
    # nonzero mean. With all signs positive q is uniform (Haar).
    q = q * jnp.sign(jnp.diagonal(r, axis1=1, axis2=2)[:, None])
    rows = jnp.swapaxes(q, 1, 2).reshape(-1, head_dim)[:features]
    if scaling == 1:
        return (rows * math.sqrt(head_dim)).astype(dtype)
    normal = jax.random.normal(norm_key, (features, head_dim), wide)
    return (rows * jnp.linalg.norm(normal, axis=1, keepdims=True)).astype(dtype)


# One matrix at a time: on a CPU, jaxlib 0.10 splits those of many into tasks of XLA's
# threads, and waits for them on one of these threads. Two such calls in one program, as
# where a whole model is made under jax.jit, wait forever on two cores.
_qr = jax.custom_batching.sequential_vmap(lambda matrix: jnp.linalg.qr(matrix))


def performer_parameters(
    rng_key: jax.Array,
    *,
    head_dim: int,
    features: int | None = None,
    scaling: int = 0,
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the array that `performer_attention` takes as a keyword; it is not trained.

    Args:
      rng_key: a key of ``jax.random``.
      head_dim: H.
      features: M; None = int(H ln H), at least H, as in lucidrains/performer-pytorch,
        the order of magnitude that the paper's theorem requires.
      scaling: see `performer_projection`.
      dtype: of the array.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      `projection`, `[M, H]`.

    Raises:
      ValueError: as for `performer_projection`.
    """
    inputs.check_sizes(performer_parameters, sizes)
    if features is None:
        features = max(head_dim, int(head_dim * math.log(head_dim)))
    matrix = performer_projection(
        rng_key, features, head_dim, scaling=scaling, dtype=dtype
    )
    return {"projection": matrix}
