"""The hierarchically gated recurrence (Qin et al. 2023, "Hierarchically Gated Recurrent
Neural Network for Sequence Modeling", from the authors of cosFormer).

``h_t = f_t h_(t-1) + (1 - f_t) v_t`` for each column separately, with the output
``out_t = g_t * norm(h_t)``: no queries and no keys. In a model

- ``v = silu(W_v x + b_v)``;
- ``f = b + (1 - b) sigmoid(W_f x + b_f)``, where the lower bound b, one per column, is
  0 in the first layer and closer to 1 in every later one, so that higher layers keep
  their states for longer;
- ``g = silu(W_g x + b_g)``.

With ``angle``, columns are complex, as pairs (real, imaginary):
``h_t = f_t e^(i angle) h_(t-1) + (1 - f_t) v_t`` with a learned angle for each pair.
With ``rotation``, each position adds its own angle, which a model with the option
``rotates`` computes from its input, ``rotation_t = 0.3 (W_r x_t + b_r)``. The phase of
a state is then the sum of the angles since the state was last forgotten, up to whole
turns: it can count modulo 2, as parity needs, or modulo 10. Decays between 0 and 1
alone cannot (Grazzi et al. 2024, arXiv:2411.12537). Mamba-3 (Lahoti et al. 2026,
arXiv:2603.15569) rotates its states in the same way.

A head here is one column, real (Hv = 1) or complex (Hv = 2), and there are twice as
many columns as the model's width: without ``is_causal`` half of the heads run from the
left and half from the right, so that a layer can tell the two directions apart.

Two dimensions. If a sequence is an image read row by row, ``grid=(rows, columns)`` runs
half of the heads along the rows and half along the columns, each from both ends, and
states start afresh at every line: a pixel's neighbour above is one step away, not a row
of steps. In HGRN's own code for Pathfinder (class ``Hgru2d``) each column runs in all
four directions, and the results are added up.

Cost: O(T N Hv) time and memory, the least of all mechanisms. A stream holds one state
`[Hv]` per head.

``scale="unit"`` multiplies values by ``sqrt(1 - f^2)`` instead of 1 - f, which keeps
the variance of a state whatever its time constant (De et al. 2024, Griffin, eq. 4).

Source: the paper, and OpenNLPLab/HGRN. Deviations: that code adds up the two directions
and uses the same values for both; its lower bounds are a cumulative softmax of one
array over the layers, so they cannot decrease from layer to layer. Here each layer has
its own array, initially equal to that softmax of zeros, l / L in layer l of L. Its
angles do not depend on the input. The norm has no learned gain (the output projection
can absorb it). The forget gate's bias is initialised to spread time constants from 2 to
2,000 positions; there it is zero. Padding is exact: a hidden position does not add to a
state, and the state neither decays nor rotates there.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, packed, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.recurrent import recurrence
from lra_jax.attention.recurrent.columns import scan_columns
from lra_jax.errors import expected, known

__all__ = [
    "HgrnState",
    "hgrn_attention",
    "hgrn_init",
    "hgrn_layout",
    "hgrn_parameters",
    "hgrn_prefill",
    "hgrn_step",
    "hgrn_weights",
]


_SCALES = ("tied", "unit")


class HgrnState(recurrence.RecurrentState):
    """The last state of each head: its summary is `[B, N, Hv]`."""


def hgrn_layout(
    in_features: int,
    *,
    expand: int = 2,
    is_complex: bool = False,
    rotates: bool = False,
) -> tuple[int, int, int]:
    """Number of heads, width of queries and keys, and of values: a head is a column.

    Args:
      in_features: width of the layer's input.
      expand: state columns per input column.
      is_complex: combine pairs of them into complex columns, with a learned angle.
      rotates: the same, with an angle for each position, computed from the input.

    Raises:
      ValueError: a size is not a positive int, or the columns cannot be paired.
    """
    columns = inputs.check_size("expand", expand) * in_features
    pairs = {"is_complex": is_complex, "rotates": rotates}
    for name, flag in pairs.items():
        inputs.check_flag(name, flag)
    if not any(pairs.values()):
        return columns, 1, 1
    if columns % 2:
        name = next(name for name, flag in pairs.items() if flag)
        raise expected(name, "False with an odd number of columns", columns)
    return columns // 2, 1, 2


def hgrn_parameters(
    rng_key: jax.Array,
    *,
    num_heads: int,
    layer: int = 0,
    num_layers: int = 1,
    is_complex: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the lower bounds of the forget gates, and the angles of complex columns.

    Args:
      rng_key: not used; the arrays are the same for every seed.
      num_heads: N.
      layer: index of the layer, from 0; the first has no bound.
      num_layers: number of layers.
      is_complex: make angles too.
      dtype: of the arrays.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      ``lower_bound`` `[N]`, logits: the bound is their sigmoid; and ``angle`` `[N]`,
      radians per position, 10,000^(-n / N) as in rotary positions.
    """
    del rng_key
    inputs.check_sizes(hgrn_parameters, sizes)
    arrays = {}
    if layer:
        share = layer / num_layers
        arrays["lower_bound"] = jnp.full((num_heads,), math.log(share / (1 - share)))
    if is_complex:
        arrays["angle"] = 1e4 ** (-jnp.arange(num_heads) / num_heads)
    return {name: array.astype(dtype) for name, array in arrays.items()}


