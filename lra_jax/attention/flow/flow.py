"""Flow-Attention (Wu et al. 2022, "Flowformer: Linearizing Transformers with
Conservation Flows").

With non-negative features, queries are sinks and keys are sources of a flow:

- incoming ``I_i = phi(q_i) . sum_j phi(k_j)``,
  outgoing ``O_j = phi(k_j) . sum_i phi(q_i)``;
- conserved: ``I'_i = phi(q_i) . sum_j phi(k_j) / O_j``,
  ``O'_j = phi(k_j) . sum_i phi(q_i) / I_i``;
- competition ``c_j = S softmax_j(O')``, allocation ``a_i = sigmoid(I'_i T / S)``;
- ``out_i = a_i (phi(q_i) / I_i)^T sum_j phi(k_j) c_j v_j^T``.

Cost: O((T + S) H Hv) time. By design, rows do not sum to one.

The competition is the paper's softmax. ``clip`` first limits O' to [-clip, clip]: the
default of 30 only keeps the exponential finite, since O' has a mean of T / S. The
authors' code (thuml/Flowformer) has other limits: 1 in its core file, which cuts off
every source above that mean, 5 for language and 10 for reinforcement learning. Their
LRA code has ``clip=None``, ``competition_axis="heads"`` and
``feature_map=lambda x: jax.nn.relu(x) + 1e-6``. The eps, added to both factors of every
inner product, is from the core file.

``competition=False`` and ``allocation=False`` are the two ablations in the paper's
tables, ``c = 1`` and ``a = 1``.

Deviation: the authors' code has no working mask. Here padded sources and sinks are left
out of every sum, the real counts replace T and S, and padded sources take no part in
the competition, so a padded batch equals each of its samples run alone. Both sides
enter the sums, so padded queries matter too: where T = S, ``query_mask`` defaults to
``mask``, as in self-attention.

The causal form is a separate definition: `lra_jax.attention.flow.causal`. A stream
(`flow_init`, `flow_prefill`, `flow_step`) holds its sums, of a size independent of the
position.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, packed, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.flow import causal, whole
from lra_jax.attention.flow.causal import FlowState, FlowTerms, Options

__all__ = [
    "FlowState",
    "FlowTerms",
    "flow_attention",
    "flow_init",
    "flow_prefill",
    "flow_step",
    "flow_terms",
    "flow_weights",
]


def _run(call: Call, **options: Any) -> tuple[jax.Array, FlowState]:
    inputs.refuse_decoding(call.deterministic, call.query, call.key, "flow")
    call, settings = _begin(call, options)
    state: Any = None
    phi = feature_maps.for_kernels(settings.feature_map)
    refusal = _kernel_refusal(settings, call.is_causal)
    target = call.choose("flow", phi, refusal)
    if target is not None and target[0] == "cpu":
        named = settings._replace(feature_map=phi)
        out = kernels.attend_flow(call.kernel_inputs, named, is_causal=call.is_causal)
    elif call.is_causal:
        out, state = _causal(call, settings)
    else:
        out = whole.attend(call, settings, target)
    return call.finish(out), state


@attention_of(_run)
def flow_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_mask: jax.Array | None = None,
    clip: float | None = 30.0,
    *,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    competition: bool = True,
    allocation: bool = True,
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes Flow-Attention.

    Args:
      query, key, value: as in `linear_attention`.
      mask: boolean, True = a real source: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: the causal definition; needs T == S.
      query_mask: boolean, True = a real sink: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`. None = `mask` where T = S, as in self-attention, otherwise all;
        in cross-attention with T = S, pass it. Other output rows are zero.
      clip: bound on the conserved outgoing flow before the competition; None = none.
      segment_ids: as in `linear_attention`: flows and competition stay inside a
        document.
      feature_map: "sigmoid", "relu", "relu+1e-6" (the published LRA code), "elu"
        (elu(x) + 1), or a non-negative function.
      competition_axis: "source" (the paper), or "heads": the softmax runs over the
        heads of each source (the published LRA code; not causal).
      competition: False sets ``c = 1``: all sources count equally.
      allocation: False sets ``a = 1``: every sink gets all of its flow.
      eps: added to both factors of every inner product.
      extra_eps: added to every inner product itself; 1e-6 in the authors' vision code.
      chunking: as in `linear_attention`.
      precision: of the matrix products, as in ``jnp.einsum``.
      implementation: as in `linear_attention`; "auto" takes kernels only if they
        support the options.
      deterministic: from Flax's layers; with it, ``decode=True`` is refused.
      **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, a mask or an option do not fit, or there is no
        kernel although one is requested.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> flow_attention(query, key, value).shape
      (2, 64, 4, 16)
      >>> flow_attention(query, key, value, is_causal=True, feature_map="relu").shape
      (2, 64, 4, 16)
    """
    ...


def _begin(call: Call, options: dict[str, Any]) -> tuple[Call, Options]:
    """The call with the mask of its sinks, and the options."""
    computed = {"dtype": call.dtype, "precision": call.precision}
    settings = Options(**options | computed)
    causal.check(settings, call.is_causal)
    if call.axis is not None:
        inputs.refuse_causal(
            call.is_causal, "Flow-Attention over several devices has no causal form"
        )
    if call.query_mask is None and call.query.shape[1] == call.key.shape[1]:
        call = call.hide_queries(call.mask)
    return call, settings


