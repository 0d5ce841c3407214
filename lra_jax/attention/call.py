"""One call of an attention: its arguments, checked once and brought to one form.

A public function turns what it was passed into a `Call`; everything below takes that
object and the options of the mechanism. Arrays are not copied here: their hidden
positions are zeroed where they are read, part by part.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import inputs, masking, packed
from lra_jax.attention.causal import engine
from lra_jax.attention.sharded.documents import slice_documents
from lra_jax.errors import expected

Parameters = ParamSpec("Parameters")

_FIELDS = frozenset(
    {
        "query",
        "key",
        "value",
        "mask",
        "is_causal",
        "query_mask",
        "segment_ids",
        "chunking",
        "precision",
        "implementation",
        "deterministic",
    }
)
"""The parameters of an ``X_attention`` that are not options of its mechanism."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments that mechanisms share.

    Attributes:
      query: `[B, T, N, H]`.
      key: `[B, S, n, H]`, where n divides N.
      value: `[B, S, n, Hv]`.
      mask: the real keys, `[B, S]`, in packed rows without their padding; None = all.
      query_mask: the real queries, `[B, T]`; None = all.
      is_causal: position i sees keys 0..i only.
      rows: where packed documents are; None = one per row.
      dtype: of sums and states, float32 or float64.
      out_dtype: the query's, which the output gets.
      finite: which rows of the query were finite, `[B, T, N, 1]`, see
        `masking.hide_broken`; None = the query is as passed.
      chunking: how the sequence is cut; None = the backend's choice.
      precision: of matrix products.
      implementation: see `kernels.choose`.
      deterministic: Flax's keyword, from a layer; None = no layer calls.
      state: of the stream so far; None = a new one.
      streams: whether to compute the state after the call.
      axis: the mesh axis that holds the other parts of the sequence; None = there are
        none.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array | None = None
    query_mask: jax.Array | None = None
    is_causal: bool = False
    rows: packed.Packed | None = None
    dtype: Any = jnp.float32
    out_dtype: Any = jnp.float32
    finite: jax.Array | None = None
    chunking: engine.Chunking | None = None
    precision: jax.lax.PrecisionLike = None
    implementation: kernels.Implementation = "auto"
    deterministic: bool | None = None
    state: Any = None
    streams: bool = False
    axis: str | None = None

    @classmethod
    def of(
        cls,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        is_causal: bool = False,
        *,
        query_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        state: Any = None,
        axis: str | None = None,
        **settings: Any,
    ) -> "Call":
        """Checks the arguments of an ``X_attention``.

        Args:
          query, key, value, mask, is_causal, segment_ids: as in `linear_attention`.
          query_mask: `[B, T]`, or anything that broadcasts to `[B, 1, 1, T]`.
          state: of the stream so far.
          axis: see `Call`.
          **settings: chunking, precision, implementation and deterministic.

        Raises:
          ValueError: shapes, dtypes, a mask or the chunking do not fit.
        """
        query, key, value = (inputs.of_jax(x) for x in (query, key, value))
        inputs.check_inputs(query, key, value, is_causal)
        if not isinstance(cut := settings.get("chunking"), engine.Chunking | None):
            raise expected("chunking", "a Chunking or None", f"{cut!r}")
        batch, length = query.shape[:2]
        rows = (
            packed.documents(segment_ids, query, key)
            if axis is None
            else slice_documents(segment_ids, axis)
        )
        mask = packed.real_positions(
            masking.padding_mask(mask, batch, key.shape[1]), rows
        )
        query_mask = masking.padding_mask(query_mask, batch, length, "query_mask")
        out_dtype, finite = jnp.result_type(query), None
        if query_mask is None:
            query, finite = masking.hide_broken(query, mask)
        else:
            query_mask = packed.real_positions(query_mask, rows)
        dtype = inputs.accumulation_dtype(query, key, value)
        if state is not None:
            dtype = jax.tree.leaves(state.sums)[0].dtype
        return cls(
            query=query,
            key=key,
            value=value,
            mask=mask,
            query_mask=query_mask,
            is_causal=is_causal,
            rows=rows,
            dtype=dtype,
            out_dtype=out_dtype,
            finite=finite,
            state=state,
            axis=axis,
            **settings,
        )

    def replace(self, **fields: Any) -> "Call":
        """The call with other arrays or settings."""
        return dataclasses.replace(self, **fields)

    def hide_queries(self, query_mask: jax.Array | None) -> "Call":
        """The call with this mask `[B, T]` of its queries; rows of others are zero."""
        finite = self.finite
        if query_mask is not None and finite is not None:
            finite = finite | ~query_mask[..., None, None]
        return self.replace(query_mask=query_mask, finite=finite)

    def finish(self, out: jax.Array) -> jax.Array:
        """The output in the query's dtype; rows that were not finite are NaN."""
        return masking.broken_again(out.astype(self.out_dtype), self.finite)

    def by_head(
        self, dtype: jnp.dtype | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value as `[B, N, T or S, ...]`, zero where keys are hidden.

        In ``dtype``; None = each in its own.
        """
        heads = self.query.shape[2]
        query = masking.by_head(self.query, heads, dtype=dtype)
        key, value = (
            masking.by_head(x, heads, self.mask, dtype) for x in (self.key, self.value)
        )
        return query, key, value

    @functools.cached_property
    def next_position(self) -> jax.Array:
        """`[B]` int32: the position after the last real one, in its document.

        Raises:
          ValueError: the state is of another batch size.
        """
        batch, length = self.query.shape[:2]
        before = None if self.state is None else self.state.position
        return packed.next_position(self.mask, self.rows, batch, length, before)

    @property
    def sums(self) -> Any:
        """The sums of the state; None = a new stream."""
        return None if self.state is None else self.state.sums

    @property
    def arrays(self) -> engine.Arrays:
        """The arrays for the causal engine."""
        return engine.Arrays(self.query, self.key, self.value)

    def tables(self, extra: Any = None) -> engine.Tables:
        """The tables for the causal engine, with those of the mechanism."""
        resets = None if self.rows is None else self.rows.resets
        return engine.Tables(self.mask, self.query_mask, resets, extra)

    @functools.cached_property
    def kernel_inputs(self) -> kernels.Inputs:
        """The arrays for kernels."""
        documents = None if self.rows is None else self.rows.number
        return kernels.Inputs(
            self.query,
            self.key,
            self.value,
            mask=self.mask,
            query_mask=self.query_mask,
            documents=documents,
        )

    def choose(
        self,
        mechanism: str,
        feature_map: Any = "identity",
        refusal: kernels.Refusal | None = None,
    ) -> kernels.Target | None:
        """The kernels to run, see `kernels.choose`; None = XLA's form."""
        return kernels.choose(
            self.implementation,
            self.kernel_inputs,
            mechanism=mechanism,
            is_causal=self.is_causal,
            feature_map=feature_map,
            chunking=self.chunking,
            refusal=refusal,
        )


def split(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `Call.of`, and the options of the mechanism."""
    fields = {name: x for name, x in keywords.items() if name in _FIELDS}
    return fields, {name: x for name, x in keywords.items() if name not in _FIELDS}


def bind(
    name: str, signature: inspect.Signature, args: tuple, keywords: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call, with the defaults; ``TypeError`` names the function."""
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None
    bound.apply_defaults()
    return bound.arguments


def attention_of(
    run: Callable[..., tuple[jax.Array, Any]],
) -> Callable[[Callable[Parameters, jax.Array]], Callable[Parameters, jax.Array]]:
    """Makes the body of an ``X_attention``, which only declares its parameters.

    Args:
      run: ``run(call, **options)`` returns the output and the state of a stream.

    Returns:
      A decorator. The function that it returns checks all arguments, see `Call.of`, and
      returns the output of ``run``.
    """

    def decorate(
        function: Callable[Parameters, jax.Array],
    ) -> Callable[Parameters, jax.Array]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def attention(*args: Parameters.args, **kwargs: Parameters.kwargs) -> jax.Array:
            arguments = bind(function.__name__, signature, args, kwargs)
            flax = arguments.pop("flax")
            inputs.check_keywords(attention, flax, arguments.get("deterministic"))
            fields, options = split(arguments)
            return run(Call.of(**fields), **options)[0]

        return attention

    return decorate
