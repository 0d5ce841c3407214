"""The causal engine: chunks inside segments, one loop, one derivative.

A causal linear mechanism needs a running sum of matrices. Stored for every position, it
is M times as large as the input; computed position by position, it is a loop of tiny
steps. So the sequence is cut twice:

- a *chunk* (64 positions) is computed quadratically, as a masked product of pairs; all
  earlier positions enter through one state, the sum of their outer products;
- a *segment* (64 to 256 positions) holds a few chunks, which run in parallel: their
  states are prefix sums of the chunks' own contributions (`causal.prefix`). A loop
  over the segments carries the state along.

A pass over a long array costs as much as a product with it, so no step works on whole
arrays. The loop slices one segment at a time from the original query, key and value,
`[B, T, N, H]`. Features, masks, the transposition that puts heads first and the final
division are then computed on that segment, in the caches, forward and backward.

A mechanism gives the engine its `Form`: plain functions of one segment. The engine
itself knows no mechanism. A step of a stream is a sequence of length 1: there is no
second formula for decoding.

Gradients. The loop has a custom derivative: it keeps the inputs, one state per segment
and, where that saves work, the outputs; it runs backward and recomputes everything
else, so memory is linear in the length and small compared with the inputs.
Forward-mode derivatives (``jax.jvp``) are therefore not available; gradients of
gradients are.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs
from lra_jax.attention.causal.documents import Documents, number_starts
from lra_jax.attention.causal.prefix import Tree
from lra_jax.errors import expected

# Positions in a segment: of all rows together, and the least and most of one row.
# Measured on a CPU: docs/performance.md.
_TOGETHER = 1024
_SHORTEST, _LONGEST = 64, 256


@dataclass(frozen=True)
class Chunking:
    """How causal forms cut a sequence; results change only by rounding.

    Attributes:
      chunk: positions computed quadratically, C.
      segment: positions of a segment, rounded to whole chunks. None chooses by the
        number of rows (samples times heads): the more rows, the fewer positions of each
        fit into the caches.
      implementation: "loop" iterates over segments. "parallel" treats the whole
        sequence as one segment, with chunk states from an associative scan: more
        memory, but no loop. None chooses by the backend.
    """

    chunk: int = 64
    segment: int | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        inputs.check_size("chunk", self.chunk)
        if self.segment is not None:
            inputs.check_size("segment", self.segment)
        if self.implementation not in (None, "loop", "parallel"):
            choices = "'loop', 'parallel' or None"
            raise expected("implementation", choices, f"{self.implementation!r}")

    def cut(self, length: int, rows: int = 8) -> "Cut":
        """The layout of sequences of T = ``length``, for B N = ``rows`` of them."""
        implementation = self.implementation
        if implementation is None:
            # On a CPU the loop keeps its working set in the caches. An accelerator
            # pays for several kernel launches per iteration, and has the memory.
            on_cpu = jax.default_backend() == "cpu"
            implementation = "loop" if on_cpu else "parallel"
        chunk = min(self.chunk, length)
        chunks = -(-length // chunk)
        if implementation == "parallel":
            return Cut(chunk=chunk, chunks=chunks, segments=1)
        segment = self.segment
        if segment is None:
            # A symbolic batch may be large.
            together = _TOGETHER // max(1, rows) if isinstance(rows, int) else 0
            segment = min(max(together, _SHORTEST), _LONGEST)
        segments = -(-chunks // max(1, segment // chunk))
        # Evenly filled segments need less padding than full ones and a nearly empty
        # last one.
        return Cut(chunk=chunk, chunks=-(-chunks // segments), segments=segments)


@dataclass(frozen=True)
class Cut:
    """A sequence as ``segments`` segments of ``chunks`` chunks of ``chunk``."""

    chunk: int
    chunks: int
    segments: int

    @property
    def segment(self) -> int:
        """Positions in a segment."""
        return self.chunks * self.chunk

    @property
    def length(self) -> int:
        """Positions in all segments, with padding."""
        return self.segments * self.segment

    def split(self, tree: Tree) -> Tree:
        """`[B, N, P C, ...]` -> `[B, N, P, C, ...]`, P chunks of C positions."""
        return jax.tree.map(
            lambda x: x.reshape(*x.shape[:2], self.chunks, self.chunk, *x.shape[3:]),
            tree,
        )

    def join(self, tree: Tree) -> Tree:
        """The inverse of `split`."""
        return jax.tree.map(
            lambda x: x.reshape(*x.shape[:2], self.segment, *x.shape[4:]), tree
        )


class Arrays(NamedTuple):
    """The arrays of a sequence, with gradients."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, T, n, H]
    value: jax.Array  # [B, T, n, Hv]
    log_decay: jax.Array | None = None  # [1 or B, T, n] or [B, T, n, H]
    beta: jax.Array | None = None  # [B, T, n]


class Tables(NamedTuple):
    """Per-position arrays without a gradient."""

    mask: jax.Array | None = None  # real keys, [1 or B, T]
    query_mask: jax.Array | None = None  # real queries, [1 or B, T]
    resets: jax.Array | None = None  # where documents start, [B, T]
    extra: Tree = None  # the mechanism's tables, [1 or B, T] each