flow_weights = dense.weights_of(
    flow_attention, "It is never negative; its rows do not sum to one."
)
flow_prefill = streams.make_prefill(flow_attention, _run, FlowState)
flow_init = streams.make_init(flow_prefill)
flow_step = streams.make_step(flow_prefill)
flow_slice = streams.make_slice(flow_attention, _run)


def flow_terms(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
    clip: float | None = 30.0,
    *,
    is_causal: bool = False,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> FlowTerms:
    """Returns the flows, the competition and the allocation of `flow_attention`.

    Arguments and errors are those of `flow_attention`; options that do not affect the
    terms are ignored.
    """
    known = inspect.signature(flow_attention).parameters
    unknown = {name: options[name] for name in options.keys() - known}
    inputs.check_keywords(flow_attention, unknown, options.get("deterministic"))
    call = Call.of(
        query,
        key,
        key,
        mask,
        is_causal,
        query_mask=query_mask,
        segment_ids=segment_ids,
        precision=options.get("precision"),
    )
    options = {name: p.default for name, p in known.items()} | options | {"clip": clip}
    options = {name: x for name, x in options.items() if name in Options._fields}
    call, settings = _begin(call, options)
    features, unit = whole.features_of(call, settings)
    if is_causal:
        terms, _ = _causal(call, settings, as_terms=True)
    else:
        terms = whole.terms_of(call, settings, *features, unit)
        terms = FlowTerms(*(jnp.swapaxes(term, 1, 2) for term in terms))
    area = causal.along(unit, terms.incoming) ** 2
    incoming, outgoing = terms.incoming * area, terms.outgoing * area
    return terms._replace(incoming=incoming, outgoing=outgoing)


def _kernel_refusal(options: Options, is_causal: bool) -> kernels.Refusal | None:
    """The option that kernels do not support; None = they support all."""
    for name, only in (
        ("competition_axis", "source"),
        ("competition", True),
        ("allocation", True),
    ):
        if (got := getattr(options, name)) != only:
            return name, f"{only!r}", f"{got!r}"
    if is_causal and not options.sums_as_is:
        limit = f"{causal.SMALL_CLIP:g}"
        return "clip", f"a clip of at most {limit} if causal", f"{options.clip}"
    return None


def _causal(
    call: Call, options: Options, as_terms: bool = False
) -> tuple[Any, FlowState]:
    """The causal form's output, or its terms `[B, T, N]`, and the state after."""
    batch, length = call.query.shape[:2]
    dtype, masks = options.dtype, (call.mask, call.query_mask)
    query, key, phi = feature_maps.apply_custom(
        call.query, call.key, options.feature_map, dtype, *masks
    )
    arrays = engine.Arrays(query, key, call.value)
    start = causal.no_flow(arrays, key.shape[-1], dtype)
    before = None, None
    if call.state is not None:
        start = streams.check_sums(call.state.sums, start)
        before = call.state.sources, call.state.sinks
    sources, sinks = (
        _counts(mask, count, length, call.rows)
        for mask, count in zip(masks, before, strict=True)
    )
    visible = jnp.ones((1, length), bool) if call.mask is None else call.mask
    tables = causal.Tables(sinks.astype(dtype), sources.astype(dtype), visible)
    options = options._replace(feature_map=phi)
    unit = 1.0
    if not options.is_bounded:
        unit = causal.unit_of(feature_maps.features(query, key, phi, dtype, *masks))
        tables = tables._replace(unit=jnp.broadcast_to(unit[:, None], (batch, length)))
    form = engine.Form(feature_maps.prepare, causal.segment, options, _as_it_is)
    if as_terms:
        form = engine.Form(feature_maps.prepare, causal.terms_segment, options)
    out, sums = engine.run(
        form,
        start.in_unit(unit),
        arrays,
        call.tables(tables),
        chunking=call.chunking,
        dtype=dtype if as_terms else call.query.dtype,
    )
    ends = (jnp.broadcast_to(x[:, -1], (batch,)) for x in (sources, sinks))
    return out, FlowState(sums.in_unit(1 / unit), *ends)


def _as_it_is(options: Options, factor: jax.Array) -> jax.Array:
    return factor


def _counts(
    mask: jax.Array | None,
    before: jax.Array | None,
    length: int,
    rows: packed.Packed | None,
) -> jax.Array:
    """Real positions of the document up to each position, `[1 or B, T]` int32."""
    if mask is None:  # A sum of constants would be computed by the compiler, slowly.
        real = jnp.ones((1, length), jnp.int32)
        counts = 1 + jnp.arange(length, dtype=jnp.int32)[None]
    else:
        real = mask.astype(jnp.int32)
        counts = jnp.cumsum(real, 1)
    if rows is not None:
        # Subtracts those before the document, whose first position may be hidden.
        counts = counts - rows.at_start(counts - real)
    if before is None:
        return counts
    if rows is None:
        return counts + before[:, None]
    return counts + jnp.where(rows.number <= 1, before[:, None], 0)
