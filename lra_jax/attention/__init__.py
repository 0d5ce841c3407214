"""Attention mechanisms as pure functions of arrays.

For each registered mechanism X there are ``X_attention(query, key, value, mask=None,
is_causal=False, ...)`` and ``X_weights(query, key, ...)``, the dense `[B, N, T, S]`
matrix that the fast form never builds. Those with a stream also have ``X_init``,
``X_prefill`` and ``X_step``, for decoding with a state of constant size. Layout and
masks: `lra_jax.attention.shapes`; the table: ``python -m lra_jax.attention``.

Importing this package does not import jax; the functions load when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lra_jax.attention.registry import (
    MECHANISMS,
    Gate,
    Mechanism,
    accepted_keywords,
    names,
    resolve,
)

# The same names as a type checker and an editor see them; a test compares the two.
if TYPE_CHECKING:
    from lra_jax.attention.bigbird import bigbird_attention, bigbird_weights
    from lra_jax.attention.cosformer import (
        CosformerState,
        cosformer_attention,
        cosformer_init,
        cosformer_prefill,
        cosformer_step,
        cosformer_weights,
    )
    from lra_jax.attention.delta import (
        DeltaState,
        delta_attention,
        delta_init,
        delta_prefill,
        delta_step,
        delta_weights,
    )
    from lra_jax.attention.flash import (
        flash_attention,
        flash_layout,
        flash_parameters,
        flash_weights,
    )
    from lra_jax.attention.flow import (
        FlowState,
        FlowTerms,
        flow_attention,
        flow_init,
        flow_prefill,
        flow_step,
        flow_terms,
        flow_weights,
    )
    from lra_jax.attention.fnet import fnet_attention, fnet_weights
    from lra_jax.attention.gated_delta import (
        GatedDeltaState,
        gated_delta_attention,
        gated_delta_init,
        gated_delta_prefill,
        gated_delta_step,
        gated_delta_weights,
    )
    from lra_jax.attention.gau import (
        gau_attention,
        gau_layout,
        gau_parameters,
        gau_weights,
    )
    from lra_jax.attention.gla import (
        GlaState,
        gla_attention,
        gla_init,
        gla_prefill,
        gla_step,
        gla_weights,
    )
    from lra_jax.attention.lightning import (
        LightningState,
        lightning_attention,
        lightning_init,
        lightning_prefill,
        lightning_slopes,
        lightning_step,
        lightning_weights,
    )
    from lra_jax.attention.linear import (
        LinearState,
        linear_attention,
        linear_init,
        linear_prefill,
        linear_step,
        linear_weights,
    )
    from lra_jax.attention.linformer import (
        linformer_attention,
        linformer_parameters,
        linformer_weights,
    )
    from lra_jax.attention.local import local_attention, local_weights
    from lra_jax.attention.longformer import longformer_attention, longformer_weights
    from lra_jax.attention.luna import (
        luna_attention,
        luna_packed,
        luna_parameters,
        luna_weights,
    )
    from lra_jax.attention.norm import (
        NormState,
        norm_attention,
        norm_init,
        norm_prefill,
        norm_step,
        norm_weights,
    )
    from lra_jax.attention.nystrom import (
        nystrom_attention,
        nystrom_parameters,
        nystrom_weights,
    )
    from lra_jax.attention.performer import (
        PerformerState,
        PerformerSums,
        performer_attention,
        performer_init,
        performer_parameters,
        performer_prefill,
        performer_projection,
        performer_step,
        performer_weights,
    )
    from lra_jax.attention.reformer import reformer_attention, reformer_weights
    from lra_jax.attention.retention import (
        RetentionState,
        retention_attention,
        retention_init,
        retention_prefill,
        retention_slopes,
        retention_step,
        retention_weights,
    )
    from lra_jax.attention.sinkhorn import (
        sinkhorn_attention,
        sinkhorn_parameters,
        sinkhorn_weights,
    )
    from lra_jax.attention.softmax import (
        SoftmaxState,
        softmax_attention,
        softmax_init,
        softmax_prefill,
        softmax_step,
        softmax_weights,
    )
    from lra_jax.attention.sparse import sparse_attention, sparse_weights
    from lra_jax.attention.synthesizer import (
        synthesizer_attention,
        synthesizer_parameters,
        synthesizer_weights,
    )

__all__ = [
    "MECHANISMS",
    "CosformerState",
    "DeltaState",
    "FlowState",
    "FlowTerms",
    "Gate",
    "GatedDeltaState",
    "GlaState",
    "LightningState",
    "LinearState",
    "Mechanism",
    "NormState",
    "PerformerState",
    "PerformerSums",
    "RetentionState",
    "SoftmaxState",
    "accepted_keywords",
    "bigbird_attention",
    "bigbird_weights",
    "cosformer_attention",
    "cosformer_init",
    "cosformer_prefill",
    "cosformer_step",
    "cosformer_weights",
    "delta_attention",
    "delta_init",
    "delta_prefill",
    "delta_step",
    "delta_weights",
    "flash_attention",
    "flash_layout",
    "flash_parameters",
    "flash_weights",
    "flow_attention",
    "flow_init",
    "flow_prefill",
    "flow_step",
    "flow_terms",
    "flow_weights",
    "fnet_attention",
    "fnet_weights",
    "gated_delta_attention",
    "gated_delta_init",
    "gated_delta_prefill",
    "gated_delta_step",
    "gated_delta_weights",
    "gau_attention",
    "gau_layout",
    "gau_parameters",
    "gau_weights",
    "gla_attention",
    "gla_init",
    "gla_prefill",
    "gla_step",
    "gla_weights",
    "lightning_attention",
    "lightning_init",
    "lightning_prefill",
    "lightning_slopes",
    "lightning_step",
    "lightning_weights",
    "linear_attention",
    "linear_init",
    "linear_prefill",
    "linear_step",
    "linear_weights",
    "linformer_attention",
    "linformer_parameters",
    "linformer_weights",
    "local_attention",
    "local_weights",
    "longformer_attention",
    "longformer_weights",
    "luna_attention",
    "luna_packed",
    "luna_parameters",
    "luna_weights",
    "names",
    "norm_attention",
    "norm_init",
    "norm_prefill",
    "norm_step",
    "norm_weights",
    "nystrom_attention",
    "nystrom_parameters",
    "nystrom_weights",
    "performer_attention",
    "performer_init",
    "performer_parameters",
    "performer_prefill",
    "performer_projection",
    "performer_step",
    "performer_weights",
    "reformer_attention",
    "reformer_weights",
    "resolve",
    "retention_attention",
    "retention_init",
    "retention_prefill",
    "retention_slopes",
    "retention_step",
    "retention_weights",
    "sinkhorn_attention",
    "sinkhorn_parameters",
    "sinkhorn_weights",
    "softmax_attention",
    "softmax_init",
    "softmax_prefill",
    "softmax_step",
    "softmax_weights",
    "sparse_attention",
    "sparse_weights",
    "synthesizer_attention",
    "synthesizer_parameters",
    "synthesizer_weights",
]


def __getattr__(name: str) -> Any:
    for mechanism in MECHANISMS.values():
        # "FlowTerms" and "flow_terms" alike belong to "flow".
        plain = name.lower().replace("_", "")
        if plain.startswith(mechanism.name.replace("_", "")):
            module = importlib.import_module(mechanism.module)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