@dataclass(frozen=True)
class Form:
    """The causal form of a mechanism: what it computes in one segment.

    Equal forms share one compiled program, so the functions must be defined at module
    level, and options are compared by value.

    Attributes:
      prepare: ``prepare(options, arrays, tables) -> features``: from the `Arrays` and
        `Tables` of one segment, positions on axis 1, to the features that ``segment``
        reads, heads first, `[B, N, L, ...]`.
      segment: ``segment(options, state, features, extra, rows) -> (outputs, state)``:
        from the state before a segment and its features, `[B, N, P, C, ...]` for P
        chunks of C positions, to the outputs and the state after. ``extra`` are the
        mechanism's tables, `[1 or B, 1, P, C]`, and ``rows`` the documents of packed
        rows (`causal.documents`), or None. Hidden positions must not change the state.
      options: static arguments of both functions.
      scale: ``scale(options, other) -> factor``, both `[B, N, L]`. ``segment`` then
        returns a pair, ``numerator`` `[B, N, P, C, Hv]` and ``other`` `[B, N, P, C]`,
        and the output is ``numerator * factor``; its gradient does not recompute the
        numerators. None leaves the outputs unchanged: any tree of arrays.
    """

    prepare: Callable[..., Tree]
    segment: Callable[..., tuple[Tree, Tree]]
    options: Hashable
    scale: Callable[..., jax.Array] | None = None


@dataclass(frozen=True)
class _Call:
    """The static arguments of a run."""

    form: Form
    cut: Cut
    dtype: Any  # of the outputs
    keeps_outputs: bool


def run(
    form: Form,
    state: Tree,
    arrays: Arrays,
    tables: Tables,
    *,
    chunking: Chunking | None = None,
    dtype: Any,
) -> tuple[Tree, Tree]:
    """Runs a mechanism's causal form over a whole sequence.

    Args:
      form: the mechanism.
      state: before the sequence, arrays `[B, N, ...]` in the dtype of the sums.
      arrays: positions on axis 1.
      tables: masks (None = all positions are real), where the state is cleared because
        a document starts, and arrays for the form.
      chunking: how the sequence is cut.
      dtype: of the outputs.

    Returns:
      The outputs `[B, T, N, ...]`, and the state after the last position.
    """
    batch, length, heads = arrays.query.shape[:3]
    cut = (chunking or Chunking()).cut(length, batch * heads)
    if cut.length > length:
        # Positions appended as padding must not enter any sum.
        real = jnp.ones((1, length), bool)
        mask = real if tables.mask is None else tables.mask
        query_mask = real if tables.query_mask is None else tables.query_mask
        tables = tables._replace(mask=mask, query_mask=query_mask)
    # Rounded outputs are of no use to the gradient.
    exact = jnp.dtype(dtype) == jax.tree.leaves(state)[0].dtype
    call = _Call(form, cut, jnp.dtype(dtype), form.scale is not None and exact)
    return _run(call, state, arrays, tables)


def nothing(arrays: Arrays, dtype: jnp.dtype) -> jax.Array:
    """Zeros `[B, N]`, from which a form builds the state before a sequence.

    Derived from the arrays' first position, not from a shape: the loop's carry then has
    the same sharding and varying axes as the values added to it.
    """
    heads = arrays.query.shape[2]
    query = jnp.zeros_like(arrays.query[:, 0, :, 0], dtype)
    key, value = (
        jnp.zeros_like(inputs.match_heads(x[:, :1], heads)[:, 0, :, 0], dtype)
        for x in (arrays.key, arrays.value)
    )
    # A sum: the state varies along every mesh axis along which any of them varies.
    return query + key + value


# Compiled here, so that calls outside ``jax.jit`` do not trace the loop every time.
@functools.partial(jax.jit, static_argnums=0)
def _run(call: _Call, state: Tree, arrays: Arrays, tables: Tables) -> tuple[Tree, Tree]:
    length = arrays.query.shape[1]
    missing = call.cut.length - length
    if missing:
        fill = functools.partial(pad_end, length=call.cut.length)
        arrays, tables = jax.tree.map(fill, arrays), jax.tree.map(fill, tables)
    both: Any = _over_segments(call, state, arrays, tables)
    outputs, state = both
    return jax.tree.map(lambda x: x[:, :length] if missing else x, outputs), state


def pad_end(x: jax.Array, length: int) -> jax.Array:
    """Appends zeros to `[B, T, ...]` up to a length."""
    missing = length - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_segments(
    call: _Call, start: Tree, arrays: Arrays, tables: Tables
) -> tuple[Tree, Tree]:
    return _forward(call, start, arrays, tables)[0]


def _forward(call: _Call, start: Tree, arrays: Arrays, tables: Tables) -> tuple:
    def step(state: Tree, index: jax.Array, _: None) -> tuple[Tree, Tree, Tree]:
        outputs, after = _segment(call, state, *_part(call, (arrays, tables), index))
        return after, outputs, state

    state, outputs, starts = _loop(call, step, start, None)
    kept = outputs if call.keeps_outputs else None
    return (outputs, state), (starts, arrays, tables, kept)