def _run(
    call: Call,
    *,
    log_decay: jax.Array | None,
    gate: jax.Array | None,
    lower_bound: jax.Array | None,
    angle: jax.Array | None,
    rotation: jax.Array | None,
    scale: str,
    norm: str | None,
    eps: float,
    grid: inputs.Grid,
) -> tuple[jax.Array, HgrnState]:
    inputs.refuse_without_gates(call.deterministic, "hgrn", log_decay, gate)
    inputs.check_self(call.query, call.key, "hgrn")
    inputs.check_grid(grid, call.query, call.key, call.is_causal, call.rows)
    feature_maps.check_norm(norm)
    known("scale", scale, _SCALES)
    batch, length, heads = call.query.shape[:3]
    value = masking.hide(call.value, call.mask).astype(call.dtype)
    values = inputs.match_heads(value, heads)
    start = recurrence.Memory(jnp.zeros_like(values[:, 0]))
    start = streams.check_sums(call.sums, start).summary
    factors = jnp.ones(call.query.shape[:3], values.dtype)
    if log_decay is not None:
        factors, share = _fade(call, log_decay, lower_bound, scale)
        values = values * share[..., None]
    factors = _with_angles(call, factors, angle, rotation)
    turns = jnp.iscomplexobj(factors)
    if turns:
        values, start = _complex(values), _complex(start)
    forth = heads if call.is_causal else _half(heads)
    if call.rows is not None:
        factors = _reset(factors, call.rows, forth)
    refusal = _first_passed(grid=grid, angle=angle, rotation=rotation)
    if call.choose("hgrn", refusal=refusal) is not None:
        out, last = _scan_by_kernel(factors, values, forth), start
    elif grid is not None:
        out, last = _scan_grid(factors, values, grid), start
    else:
        out, last = _scan(factors, values, forth, start)
    if turns:
        out, last = _pairs(out), _pairs(last)
    # Over one axis: XLA's gradient over two is slow on a CPU (docs/performance.md).
    flat = feature_maps.normalise(out.reshape(batch, length, -1), norm, (2,), eps)
    out = recurrence.apply_gate(flat.reshape(*out.shape), gate, call.mask)
    state: Any = None
    if call.streams:
        state = HgrnState(recurrence.Memory(last), call.next_position)
    return call.finish(out), state


