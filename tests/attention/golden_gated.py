"""Rebuilds the golden cases of gated units: whole layers of lucidrains/FLASH-pytorch.

Norm, projections and the sum with the input stand here; the rest is the functions, with
the options that give the published divisors and scales.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import attention

Arrays = dict[str, jax.Array]


def _dense(a: Arrays, name: str, x: jax.Array) -> jax.Array:
    return x @ a[f"param.{name}.weight"].T + a[f"param.{name}.bias"][None, None]


def _norm(a: Arrays, x: jax.Array) -> jax.Array:
    if "param.norm.g" in a:  # ScaleNorm
        size = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True))
        return x / jnp.maximum(size, 1e-5) * a["param.norm.g"][None, None]
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normal = centred / jnp.sqrt(variance + 1e-5)
    weight, bias = (a[f"param.norm.{part}"][None, None] for part in ("weight", "bias"))
    return normal * weight + bias


def _unit(
    a: Arrays, options: dict[str, Any], scales: str, out: str, attend: Callable
) -> jax.Array:
    normed = _norm(a, a["x"])
    if options.get("shift_tokens"):  # Half of the columns, by one position.
        shifted, rest = jnp.split(normed, 2, -1)
        shifted = jnp.pad(shifted, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        normed = jnp.concatenate([shifted, rest], -1)
    hidden = jax.nn.silu(_dense(a, "to_hidden.0", normed))
    value, gate = jnp.split(hidden[:, :, None], 2, -1)
    z = jax.nn.silu(_dense(a, "to_qk.0", normed))[:, :, None]
    arrays = {
        "scale": a[f"param.{scales}.gamma"][:, None],
        "offset": a[f"param.{scales}.beta"][:, None],
        "gate": gate,
    }
    attended = attend(z, z, value, **arrays)[:, :, 0]
    return _dense(a, out, attended) + a["x"]


def _activation(options: dict[str, Any]) -> str:
    return "laplace" if options.get("laplace_attn_fn") else "relu2"


def gau(case: dict[str, Any], stored: dict) -> Callable[[Arrays], jax.Array]:
    length, width = stored["x"].shape[1:]

    def run(a: Arrays) -> jax.Array:
        table = a["param.rel_pos_bias.relative_attention_bias.weight"]

        def attend(*arrays: jax.Array, **keywords: Any) -> jax.Array:
            return attention.gau_attention(
                *arrays,
                mask=stored.get("key_padding_mask"),
                is_causal=bool(case["options"].get("causal")),
                # There the bias is scaled, and divided by the length as well.
                relative_bias=table * (width**0.5 / length),
                length=length,
                activation=_activation(case["options"]),
                **keywords,
            )

        return _unit(a, case["options"], "offsetscale", "to_out.0", attend)

    return run


def flash(case: dict[str, Any], stored: dict) -> Callable[[Arrays], jax.Array]:
    options, length = case["options"], stored["x"].shape[1]
    causal = bool(options.get("causal"))

    def run(a: Arrays) -> jax.Array:
        table = a["param.rel_pos_bias.relative_attention_bias.weight"]

        def attend(*arrays: jax.Array, **keywords: Any) -> jax.Array:
            return attention.flash_attention(
                *arrays,
                mask=stored.get("key_padding_mask"),
                is_causal=causal,
                relative_bias=table * options["query_key_dim"] ** 0.5,
                chunk=options["group_size"],
                length=options["group_size"] if causal else length,
                rotate=False,
                activation=_activation(options),
                **keywords,
            )

        return _unit(a, options, "qk_offset_scale", "to_out", attend)

    return run
