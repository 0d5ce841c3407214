"""The core of linear attention: products of features, summed over keys.

``out_i = sum_j w_ij v_j / bound(sum_j w_ij)`` with ``w_ij = phi(q_i) . phi(k_j)``,
for some mechanisms times ``exp(-slope |i - j|)``. A mechanism says what phi is, which
may depend on the position, and how the sum is bounded (`Kernel`). Here are the ways to
compute it, all linear in the length:

- over all keys, by associativity: ``phi(q) (phi(k)^T v)``, two ``einsum``;
- over the earlier keys, in chunks: pairs within a chunk, and before it one state, the
  sum of ``phi(k_j) v_j^T`` (`lra_jax.attention.causal.engine`);
- states before the chunks by ``jax.lax.associative_scan``, or one after the other
  (`lra_jax.attention.causal.prefix`);
- over the keys of one document of a packed row;
- over a sequence whose parts are on several devices, which exchange their sums.

Sums are float32 or wider. Hidden positions are zeroed before and after phi, because
phi(0) may not be zero.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import feature_maps, masking, packed, streams
from lra_jax.attention.call import Call
from lra_jax.attention.causal import documents, engine, fades
from lra_jax.attention.causal.both_ends import from_both_ends
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import exp_visible, hide_pairs, prefix, so_far
from lra_jax.attention.linear.by_document import sum_by_document
from lra_jax.attention.linear.sums import Sums, key_sums, row_sums
from lra_jax.attention.sharded import exchange
from lra_jax.attention.sharded.documents import sums_before


class LinearState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: Sums  # [B, N, M, Hv] and [B, N, M]
    position: jax.Array  # of the next token in each sample, [B] int32

    __repr__ = streams.show_shapes


@dataclass(frozen=True, kw_only=True)
class Kernel(kernels.Weighting):
    """The part of linear attention that a mechanism defines.

    The fields of `Weighting`, and:

    Attributes:
      rotate: ``rotate(features, tables)``, a function defined at module level that
        makes the features `[B, N, L, M]` of a stretch of L positions depend on where it
        is, as kernels do by `max_length`; None = they do not depend on it.
      tables: ``tables(dtype)`` gives the tables of all positions, `[1 or B, T]` each;
        `rotate` gets those of its stretch, `[1 or B, 1, L]`.
      copies: the number of rotated features for each feature.
      refusal: the option that kernels do not support; None = they support all.
    """

    rotate: Callable[..., jax.Array] | None = None
    tables: Callable[[Any], Any] | None = None
    copies: int = 1
    refusal: kernels.Refusal | None = None


def attend(
    call: Call, kernel: Kernel, mechanism: str, dtype: Any = None
) -> tuple[jax.Array, Any]:
    """Linear attention by kernels, or in XLA's form.

    Args:
      call: the arguments.
      kernel: the weights.
      mechanism: whose kernels, see `kernels.choose`.
      dtype: of the output; None = the query's.

    Returns:
      `[B, T, N, Hv]`, and if causal, in XLA's form, the `Sums` after the last position;
      otherwise None.

    Raises:
      ValueError: there is no kernel although one is requested, or the state or an
        option does not fit.
    """
    phi = feature_maps.for_kernels(kernel.feature_map)
    target = call.choose(mechanism, phi, kernel.refusal)
    if target is not None:
        # Hidden again, because phi(0) may not be zero.
        out = by_kernel(call, kernel, target)
        return masking.hide(out, call.query_mask), None
    form = _Form.of(call, kernel)
    dtype = call.query.dtype if dtype is None else dtype
    if call.is_causal:
        return form.causal(form.engine_form, dtype)
    if kernel.slopes is not None:
        out = form.from_both_ends()
    elif call.rows is not None:
        out = form.by_document(call.rows)
    else:
        out = form.whole()
    return out.astype(dtype), None


def by_kernel(call: Call, kernel: Kernel, target: kernels.Target) -> jax.Array:
    """Linear attention by the target's kernels."""
    phi = feature_maps.for_kernels(kernel.feature_map)
    return kernels.attend(
        target,
        call.kernel_inputs,
        dataclasses.replace(kernel, feature_map=phi),
        is_causal=call.is_causal,
        chunking=call.chunking,
        precision=call.precision,
    )


def no_sums(arrays: engine.Arrays, width: int, dtype: jnp.dtype) -> Sums:
    """The sums before the first position, for features of this width M."""
    zeros = engine.nothing(arrays, dtype)[..., None]
    total = zeros + jnp.zeros((width,), dtype)[None, None]
    value = zeros + jnp.zeros((arrays.value.shape[-1],), dtype)[None, None]
    return Sums(total[..., None] + value[..., None, :], total)


