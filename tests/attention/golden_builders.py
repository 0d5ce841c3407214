"""Rebuilds each golden case with the public functions, from the options it states.

A builder takes the case's index entry and its stored arrays, and returns a function of
the arrays that have a gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

from . import golden_gated

Arrays = dict[str, jax.Array]
Run = Callable[[Arrays], jax.Array]


def is_causal(case: dict[str, Any]) -> bool:
    return bool(case["options"].get("causal", False))


def _plain(case: dict[str, Any], stored: dict, **options: Any) -> Run:
    """The family's own function, of the stored mask."""
    name = f"{case['name'].split('_')[0]}_attention"
    options = {
        "mask": stored.get("key_padding_mask"),
        "is_causal": is_causal(case),
        **options,
    }
    # Read when it runs: a test may put another implementation in its place.
    return lambda a: getattr(attention, name)(a["q"], a["k"], a["v"], **options)


def _local(case: dict[str, Any], stored: dict) -> Run:
    sizes = {"window_each_side": "window", "block": "block"}
    options = {sizes[k]: v for k, v in case["options"].items() if k in sizes}
    return _plain(case, stored, **options)


def _nystrom(case: dict[str, Any], stored: dict) -> Run:
    if "x" in stored:
        return _lucidrains(case, stored)
    options, mask = case["options"], stored.get("key_padding_mask")

    def run(a: Arrays) -> jax.Array:
        conv = stored.get("conv_weight")
        return attention.nystrom_attention(
            *(a[name] for name in "qkv"),
            mask,
            query_mask=mask,
            conv_weight=None if conv is None else a["conv_weight"][:, 0, :, 0],
            num_landmarks=options["num_landmarks"],
            iterations=options["pinv_iterations"],
            initialisation=options["init"],
            padding="published",
        )

    return run


def _lucidrains(case: dict[str, Any], stored: dict) -> Run:
    options, mask = case["options"], stored.get("key_padding_mask")

    def run(a: Arrays) -> jax.Array:
        x = a["x"]
        heads = (x @ a["to_qkv_weight"].T).reshape(
            *x.shape[:2], 3, options["heads"], -1
        )
        out = attention.nystrom_attention(
            *(heads[:, :, i] for i in range(3)),
            mask,
            query_mask=mask,
            num_landmarks=options["num_landmarks"],
            iterations=options["iterations"],
            initialisation="original",
            padding="front",
        )
        out = out.reshape(*x.shape[:2], -1) @ a["to_out_weight"].T
        return out + a["to_out_bias"][None, None]

    return run


def _linear(case: dict[str, Any], stored: dict) -> Run:
    options = case["options"]
    assert options["feature_map"] == "elu(x)+1"
    assert options["denominator"] == "sum+eps"
    if "recurrent" in case["name"]:
        return lambda a: _by_steps(a, options["eps"])
    return _plain(case, stored, eps=options["eps"])


def _by_steps(a: Arrays, eps: float) -> jax.Array:
    def step(state, position):
        out, state = attention.linear_step(state, *position, eps=eps)
        return state, out

    q, k, v = (jnp.swapaxes(a[name], 0, 1) for name in "qkv")
    batch, heads, width = q.shape[1:]
    state = attention.linear_init(batch, heads, width, v.shape[-1], dtype=q.dtype)
    return jnp.swapaxes(jax.lax.scan(step, state, (q, k, v))[1], 0, 1)


def _fla(case: dict[str, Any], stored: dict) -> Run:
    options = case["options"]
    if options.get("normalised", "eps" in options):
        attend = functools.partial(attention.linear_attention, eps=options["eps"])
    else:
        attend = functools.partial(attention.norm_attention, norm=None)

    def run(a: Arrays) -> jax.Array:
        scaled = a["q"] * a["q"].shape[-1] ** -0.5
        return attend(scaled, a["k"], a["v"], is_causal=True, feature_map=lambda x: x)

    return run


def _lightning(case: dict[str, Any], stored: dict) -> Run:
    if case["name"].startswith("lightning_decay"):  # The published slopes.
        published = attention.lightning_slopes(stored["q"].shape[2])
        np.testing.assert_array_equal(stored["slopes"], published)
    # Three chunks, so that the decay between them matters.
    return _plain(case, stored, slopes=stored["slopes"], chunking=Chunking(8, 16))


