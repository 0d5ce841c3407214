"""Random features: how Performer turns a kernel into inner products.

For w ~ N(0, I), ``exp(x . y) = E[phi(x) phi(y)]`` with
``phi(x) = exp(w . x - |x|^2 / 2)``, which is never negative. M draws of w are the rows
of a projection W; rows that are orthogonal within a block of H lower the variance. A
kernel may also be defined by its features, ``phi(x) = f(W x) + eps``.

The exponents grow with the norm of x, so exp needs a reference to subtract. Here each
feature of the keys has its own, its largest exponent ``c_r = max_j g_jr``, and each
query has one, ``max_r (a_ir + c_r)``: every factor is then at most 1, every denominator
at least 1, and the references cancel exactly, whatever the norms. The published
dialects subtract only ``max(W x)`` and then add an eps, which is all that remains if
norms are large.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs, packed
from lra_jax.attention.causal.prefix import decayed
from lra_jax.errors import expected

SOFTMAX = "softmax"
_MAPS = feature_maps.FEATURE_MAPS | {"exp": jnp.exp}


class _Dialect(NamedTuple):
    reference: str  # of the exponents: "exact", "max", "detached max" or "none"
    softmax_eps: float  # added to softmax features
    feature_eps: float  # added to other features
    scaled: bool  # whether other features use x / H^(1/4), as softmax features do
    denominator: str  # "sum", "threshold", "eps" or "causal eps"


DIALECTS = {
    "exact": _Dialect("exact", 0.0, 1e-3, True, "sum"),
    "google": _Dialect("max", 1e-6, 1e-3, False, "threshold"),
    "lucidrains": _Dialect("detached max", 1e-4, 1e-3, True, "causal eps"),
    "fast_transformers": _Dialect("none", 0.0, 0.0, True, "eps"),
}
# The eps of denominators in "lucidrains" and "fast_transformers".
_EPS = 1e-6


@dataclass(frozen=True)
class Options:
    """Which features are computed, and how the quotient is formed.

    Attributes:
      kernel, dialect, hyperbolic, feature_eps, scale: see `performer_attention`.
      precision: of the matrix products.

    Raises:
      ValueError: an unknown name, or conflicting options.
    """

    kernel: feature_maps.FeatureMap = SOFTMAX
    dialect: str = "exact"
    hyperbolic: bool = False
    feature_eps: float | None = None
    scale: float | None = None
    precision: jax.lax.PrecisionLike = None

    def __post_init__(self) -> None:
        if not callable(self.kernel) and self.kernel not in (SOFTMAX, *_MAPS):
            choices = f"one of {sorted((SOFTMAX, *_MAPS))} or a function of one array"
            raise expected("kernel", choices, f"{self.kernel!r}")
        if self.dialect not in DIALECTS:
            raise expected("dialect", f"one of {tuple(DIALECTS)}", f"{self.dialect!r}")
        inputs.check_flag("hyperbolic", self.hyperbolic)
        if self.hyperbolic and self.kernel != SOFTMAX:
            wanted = "False, since pairs exp(+-W x) are features of kernel='softmax'"
            raise expected("hyperbolic", wanted, f"True with kernel={self.kernel!r}")
        if self.feature_eps is not None:
            self._check_eps(self.feature_eps)
        if self.scale is not None:
            inputs.check_number("scale", self.scale)

    def _check_eps(self, eps: float) -> None:
        if self.exact and eps:
            wanted = "None, since the exact softmax features need none (the published "
            raise expected("feature_eps", f"{wanted}dialects do)", f"{eps!r}")
        inputs.check_eps(eps, "feature_eps")

    @property
    def exact(self) -> bool:
        """Whether these are softmax features with references that cancel."""
        return self.kernel == SOFTMAX and self._dialect.reference == "exact"

    @property
    def whole_keys(self) -> bool:
        """Whether the features of a key depend on all the others."""
        return self.kernel == SOFTMAX and "max" in self._dialect.reference

    def denominator_eps(self, is_causal: bool) -> float | None:
        """What `divided` adds to a denominator; None = other than a number."""
        rule = self._dialect.denominator
        if rule == "threshold" and self.kernel == SOFTMAX:
            return None
        if rule == "causal eps" and is_causal:
            return None
        return _EPS if rule == "eps" else 0.0

    @property
    def added(self) -> float:
        """The eps that is added to every feature."""
        if self.feature_eps is not None:
            return self.feature_eps
        dialect = self._dialect
        return dialect.softmax_eps if self.kernel == SOFTMAX else dialect.feature_eps

    @property
    def _dialect(self) -> _Dialect:
        return DIALECTS[self.dialect]

    def matrix(self, projection: jax.Array | None, head_dim: int) -> jax.Array | None:
        """The matrix W of all features; None = the features are f of x itself.

        Raises:
          ValueError: the projection does not fit the head width, or is missing.
        """
        if projection is None:
            if self.kernel != SOFTMAX:
                return None
            raise expected(
                "projection",
                f"[M, H] with H={head_dim} for kernel='softmax'",
                "None; performer_projection makes one",
            )
        inputs.check_shape("projection", projection, "M H", None, head_dim)
        inputs.check_float("projection", projection)
        projection = jnp.asarray(projection)
        if not projection.shape[0]:
            raise expected("projection", "at least one row", projection.shape)
        if self.hyperbolic:
            return jnp.concatenate([projection, -projection])
        return projection

    def scaled(self, x: jax.Array) -> jax.Array:
        """x as the kernel sees it: ``x' = x / H^(1/4)``, unless ``scale`` is given."""
        scale = self.scale
        if scale is None:
            plain = self.kernel != SOFTMAX and not self._dialect.scaled
            scale = 1.0 if plain else x.shape[-1] ** -0.25
        return x * jnp.asarray(scale, x.dtype)

    def project(self, x: jax.Array, matrix: jax.Array | None) -> jax.Array:
        """``W x'``: `[..., H]` -> `[..., M]`."""
        x = self.scaled(x)
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
    found: packed.Packed | None = None,
    heads_first: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The features of queries and keys, `[B, N, T, M]`, up to factors that cancel.

    Args:
      query: `[B, N, T, H]`, float32 or wider.
      key: `[B, N, S, H]`, its padding zero.
      matrix: W, `[M, H]`; or None.
      mask: boolean `[B, S]`; the features of hidden keys are zero.
      options: which features.
      found: where packed documents are, each with its own maximum; None = each row is
        one.
      heads_first: False for query and key `[B, T, N, H]`, and features accordingly.
    """
    visible = jnp.ones((1, 1, 1, 1), bool)
    if mask is not None:
        visible = jnp.expand_dims(mask, (1, 3) if heads_first else (2, 3))
    if options.kernel == SOFTMAX:
        make = _exact if options.exact else _published
        axis = 2 if heads_first else 1
        return make(query, key, matrix, visible, options, found, axis)
    kernel = options.kernel
    phi = kernel if callable(kernel) else _MAPS[kernel]
    query_features, key_features = (
        phi(options.project(x, matrix)) + jnp.asarray(options.added, x.dtype)
        for x in (query, key)
    )
    return query_features, jnp.where(visible, key_features, 0)


def _exact(
    query: jax.Array,
    key: jax.Array,
    matrix: jax.Array | None,
    visible: jax.Array,
    options: Options,
    found: packed.Packed | None,
    axis: int,
) -> tuple[jax.Array, jax.Array]:
    # The query's norm is a factor of all its weights, and is left out.
    rows = options.project(query, matrix)
    columns = options.project(key, matrix) - half_square(options.scaled(key))
    columns = jnp.where(visible, columns, lowest(columns.dtype))
    top = jax.lax.stop_gradient(_largest(columns, found, axis))
    rows, _ = lifted(rows, top)
    return rows, decayed(columns - top, visible)


def _largest(keys: jax.Array, found: packed.Packed | None, axis: int) -> jax.Array:
    """Maxima over all keys, of size 1 along their axis, or per document, of size S."""
    if found is None:
        return keys.max(axis, keepdims=True)
    return found.over(jax.ops.segment_max, keys, axis)


def lifted(rows: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Query features for key features relative to ``top``, scaled to a maximum of 1.

    Args:
      rows: exponents of the queries, `[..., M]`.
      top: reference of each key feature, broadcastable, without a gradient.

    Returns:
      The features `[..., M]`, and the exponent `[...]` by which they were lowered.
    """
    rows = rows + top
    peak = jax.lax.stop_gradient(rows.max(-1))
    return jnp.exp(rows - peak[..., None]), peak