def run(
    call: Call,
    kernel: Kernel,
    mechanism: str,
    kind: type[LinearState],
    norm: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, Any]:
    """`attend`, and the state of a stream.

    Args:
      call, kernel, mechanism: as in `attend`.
      kind: the class of the state.
      norm: of the output, in the dtype of the sums; None = none.
    """
    out, sums = attend(call, kernel, mechanism, None if norm is None else call.dtype)
    out = call.finish(out if norm is None else norm(out))
    return out, kind(sums, call.next_position) if call.streams else None


class _Options(NamedTuple):
    """The static part of a `Kernel`; compared by value."""

    feature_map: feature_maps.FeatureMap
    dtype: Any
    precision: jax.lax.PrecisionLike
    rotate: Callable[..., jax.Array] | None
    denominator: str
    eps: float

    def prepare(
        self, arrays: engine.Arrays, tables: engine.Tables
    ) -> tuple[jax.Array, ...]:
        """phi(q), phi(k), v and the logarithm of each position's decay, if any.

        The ``prepare`` of an `engine.Form`: heads first, zero where hidden.
        """
        query, key, value = feature_maps.prepare(self, arrays, tables)
        query, key = (self.turn(x, tables.extra) for x in (query, key))
        if arrays.log_decay is None:
            return query, key, value
        return query, key, value, jnp.swapaxes(arrays.log_decay, 1, 2)

    def turn(self, features: jax.Array, tables: Any) -> jax.Array:
        """The features with their positions."""
        if self.rotate is None:
            return features
        length = features.shape[2]
        return self.rotate(
            features, jax.tree.map(lambda x: x[:, None, :length], tables)
        )

    def segment(
        self,
        state: Sums,
        features: tuple[jax.Array, ...],
        _: Any,
        rows: Documents | None,
    ) -> tuple[tuple[jax.Array, jax.Array], Sums]:
        """One segment of an `engine.Form`: numerators, denominators, the state after.

        Of decays, only differences within a chunk and those of whole chunks are
        exponentiated; none of these is positive, so nothing can overflow.
        """
        query, key, value, *log_decay = features
        product = functools.partial(jnp.einsum, precision=self.precision)
        scores = product("bnpim,bnpjm->bnpij", query, key)
        visible = documents.visible(scores.shape[-1], rows)
        end = None
        if log_decay:
            fade = so_far(log_decay[0])
            end = fade[..., -1]
            scores = scores * exp_visible(fade[..., None] - fade[..., None, :], visible)
            query = query * jnp.exp(fade)[..., None]
            key = key * jnp.exp(end[..., None] - fade)[..., None]
        else:
            scores = hide_pairs(scores, visible)
        query, key = documents.readers(query, rows), documents.stayers(key, rows)
        updates = Sums(product("bnpjm,bnpjv->bnpmv", key, value), key_sums(key))
        before, after = prefix(state, updates, documents.decay(end, rows, key.dtype))
        numerator = product("bnpij,bnpjv->bnpiv", scores, value)
        numerator += product("bnpim,bnpmv->bnpiv", query, before.summary)
        denominator = row_sums(scores)
        denominator += product("bnpim,bnpm->bnpi", query, before.total)
        return (numerator, denominator), after

    def scale(self, total: jax.Array) -> jax.Array:
        """One over the bounded sum of the weights."""
        if self.denominator == "none":
            return jnp.ones_like(total)
        if self.denominator == "clamp":
            total = feature_maps.at_least(total, self.eps)
        elif self.denominator == "absolute":
            total = feature_maps.at_least(jnp.abs(total), self.eps)
        else:
            total = total + self.eps
        return feature_maps.over(jnp.ones_like(total), total)