def _cosformer(case: dict[str, Any], stored: dict) -> Run:
    options = case["options"]
    mask: Any = stored.get("key_padding_mask")
    padded = max(stored["q"].shape[1], stored["k"].shape[1])
    max_length = {
        "max(src_len,tgt_len)": lambda: None,
        "max(padded src_len,tgt_len)": lambda: padded,
        "sequence length": lambda: padded,
        "per-sample length": lambda: mask.sum(1),
    }.get(options["M"], lambda: int(options["M"]))()
    denominators = {"max(sum,eps)": "clamp", "sum+eps": "add"}
    denominator = denominators[options.get("denominator", "max(sum,eps)")]

    eps = options["eps"]
    run = _plain(case, stored, max_length=max_length, denominator=denominator, eps=eps)
    if "valid_rows" not in options:
        return run
    # Rows beyond a sample's length are zero here; the case has what the formula gives
    # there, and its gradients contain them.
    rows = mask[:, :, None, None]
    return lambda a: jnp.where(rows, run(a), _beyond_pi_half(a, mask, max_length, eps))


def _beyond_pi_half(
    a: Arrays, mask: np.ndarray, lengths: np.ndarray, eps: float
) -> jax.Array:
    positions = np.arange(mask.shape[1])
    angles = np.pi / 2 * (positions[:, None] - positions) / lengths[:, None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", jax.nn.relu(a["q"]), jax.nn.relu(a["k"]))
    scores = scores * (np.cos(angles) * mask[:, None])[:, None].astype(scores.dtype)
    return jnp.einsum(
        "bnts,bsnv->btnv", scores / (scores.sum(-1, keepdims=True) + eps), a["v"]
    )


def flow_options(case: dict[str, Any], stored: dict) -> dict[str, Any]:
    options = case["options"]
    mask = stored.get("key_padding_mask")
    if case["name"].startswith("flow_mask_vonly"):
        mask = None  # only the values are masked, outside the function
    self_padded = "query mask" in options.get("mask", "")
    return {
        "mask": mask,
        "is_causal": is_causal(case),
        "query_mask": mask if self_padded else None,
        "clip": options["clamp"],
        "feature_map": options["kernel"],
        "competition_axis": "heads" if "competition_axis" in options else "source",
        "eps": options["eps"],
        "extra_eps": options.get("extra_eps", 0.0),
    }


def _flow(case: dict[str, Any], stored: dict) -> Run:
    run = _plain(case, stored, **flow_options(case, stored))
    if not case["name"].startswith("flow_mask_vonly"):
        return run
    mask = stored["key_padding_mask"][:, :, None, None]
    return lambda a: run(a | {"v": jnp.where(mask, a["v"], jnp.zeros_like(a["v"]))})


def _linformer(case: dict[str, Any], stored: dict) -> Run:
    if "x" in stored:
        return _fairseq(case)
    mask = stored.get("key_padding_mask")
    mode = case["options"].get("mode", "linear")
    keywords: dict[str, Any] = {"mask": mask if mode == "linear" else None}
    if mode in ("meanpool", "maxpool"):
        width = stored["k"].shape[1] // case["options"]["k"]
        keywords |= {"projection": mode.removesuffix("pool"), "window": width}
    elif mode == "conv":
        keywords["projection"] = "convolution"

    def run(a: Arrays) -> jax.Array:
        arrays = {
            "key_projection": a.get("E"),
            "value_projection": a.get("F"),
            "key_bias": a.get("E_bias"),
            "value_bias": a.get("F_bias"),
        }
        if mode == "conv":  # torch's (out, in, width) -> (width, in, out)
            arrays = {
                "key_projection": a["conv_k_weight"].transpose(2, 1, 0),
                "value_projection": a["conv_v_weight"].transpose(2, 1, 0),
                "key_bias": a["conv_k_bias"],
                "value_bias": a["conv_v_bias"],
            }
        # Without "v" the case shares one tensor for keys and values.
        key, value = a["k"], a.get("v", a["k"])
        if mode != "linear" and mask is not None:
            # There padding is zeroed, and counts in means, as in whole windows.
            shown = mask[:, :, None, None]
            key, value = (jnp.where(shown, x, 0) for x in (key, value))
        return attention.linformer_attention(a["q"], key, value, **arrays, **keywords)

    return run


def _fairseq(case: dict[str, Any]) -> Run:
    """The official module: it compresses its input, then projects and adds biases.

    Projecting first, without the biases, is the same: the key bias adds one number to
    all logits of a query, and the value bias is added to the output by weights that sum
    to one.
    """
    heads = case["options"]["heads"]

    def run(a: Arrays) -> jax.Array:
        def dense(name: str, x: jax.Array, bias: bool = True) -> jax.Array:
            x = x @ a[f"param.{name}.weight"].T
            return x + a[f"param.{name}.bias"][None, None] if bias else x

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], heads, -1)

        x = a["x"].transpose(1, 0, 2)
        out = attention.linformer_attention(
            split(dense("q_proj", x)),
            split(dense("k_proj", x, bias=False)),
            split(dense("v_proj", x, bias=False)),
            a["param.compress_k.weight"],
            a.get("param.compress_v.weight"),
        )
        out = out.reshape(x.shape) + a["param.v_proj.bias"][None, None]
        # The key bias does not enter; its gradient in the case is zero as well.
        return dense("out_proj", out).transpose(1, 0, 2)

    return run