def half_square(x: jax.Array) -> jax.Array:
    """``|x|^2 / 2`` over the last axis, which is kept with size 1."""
    return jnp.square(x).sum(-1, keepdims=True) / 2


def lowest(dtype: Any) -> jax.Array:
    """The exponent of hidden entries; finite, so that differences are finite too."""
    return jnp.asarray(jnp.finfo(dtype).min / 4, dtype)


def _published(
    query: jax.Array,
    key: jax.Array,
    matrix: jax.Array | None,
    visible: jax.Array,
    options: Options,
    found: packed.Packed | None,
    axis: int,
) -> tuple[jax.Array, jax.Array]:
    """``(exp(W x' - |x'|^2 / 2 - max) + eps) / sqrt(M)``.

    The maximum is over the features of each query; for keys, over all visible keys and
    their features in each head.
    """
    dialect = DIALECTS[options.dialect]

    def phi(x: jax.Array, over_keys: bool, seen: jax.Array) -> jax.Array:
        exponent = options.project(x, matrix)
        top = jnp.where(seen, exponent, lowest(x.dtype)).max(3, keepdims=True)
        top = _largest(top, found, axis) if over_keys else top
        if dialect.reference == "detached max":
            top = jax.lax.stop_gradient(top)
        elif dialect.reference == "none":
            top = jnp.zeros_like(top)
        exponent = exponent - half_square(options.scaled(x)) - top
        made = decayed(exponent, seen) + jnp.asarray(options.added, x.dtype)
        made = made / math.sqrt(exponent.shape[-1])
        return jnp.where(seen, made, 0)

    everyone = jnp.ones((1, 1, 1, 1), bool)
    return phi(query, False, everyone), phi(key, True, visible)