@attention_of(_run)
def hgrn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    log_decay: jax.Array | None = None,
    gate: jax.Array | None = None,
    lower_bound: jax.Array | None = None,
    angle: jax.Array | None = None,
    rotation: jax.Array | None = None,
    scale: str = "tied",
    norm: str | None = "rms",
    eps: float = 1e-6,
    grid: inputs.Grid = None,
    segment_ids: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes the gated recurrence.

    Args:
      query, key: `[B, T, N, H]`; only their shapes matter.
      value: `[B, T, N, Hv]`; complex columns have Hv = 2.
      mask: as in `linear_attention`.
      is_causal: all heads run from the left; otherwise the second half of them runs
        from the right.
      log_decay: log f before the lower bound, not positive, `[B, T, N]`; None = no
        decay, and values count in full.
      gate: g, `[B, T, N, Hv]`; None = 1.
      lower_bound: logits of b, `[N]`; None = 0.
      angle: radians per position, `[N]`; None = 0.
      rotation: further radians at each position, `[B, T, N]`; None = 0. Columns are
        complex with either, and real without both.
      scale: of the values: "tied", 1 - f, or "unit", sqrt(1 - f^2).
      norm: "rms" or "layer", over all heads of a position; None = no norm.
      eps: of the norm.
      grid: rows and columns if the sequences are images, T = rows * columns; then not
        causal, and without segment ids.
      segment_ids: documents of packed rows, as in `linear_attention`.
      precision: not used: there are no matrix products.
      implementation: as in `gla_attention`; there are kernels for real columns without
        a grid.
      deterministic: from Flax's layers, which are refused unless they pass gates.
      **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; states are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, or query and key
        differ in length.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> logits = jax.random.normal(jax.random.key(1), (2, 64, 4))
      >>> log_decay = jax.nn.log_sigmoid(logits)
      >>> hgrn_attention(query, key, value, is_causal=True, log_decay=log_decay).shape
      (2, 64, 4, 16)
    """
    ...


def _first_passed(**arguments: Any) -> kernels.Refusal | None:
    """Refuses the first argument that is not None; None if there is none."""
    for name, x in arguments.items():
        if x is not None:
            return name, "None", f"{x}" if name == "grid" else "an array"
    return None


def _check_real(
    *, angle: jax.Array | None = None, rotation: jax.Array | None = None, **_: Any
) -> None:
    refusal = _first_passed(angle=angle, rotation=rotation)
    if refusal is not None:
        name, needed, got = refusal
        reason = "because no matrix of weights rotates complex columns"
        raise expected(name, f"{needed}, {reason}", got)


hgrn_weights = dense.weights_of(
    hgrn_attention,
    "It leaves out the norm and the gate, and is that of a real column.",
    without=("gate",),
    fixed={"norm": None},
    check=_check_real,
)
hgrn_prefill = streams.make_prefill(hgrn_attention, _run, HgrnState)
hgrn_init = streams.make_init(hgrn_prefill)
hgrn_step = streams.make_step(hgrn_prefill, "log_decay", "gate", "rotation")


def _half(heads: int) -> int:
    """How many heads run in the first of two directions."""
    return heads - heads // 2


def _scan(
    factors: jax.Array, values: jax.Array, forth: int, start: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Outputs and last state; heads from `forth` on run from the end."""
    if forth == values.shape[2]:
        return scan_columns(factors, values, start)
    left, last = scan_columns(factors[:, :, :forth], values[:, :, :forth])
    right, _ = scan_columns(factors[:, :, forth:], values[:, :, forth:], reverse=True)
    return jnp.concatenate([left, right], 2), last


def _scan_by_kernel(factors: jax.Array, values: jax.Array, forth: int) -> jax.Array:
    """The outputs of `_scan`, without a start."""
    batch, length, heads, width = values.shape
    if width > 1:
        factors = jnp.repeat(factors, width, 2)
    columns = values.reshape(batch, length, heads * width)
    return kernels.scan(factors, columns, forth * width).reshape(values.shape)