def _performer(case: dict[str, Any], stored: dict) -> Run:
    options = case["options"]
    kernel = "relu" if "_relu_" in case["name"] else options.get("kernel", "softmax")
    causal = is_causal(case)
    repo = case["provenance"]["repo"]
    # What the published code adds to denominators, unless it is without effect.
    adds = "idiap" in repo or (causal and "lucidrains" in repo)
    keywords: dict[str, Any] = {"is_causal": causal}
    if kernel != "softmax" and not adds:
        scale = 1.0 if options.get("data_normalizer") == "none" else None
        eps = options["feature_eps"]
        keywords |= {"kernel": kernel, "scale": scale, "feature_eps": eps}

    def run(a: Arrays) -> jax.Array:
        q, k, v = a["q"], a["k"], a["v"]
        matrix = a["omega"].T if "omega" in a else a.get("projection")
        if "kernel" in keywords:
            return attention.performer_attention(q, k, v, matrix, **keywords)
        q, k = _published_features(case, kernel, matrix, q, k)
        if adds:
            # One more key, seen by all, with a value of zero.
            added = q.sum(-1, keepdims=True) if causal else jnp.ones_like(q[..., :1])
            q = jnp.concatenate([q, added], -1)
            k = jnp.concatenate([k, jnp.zeros_like(k[..., :1])], -1)
            q, k, v = (jnp.pad(x, [(0, 0), (1, 0), (0, 0), (0, 0)]) for x in (q, k, v))
            k = k.at[:, 0, :, -1].set(1e-6)
        out = attention.performer_attention(
            q, k, v, kernel=lambda x: x, scale=1.0, feature_eps=0.0, **keywords
        )
        return out[:, 1:] if adds else out

    return run


def _published_features(
    case: dict[str, Any],
    kernel: str,
    matrix: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The features of the published code.

    For softmax, Google and lucidrains have one reference for all keys and add an eps.
    """
    assert matrix is not None
    repo, eps = case["provenance"]["repo"], case["options"].get("feature_eps", 0.0)
    if "idiap" in repo:
        matrix = jnp.concatenate([matrix, -matrix])

    def phi(x: jax.Array, axes: int | tuple[int, ...]) -> jax.Array:
        x = x * x.shape[-1] ** -0.25
        products = jnp.einsum("bsnh,mh->bsnm", x, matrix, precision="highest")
        if kernel == "relu":
            return jax.nn.relu(products) + eps
        top = products.max(axes, keepdims=True)
        if "lucidrains" in repo:
            top = jax.lax.stop_gradient(top)
        if "idiap" in repo:
            top = jnp.zeros_like(top)
        exponents = products - jnp.square(x).sum(-1, keepdims=True) / 2 - top
        return (jnp.exp(exponents) + eps) / np.sqrt(products.shape[-1])

    return phi(query, -1), phi(key, (1, 3))


BUILDERS = {
    "fla": _fla,
    "lightning": _lightning,
    "softmax": _plain,
    "linear": _linear,
    "cosformer": _cosformer,
    "flow": _flow,
    "linformer": _linformer,
    "local": _local,
    "nystrom": _nystrom,
    "performer": _performer,
    "gau": golden_gated.gau,
    "flash": golden_gated.flash,
}
