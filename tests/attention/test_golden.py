"""Against the public reference implementations, forward and backward.

Each case is rebuilt from the options that the index states, and compared in float32 (to
1e-5 of the largest value) and in float64 (to 1e-10). Every non-causal case of the five
families is covered, and the causal ones of softmax.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from . import golden
from .mechanisms import fast_jit

FAMILIES = ("softmax", "linear", "cosformer", "flow", "linformer")
COUNTS = {"softmax": 6, "linear": 8, "cosformer": 15, "flow": 14, "linformer": 15}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

Arrays = dict[str, jax.Array]

pytestmark = pytest.mark.skipif(not golden.AVAILABLE, reason=golden.REASON)


def _is_causal(case: dict[str, Any]) -> bool:
    return bool(case["options"].get("causal", False))


CASES = [
    case
    for family in FAMILIES
    for case in golden.select(family)
    if family == "softmax" or not _is_causal(case)
]


def _softmax(case: dict[str, Any], stored: dict) -> Callable[[Arrays], jax.Array]:
    mask = stored.get("key_padding_mask")
    return lambda a: attention.softmax_attention(
        a["q"], a["k"], a["v"], mask, _is_causal(case)
    )


def _linear(case: dict[str, Any], stored: dict) -> Callable[[Arrays], jax.Array]:
    options = case["options"]
    assert options["feature_map"] == "elu(x)+1"
    assert options["denominator"] == "sum+eps"
    mask = stored.get("key_padding_mask")
    return lambda a: attention.linear_attention(
        a["q"], a["k"], a["v"], mask, eps=options["eps"]
    )


def _cosformer(case: dict[str, Any], stored: dict) -> Callable[[Arrays], jax.Array]:
    options = case["options"]
    mask = stored.get("key_padding_mask")
    max_length = {
        "max(src_len,tgt_len)": lambda: None,
        "max(padded src_len,tgt_len)": lambda: None,
        "per-sample length": lambda: mask.sum(1),
        64: lambda: 64,
    }[options["M"]]()
    denominators = {"max(sum,eps)": "clamp", "sum+eps": "add"}
    denominator = denominators[options.get("denominator", "max(sum,eps)")]

    def run(a: Arrays) -> jax.Array:
        out = attention.cosformer_attention(
            a["q"],
            a["k"],
            a["v"],
            mask,
            max_length=max_length,
            denominator=denominator,
            eps=options["eps"],
        )
        if "valid_rows" not in options:
            return out
        # Rows beyond a sample's length are zero here; the case has what the formula
        # gives there, and its gradients contain them.
        beyond = _beyond_pi_half(a, mask, max_length, options["eps"])
        return jnp.where(mask[:, :, None, None], out, beyond)

    return run


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


def _relu_plus_eps(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x) + 1e-6


def _flow_options(case: dict[str, Any], stored: dict) -> dict[str, Any]:
    options = case["options"]
    kernels = {"sigmoid": "sigmoid", "relu+1e-6": _relu_plus_eps}
    mask = stored.get("key_padding_mask")
    if case["name"].startswith("flow_mask_vonly"):
        mask = None  # only the values are masked, outside the function
    self_padded = "query mask" in options.get("mask", "")
    return {
        "mask": mask,
        "query_mask": mask if self_padded else None,
        "clip": options["clamp"],
        "feature_map": kernels[options["kernel"]],
        "competition_axis": "heads" if "competition_axis" in options else "source",
        "eps": options["eps"],
        "extra_eps": options.get("extra_eps", 0.0),
    }


def _flow(case: dict[str, Any], stored: dict) -> Callable[[Arrays], jax.Array]:
    options = _flow_options(case, stored)

    def run(a: Arrays) -> jax.Array:
        value = a["v"]
        if case["name"].startswith("flow_mask_vonly"):
            mask = stored["key_padding_mask"][:, :, None, None]
            value = jnp.where(mask, value, jnp.zeros_like(value))
        return attention.flow_attention(a["q"], a["k"], value, **options)

    return run


def _linformer(case: dict[str, Any], stored: dict) -> Callable[[Arrays], jax.Array]:
    if "x" in stored:
        return _fairseq(case)
    mask = stored.get("key_padding_mask")
    mode = case["options"].get("mode", "linear")
    keywords: dict[str, Any] = {"mask": mask}
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
        value = a.get("v", a["k"])
        return attention.linformer_attention(
            a["q"], a["k"], value, **arrays, **keywords
        )

    return run


def _fairseq(case: dict[str, Any]) -> Callable[[Arrays], jax.Array]:
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


BUILDERS = {
    "softmax": _softmax,
    "linear": _linear,
    "cosformer": _cosformer,
    "flow": _flow,
    "linformer": _linformer,
}


def _gradient_names(stored: dict) -> dict[str, str]:
    """Stored gradient -> the input that it belongs to."""
    plain = {name: name[1:] for name in stored if name[0] == "d" and name[1:] in stored}
    params = {
        name: f"param.{name.removeprefix('grad.')}"
        for name in stored
        if name.startswith("grad.")
    }
    return plain | params


def _compare(
    name: str, got: jax.Array, wanted: np.ndarray, dtype: str, floor: float
) -> None:
    # Some gradients are zero up to rounding: their scale is that of the case.
    scale = max(np.abs(wanted).max(), floor)
    error = np.abs(np.asarray(got, np.float64) - wanted).max() / scale
    assert error <= TOLERANCE[dtype], f"{name}: {error:.2e} of the largest value"


# One compilation for both directions.

def _run_and_pull_back(
    run: Callable[[Arrays], jax.Array], inputs: Arrays, cotangent: jax.Array
) -> tuple[jax.Array, Arrays]:
    out, pullback = jax.vjp(run, inputs)
    return out, pullback(cotangent)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_output_and_gradients(case: dict[str, Any], dtype: str) -> None:
    stored = golden.load(case)
    gradients = _gradient_names(stored)
    assert len(gradients) == sum(
        name[0] == "d" or name.startswith("grad.") for name in stored
    )
    outputs = {"out", "cotangent", "key_padding_mask", "attn_weights", *gradients}
    with jax.enable_x64(dtype == "float64"):
        inputs = {
            name: jnp.asarray(array, dtype)
            for name, array in stored.items()
            if name not in outputs and not name.startswith("aux_")
        }
        run = BUILDERS[case["name"].split("_")[0]](case, stored)
        cotangent = jnp.asarray(stored["cotangent"], dtype)
        out, found = _run_and_pull_back(run, inputs, cotangent)
        assert out.dtype == dtype
        _compare("out", out, stored["out"], dtype, 0.0)
        largest = max(np.abs(stored[name]).max() for name in gradients)
        for name, source in gradients.items():
            floor = 1e-3 * largest
            _compare(name, found[source], stored[name], dtype, floor)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_is_covered(family: str) -> None:
    families = Counter(case["name"].split("_")[0] for case in CASES)
    assert families[family] == COUNTS[family]
    left_out = {case["name"] for case in golden.select(family)} - {
        case["name"] for case in CASES
    }
    assert all("causal" in name or "recurrent" in name for name in left_out)
    assert not any("noncausal" in name for name in left_out)


FLOW_TERMS = [
    case for case in CASES if any(name.startswith("aux_") for name in case["arrays"])
]


@pytest.mark.parametrize("case", FLOW_TERMS, ids=lambda case: case["name"])
def test_flow_terms(case: dict[str, Any]) -> None:
    stored = golden.load(case)
    with jax.enable_x64(True):
        q, k = (jnp.asarray(stored[name], "float64") for name in "qk")
        terms = attention.flow_terms(q, k, **_flow_options(case, stored))
        for name, got in terms._asdict().items():
            suffix = "_preclamp" if name == "conserved_source" else ""
            _compare(name, got, stored[f"aux_{name}{suffix}"], "float64", 0.0)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "attn_weights" in case["arrays"]],
    ids=lambda case: case["name"],
)
def test_linformer_weights_are_the_official_ones_times_f(case: dict[str, Any]) -> None:
    stored = golden.load(case)
    heads = case["options"]["heads"]
    e = stored["param.compress_k.weight"]
    f = stored.get("param.compress_v.weight", e)
    with jax.enable_x64(True):
        x = jnp.asarray(stored["x"].swapaxes(0, 1), "float64")
        q = x @ stored["param.q_proj.weight"].astype("float64").T
        q = q + stored["param.q_proj.bias"].astype("float64")[None, None]
        k = x @ stored["param.k_proj.weight"].astype("float64").T
        q, k = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k))
        got = attention.linformer_weights(q, k, e, f)
        slots = stored["attn_weights"].swapaxes(0, 1)
        wanted = slots @ f[:, : x.shape[1]].astype("float64")
        _compare("weights", got, wanted, "float64", 0.0)