def divided(
    numerator: jax.Array,
    denominator: jax.Array,
    query_features: jax.Array,
    is_causal: bool,
    options: Options,
) -> jax.Array:
    """Divides `[B, N, T, Hv]` by `[B, N, T]`; zero where no key is visible."""
    rule = DIALECTS[options.dialect].denominator
    eps = jnp.asarray(_EPS, denominator.dtype)
    if rule == "threshold" and options.kernel == SOFTMAX:
        # The code has one number for both; with other kernels it is zero.
        eps = jnp.asarray(options.added, denominator.dtype)
        small = jnp.abs(denominator) <= eps
        denominator = jnp.where(small, denominator + 2 * eps, denominator)
    elif rule == "eps":
        denominator = denominator + eps
    elif rule == "causal eps" and is_causal:  # added to every sum of key features
        denominator = denominator + eps * query_features.sum(-1)
    return feature_maps.over(numerator, denominator[..., None])


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
    diagonal = jnp.diagonal(r, axis1=1, axis2=2)[:, None]
    q = q * jnp.where(diagonal < 0, -1, 1).astype(wide)
    rows = jnp.swapaxes(q, 1, 2).reshape(-1, head_dim)[:features]
    if scaling == 1:
        return (rows * math.sqrt(head_dim)).astype(dtype)
    normal = jax.random.normal(norm_key, (features, head_dim), wide)
    return (rows * jnp.linalg.norm(normal, axis=1, keepdims=True)).astype(dtype)


@jax.custom_batching.sequential_vmap
def _qr(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The QR decomposition of a single matrix, `[H, H]`.

    On a CPU, jaxlib 0.10 splits those of many matrices into tasks of XLA's threads, and
    waits for them on one of these threads. Two such calls in one program, as where a
    whole model is made under ``jax.jit``, then wait forever on two cores.
    """
    q, r = jnp.linalg.qr(matrix)
    return q, r


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
