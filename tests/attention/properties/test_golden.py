"""Against the public reference implementations, forward and backward.

Each case is rebuilt from the options that the index states, and compared in float64, to
1e-10 of the largest value (1e-6 where the reference itself computes in float32); one of
each family and form in float32, to 1e-5. Every case of these families is covered.
"""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.kernels.cpu import library

from .. import golden, golden_builders
from ..mechanisms import fast_jit

COUNTS = {
    "softmax": 6,
    "linear": 14,
    "cosformer": 23,
    "flow": 19,
    "linformer": 15,
    "performer": 16,
    "lightning": 1,
    "fla": 1,
    "local": 3,
    "nystrom": 6,
    "gau": 4,
    "flash": 3,
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

Arrays = dict[str, jax.Array]

if not golden.AVAILABLE:
    pytest.skip(golden.REASON, allow_module_level=True)

CASES = [case for family in COUNTS for case in golden.select(family)]
CAUSAL = [case for case in CASES if golden_builders.is_causal(case)]
# The kernels compiled for the CPU; not streams, and no competition between heads.
NATIVE = [
    case
    for family in ("linear", "cosformer", "flow")
    for case in golden.select(family)
    if "recurrent" not in case["name"] and "competition_axis" not in case["options"]
]
NO_NATIVE = library.problem()


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
    name: str,
    got: jax.Array,
    expected: np.ndarray,
    tolerance: float,
    floor: float = 0.0,
) -> None:
    # Some gradients are zero up to rounding: their scale is that of the case.
    scale = max(np.abs(expected).max(), floor)
    error = np.abs(np.asarray(got, np.float64) - expected).max() / scale
    assert error <= tolerance, f"{name}: {error:.2e} of the largest value"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_output_and_gradients(case: dict[str, Any]) -> None:
    _check(case, "float64")


# One case of each family and form: the formula does not depend on the dtype.
NARROW = {(x["name"].split("_")[0], golden_builders.is_causal(x)): x for x in CASES}


@pytest.mark.parametrize("case", NARROW.values(), ids=lambda case: case["name"])
def test_in_float32(case: dict[str, Any]) -> None:
    _check(case, "float32")


OTHERS = [
    pytest.param(
        case, "float64", {"implementation": "blocks", "block": 7}, id=case["name"]
    )
    for case in golden.select("softmax")
]
without = pytest.mark.skipif(NO_NATIVE is not None, reason=f"{NO_NATIVE}")
OTHERS += [
    pytest.param(
        case, "float32", {"implementation": "native"}, id=case["name"], marks=without
    )
    for case in NATIVE
]


@pytest.mark.parametrize(("case", "dtype", "options"), OTHERS)
def test_other_implementations(
    case: dict[str, Any],
    dtype: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Softmax in blocks, and the kernels of CPUs."""
    name = f"{case['name'].split('_')[0]}_attention"
    function = functools.partial(getattr(attention, name), **options)
    monkeypatch.setattr(attention, name, function)
    _check(case, dtype)


def _check(case: dict[str, Any], dtype: str) -> None:
    stored = golden.load(case)
    gradients = _gradient_names(stored)
    assert len(gradients) == sum(
        name[0] == "d" or name.startswith("grad.") for name in stored
    )
    outputs = {"out", "cotangent", "key_padding_mask", "attn_weights", *gradients}
    outputs |= {"slopes"}
    with jax.enable_x64(dtype == "float64"):
        inputs = {
            name: jnp.asarray(array, dtype)
            for name, array in stored.items()
            if name not in outputs and not name.startswith("aux_")
        }
        builder = golden_builders.BUILDERS[case["name"].split("_")[0]]
        run = builder(case, stored)
        cotangent = jnp.asarray(stored["cotangent"], dtype)

        @fast_jit
        def both(inputs: Arrays) -> tuple[jax.Array, Arrays]:
            out, pullback = jax.vjp(run, inputs)
            return out, pullback(cotangent)[0]

        out, slopes = both(inputs)
        assert out.dtype == dtype
        tolerance = TOLERANCE[dtype]
        if case["compute_dtype"] != "float64":
            tolerance = max(tolerance, 1e-6)
        _compare("out", out, stored["out"], tolerance)
        floor = max([1e-3 * np.abs(stored[name]).max() for name in gradients] or [0])
        for name, source in gradients.items():
            _compare(name, slopes[source], stored[name], tolerance, floor)


def test_every_case_is_covered() -> None:
    """A folder may hold more cases than these; those are run as well."""
    families, causal = (
        Counter(case["name"].split("_")[0] for case in cases)
        for cases in (CASES, CAUSAL)
    )
    assert families == Counter({name: len(golden.select(name)) for name in COUNTS})
    assert families >= Counter(COUNTS)
    assert causal >= Counter(
        {"softmax": 1, "linear": 6, "cosformer": 8, "flow": 5, "performer": 4}
        | {"lightning": 1, "fla": 1, "gau": 1, "flash": 1}
    )


FLOW_TERMS = [
    case for case in CASES if any(name.startswith("aux_") for name in case["arrays"])
]


@pytest.mark.parametrize("case", FLOW_TERMS, ids=lambda case: case["name"])
def test_flow_terms(case: dict[str, Any]) -> None:
    stored = golden.load(case)
    with jax.enable_x64(True):
        q, k = (jnp.asarray(stored[name], "float64") for name in "qk")
        options = golden_builders.flow_options(case, stored)
        terms = fast_jit(lambda q, k: attention.flow_terms(q, k, **options))(q, k)
        for name, got in terms._asdict().items():
            suffix = "_preclamp" if name == "conserved_source" else ""
            _compare(name, got, stored[f"aux_{name}{suffix}"], TOLERANCE["float64"])


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
        expected = slots @ f[:, : x.shape[1]].astype("float64")
        _compare("weights", got, expected, TOLERANCE["float64"])