def _scan_grid(
    factors: jax.Array, values: jax.Array, grid: tuple[int, int]
) -> jax.Array:
    """Outputs where half of the heads run along rows and half along columns."""
    rows, columns = grid
    half = _half(factors.shape[2])
    across = _scan_lines(factors[:, :, :half], values[:, :, :half], rows)
    factors, values = (_transpose(x[:, :, half:], rows) for x in (factors, values))
    down = _transpose(_scan_lines(factors, values, columns), columns)
    return jnp.concatenate([across, down], 2)


def _scan_lines(factors: jax.Array, values: jax.Array, rows: int) -> jax.Array:
    """Outputs where every row of an image is a sequence, in both directions."""
    batch, length, heads, width = values.shape
    lines = batch * rows, length // rows, heads
    columns = values.reshape(*lines, width)
    return _scan(factors.reshape(lines), columns, _half(heads))[0].reshape(values.shape)


def _transpose(x: jax.Array, rows: int) -> jax.Array:
    """Images `[B, T, ...]` read row by row, with their rows as columns."""
    images = x.reshape(x.shape[0], rows, x.shape[1] // rows, *x.shape[2:])
    return jnp.swapaxes(images, 1, 2).reshape(x.shape)


def _fade(
    call: Call, log_decay: jax.Array, lower_bound: jax.Array | None, scale: str
) -> tuple[jax.Array, jax.Array]:
    """The factors f and the shares of the values, `[B, T, N]`."""
    recurrence.check_gate("log_decay", log_decay, call.query)
    heads, dtype = call.query.shape[2], call.dtype
    wide = inputs.match_heads(log_decay[..., None], heads).astype(dtype)
    log_decay = masking.hide(wide, call.mask)[..., 0]
    # 1 - f by expm1, because time constants may be long.
    factors, fades = jnp.exp(log_decay), -jnp.expm1(log_decay)
    if lower_bound is not None:
        inputs.check_array("lower_bound", lower_bound, "N", heads)
        fades = fades * jax.nn.sigmoid(-lower_bound.astype(dtype))[None, None]
        factors = 1 - fades
    if scale == "tied":
        return factors, fades
    # The derivative of a root is infinite at zero.
    least = jnp.asarray(jnp.finfo(dtype).tiny, dtype)
    return factors, jnp.sqrt(jnp.maximum(fades * (1 + factors), least))


def _reset(factors: jax.Array, documents: packed.Packed, forth: int) -> jax.Array:
    """Factors that stop the state at document boundaries in its direction."""
    starts = documents.resets
    # In the reverse direction the last position of a document comes first.
    ends = jnp.pad(starts[:, 1:], [(0, 0), (0, 1)])
    first = (jnp.arange(factors.shape[2]) < forth)[None, None]
    resets = jnp.where(first, starts[:, :, None], ends[:, :, None])
    return jnp.where(resets, 0, factors)


def _with_angles(
    call: Call,
    factors: jax.Array,
    angle: jax.Array | None,
    rotation: jax.Array | None,
) -> jax.Array:
    """``f e^(i radians)``, `[B, T, N]`; real without angles, and where hidden."""
    if angle is None and rotation is None:
        return factors
    batch, length, heads = factors.shape
    inputs.check_shape("value", call.value, "B S N Hv", batch, length, None, 2)
    radians = jnp.zeros_like(factors)
    if rotation is not None:
        recurrence.check_gate("rotation", rotation, call.query)
        wide = inputs.match_heads(rotation[..., None], heads)
        radians = wide[..., 0].astype(factors.dtype)
    if angle is not None:
        inputs.check_array("angle", angle, "N", heads)
        radians = radians + angle.astype(factors.dtype)[None, None]
    radians = masking.hide(radians[..., None], call.mask)[..., 0]
    return jax.lax.complex(factors * jnp.cos(radians), factors * jnp.sin(radians))


def _complex(pairs: jax.Array) -> jax.Array:
    """`[..., 2]`, real and imaginary parts, to complex `[..., 1]`."""
    return jax.lax.complex(pairs[..., :1], pairs[..., 1:])


def _pairs(columns: jax.Array) -> jax.Array:
    """The inverse."""
    return jnp.concatenate([columns.real, columns.imag], -1)