@dataclass(frozen=True)
class _Form:
    """XLA's form of one call."""

    call: Call
    options: _Options
    slopes: jax.Array | None
    tables: Any
    empty: Sums  # before the first position

    @classmethod
    def of(cls, call: Call, kernel: Kernel) -> "_Form":
        """The form with which a call begins.

        A feature map from outside is applied here: it may close over an array, to which
        the loop's custom derivative would pass no gradient.

        Raises:
          ValueError: an unknown feature map.
        """
        dtype = call.dtype
        query, key, phi = feature_maps.apply_custom(
            call.query, call.key, kernel.feature_map, dtype, call.mask, call.query_mask
        )
        call = call.replace(query=query, key=key)
        options = _Options(
            phi, dtype, call.precision, kernel.rotate, kernel.denominator, kernel.eps
        )
        tables = None if kernel.tables is None else kernel.tables(dtype)
        empty = no_sums(call.arrays, kernel.copies * key.shape[-1], dtype)
        return cls(call, options, kernel.slopes, tables, empty)

    @property
    def sums_form(self) -> engine.Form:
        """The causal form whose outputs are the two sums."""
        return engine.Form(_Options.prepare, _Options.segment, self.options)

    @property
    def engine_form(self) -> engine.Form:
        """The causal form whose output is their quotient."""
        return dataclasses.replace(self.sums_form, scale=_Options.scale)

    def causal(self, form: engine.Form, dtype: Any) -> tuple[Any, Sums]:
        """Attention to the earlier keys, and the sums after the last position."""
        call = self.call
        start = streams.check_sums(call.sums, self.empty)
        if call.axis is not None:
            start = sums_before(self.part_sums, call.rows, call.axis)
        return engine.run(
            form,
            start,
            call.arrays._replace(log_decay=self.log_decay()),
            call.tables(self.tables),
            chunking=call.chunking,
            dtype=dtype,
        )

    def log_decay(self) -> jax.Array | None:
        """The logarithm of each position's decay, `[1 or B, T, N]`."""
        if self.slopes is None:
            return None
        slopes, mask = fades.bound(-self.slopes)[None, None], self.call.mask
        places = jnp.arange(self.call.query.shape[1], dtype=jnp.int32)[None, :, None]
        log_decay = slopes * jnp.ones_like(places, slopes.dtype)
        if mask is None or not self.call.streams:
            return log_decay
        # After a sample's last real position nothing decays, so that its state stays.
        ends = masking.next_position(mask, *mask.shape)[:, None, None]
        return jnp.where(places < ends, log_decay, 0)

    def from_both_ends(self) -> jax.Array:
        """Attention to all keys, with a decay by distance, from both ends."""
        call, slopes = self.call, jnp.asarray(self.slopes)
        length, keys = call.query.shape[1], call.key.shape[1]
        longest, mask = max(length, keys), call.mask
        if mask is None and keys < longest:
            mask = jnp.ones(call.key.shape[:2], bool)
        pad = functools.partial(engine.pad_end, length=longest)
        query, key, value = map(pad, call.arrays[:3])
        mask = None if mask is None else pad(mask)
        log_decay = fades.bound(-slopes)[None, None] * jnp.ones(
            (1, longest, 1), slopes.dtype
        )
        until, after = from_both_ends(
            self.sums_form,
            self.empty,
            engine.Arrays(query, key, value, log_decay),
            call.replace(mask=mask).tables(),
            chunking=call.chunking,
            dtype=call.dtype,
        )
        step = jnp.exp(-slopes)[None, None]
        out = until[0] + after[0] * step[..., None]
        total = until[1] + after[1] * step
        return (out * self.options.scale(total)[..., None])[:, :length]

    def whole(self) -> jax.Array:
        """Attention to all keys: ``phi(q) (phi(k)^T v)``."""
        call = self.call
        query = self.features(call.query, call.query_mask)
        sums = exchange.total(self.part_sums(None), call.axis)
        product = functools.partial(jnp.einsum, precision=call.precision)
        out = product("bntm,bnmv->bntv", query, sums.summary)
        total = feature_maps.project(query, sums.total, call.precision)
        return jnp.swapaxes(out * self.options.scale(total)[..., None], 1, 2)

    def by_document(self, rows: packed.Packed) -> jax.Array:
        """Attention to the keys of the query's document."""
        call = self.call
        # The sums that other devices hold, if the rows are sliced.
        before, beyond = rows.around(self.part_sums) or (self.empty, self.empty)
        query, key, value = self.options.prepare(call.arrays, call.tables(self.tables))
        out, total = sum_by_document(
            (query, key, value),
            rows.resets,
            before,
            beyond,
            chunk=(call.chunking or engine.Chunking()).chunk,
            precision=call.precision,
        )
        return jnp.swapaxes(out * self.options.scale(total)[..., None], 1, 2)

    def part_sums(self, part: jax.Array | None) -> Sums:
        """The sums over the real positions of a part, a mask `[B, S]`; None = all."""
        call, mask = self.call, masking.both(self.call.mask, part)
        features = self.features(call.key, mask)
        value = masking.by_head(call.value, call.query.shape[2], mask, call.dtype)
        precision = call.precision
        summary = jnp.einsum("bnsm,bnsv->bnmv", features, value, precision=precision)
        return Sums(summary, features.sum(2))

    def features(self, array: jax.Array, mask: jax.Array | None) -> jax.Array:
        """phi of all queries or keys, `[B, N, S, M]`, zero where hidden."""
        phi, heads = self.options.feature_map, self.call.query.shape[2]
        features = feature_maps.feature_map(phi)(
            masking.by_head(array, heads, mask, self.call.dtype)
        )
        return self.options.turn(masking.hide_by_head(features, mask), self.tables)