def _backward(call: _Call, kept: tuple, cotangents: tuple) -> tuple:
    starts, arrays, tables, outputs = kept
    of_outputs, of_state = cotangents

    def step(after: Tree, index: jax.Array, start: Tree) -> tuple[Tree, Tree, None]:
        segment = _part(call, (arrays, tables, outputs, of_outputs), index)
        of_start, of_arrays = _pullback(call, start, segment, after)
        return of_start, of_arrays, None

    of_start, of_arrays, _ = _loop(call, step, of_state, starts, reverse=True)
    return of_start, of_arrays, None


_over_segments.defvjp(_forward, _backward)


def _segment(
    call: _Call, state: Tree, arrays: Arrays, tables: Tables
) -> tuple[Tree, Tree]:
    """The outputs of one segment, `[B, L, N, ...]`, and the state after it."""
    form, options = call.form, call.form.options
    features, *rest = _features(call, arrays, tables)
    outputs, after = form.segment(options, state, features, *rest)
    # Joined first: on a CPU, loops over one long axis are faster than over two.
    outputs = call.cut.join(outputs)
    if form.scale is not None:
        numerator, other = outputs
        outputs = numerator * form.scale(options, other)[..., None]

    def positions_first(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 1, 2).astype(call.dtype)

    return jax.tree.map(positions_first, outputs), after


def _features(
    call: _Call, arrays: Arrays, tables: Tables
) -> tuple[Tree, Tree, Documents | None]:
    """The features of one segment, its extra tables and its documents, in chunks."""
    features = call.form.prepare(call.form.options, arrays, tables)
    by_row = jax.tree.map(lambda x: x[:, None], (tables.extra, tables.resets))
    extra, resets = call.cut.split(by_row)
    rows = None if resets is None else number_starts(resets)
    return call.cut.split(features), extra, rows


def _pullback(
    call: _Call,
    state: Tree,
    segment: tuple[Arrays, Tables, Any, Tree],
    of_after: Tree,
) -> tuple[Tree, Arrays]:
    """The gradients of one segment's state and arrays.

    A segment is its arrays, tables, outputs and their gradient. Outputs were kept if
    they are ``numerator * factor``: they replace the numerators, which are then not
    recomputed.
    """
    arrays, tables, outputs, of_outputs = segment
    if outputs is None:

        def run_segment(state: Tree, arrays: Arrays) -> tuple[Tree, Tree]:
            return _segment(call, state, arrays, tables)

        return jax.vjp(run_segment, state, arrays)[1]((of_outputs, of_after))

    def prepare(arrays: Arrays) -> tuple[Tree, tuple]:
        features, *rest = _features(call, arrays, tables)
        return features, tuple(rest)

    form: Any = call.form
    features, pull_features, rest = jax.vjp(prepare, arrays, has_aux=True)
    outputs, of_outputs = (jnp.swapaxes(x, 1, 2) for x in (outputs, of_outputs))

    def parts(state: Tree, features: Tree) -> tuple[Tree, Tree]:
        outputs, after = form.segment(form.options, state, features, *rest)
        numerator, other = call.cut.join(outputs)
        return (numerator, form.scale(form.options, other)), after

    ((_, factor), _), pull = jax.vjp(parts, state, features)
    of_factor = (of_outputs * outputs).sum(-1) / factor
    of_scaled = of_outputs * factor[..., None], of_factor
    of_state, of_features = pull((of_scaled, of_after))
    return of_state, pull_features(of_features)[0]


def _part(call: _Call, tree: Any, index: jax.Array) -> Any:
    """One segment of every array.

    Sliced here rather than before the loop, where putting segments first would copy all
    arrays.
    """
    if call.cut.segments == 1:
        return tree
    size = call.cut.segment
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, 1), tree
    )


def _loop(
    call: _Call,
    step: Callable[[Tree, jax.Array, Tree], tuple[Tree, Tree, Tree]],
    carry: Tree,
    each: Tree,
    reverse: bool = False,
) -> tuple[Tree, Tree, Tree]:
    """``jax.lax.scan`` over the segments, but without a loop if there is only one.

    ``step`` maps the carry, the segment's index and its part of ``each`` to the new
    carry, the outputs for its positions, and anything else per segment. Returned are
    the final carry, the outputs for all positions, and the rest, stacked.
    """
    count = call.cut.segments
    if count == 1:
        only = jax.tree.map(lambda x: x.squeeze(0), each)
        carry, outputs, others = step(carry, jnp.zeros((), jnp.int32), only)
        return carry, outputs, jax.tree.map(lambda x: x[None], others)

    def turn(carry: Tree, indexed: tuple) -> tuple[Tree, tuple]:
        carry, outputs, others = step(carry, *indexed)
        return carry, (outputs, others)

    indexed = jnp.arange(count, dtype=jnp.int32), each
    carry, (outputs, others) = jax.lax.scan(turn, carry, indexed, reverse=reverse)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], call.cut.length, *x.shape[3:])

    return carry, jax.tree.map(join, outputs), others
