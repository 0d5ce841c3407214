"""Mechanisms on the default device against float64 on the CPU.

The error of an array is ``max |x - y| / max |y|``, y being the reference; for a zero
gradient, it is its size divided by that of the largest gradient. Inputs are exact in
bfloat16, so only the computation differs. Products in float32 have the highest
precision: the default of TPUs, and of NVIDIA's GPUs since Ampere, rounds their factors
to fewer bits, and would hide any other error.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import registry
from lra_jax.benchmarking.cases import (
    FUSED,
    ROWS,
    Case,
    form,
    parse_lengths,
    split_list,
)
from lra_jax.benchmarking.settings import BenchmarkConfig, timing
from lra_jax.benchmarking.works import find, make_work
from lra_jax.errors import first_line
from lra_jax.files import replacing

Row = dict[str, Any]
Arrays = dict[str, np.ndarray]

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
"""The largest error that is attributed to rounding."""

# Not a multiple of any chunk or block, and beyond the length from which softmax
# attention is computed in blocks.
_LENGTH = 300
_HEADS = 2
_BLOCK = 64  # Positions whose outputs are of about one size.
# A gradient smaller than the largest by this factor counts as zero, such as that of
# Sinkhorn's bias, which its normalisation cancels.
_ZERO = 1e-9
# For the references: nearly all of their time is compilation.
_UNOPTIMISED = {"xla_backend_optimization_level": 0}
_ARRAYS = ("query", "key", "value", "cotangent")


def make_cases(config: BenchmarkConfig) -> list[Case]:
    """Each mechanism, and its causal form if it has one; by default all of them."""
    names = [FUSED, *registry.names()]
    if config.attention is not None:
        names = split_list("attention", config.attention)
    lengths = parse_lengths("lengths", timing(config, causal=False).lengths or "")
    sizes: dict[str, Any] = {
        "length": min(_LENGTH, lengths[-1]),
        "heads": min(_HEADS, config.heads),
        "head_dim": config.head_dim,
    }
    return [
        Case(name, "forward", causal=causal, **sizes)
        for name in names
        for causal in (False, True)
        if not causal or find(name)[0].causal is not False
    ]


def kernel_cases(config: BenchmarkConfig) -> list[Case]:
    """The cases that have Pallas kernels, which are then requested, also with padding:
    a mask takes branches of the kernels that whole rows do not."""
    return [
        dataclasses.replace(
            case, attention=f"{case.name}[implementation=pallas]", rows=rows
        )
        for case in make_cases(config)
        if case.attention == case.name and "tpu" in find(case.name)[0].kernels
        for rows in ROWS
    ]


def reference_cases(config: BenchmarkConfig) -> list[Case]:
    """The cases whose references the others are compared with."""
    others = [case for case in kernel_cases(config) if case.rows != "whole"]
    plain = [dataclasses.replace(case, attention=case.name) for case in others]
    return [*make_cases(config), *plain]


def file_of(case: Case, folder: Path) -> Path:
    """The file of a case's reference; a kernel uses that of its mechanism."""
    parts = [case.attention.replace("[implementation=pallas]", "")]
    parts += ["causal"] * case.causal + [case.rows] * (case.rows != "whole")
    return folder / f"{'-'.join(parts)}.npz"


def write_references(
    cases: Iterable[Case], folder: Path, say: Callable[[str], None]
) -> None:
    """Computes inputs, outputs and gradients of the cases, on the CPU in float64.

    Existing references in the folder are not computed again.
    """
    folder.mkdir(exist_ok=True)
    for case in cases:
        if file_of(case, folder).exists():
            continue
        inputs = make_inputs(case)
        results = evaluate(case, inputs, "float64")
        results = {f"of {name}": x.astype("float32") for name, x in results.items()}
        arrays: dict[str, Any] = inputs | results
        with replacing(file_of(case, folder)) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **arrays)
        say(f"{case.attention}, {form(case.causal, case.rows)}")


def make_inputs(case: Case) -> Arrays:
    """All arrays of a call, and its cotangent: float32, exact in bfloat16."""
    work = make_work(dataclasses.replace(case, work="forward+backward"))
    extra, *arrays = work.make()
    every = dict(zip(_ARRAYS, arrays, strict=True)) | extra
    return {
        name: np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32) if _real(x) else x)
        for name, x in every.items()
    }


def _real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def evaluate(case: Case, inputs: Mapping[str, np.ndarray], dtype: str) -> Arrays:
    """The output of a case and the gradients that training needs, in float64."""
    function = make_work(dataclasses.replace(case, work="forward+backward")).function
    extra = {name: jnp.asarray(x) for name, x in inputs.items()}
    extra = {n: x.astype(dtype) if _real(x) else x for n, x in extra.items()}
    arrays = [extra.pop(name) for name in _ARRAYS]
    options = _UNOPTIMISED if dtype == "float64" else None
    with jax.default_matmul_precision(None if dtype == "bfloat16" else "highest"):
        run = jax.jit(function, compiler_options=options)
        out, (learned, *gradients) = run(extra, *arrays)
    results = {"output": out, **learned}
    results |= zip(_ARRAYS[:3], gradients, strict=True)
    return {name: np.asarray(x, "float64") for name, x in results.items()}


def compare(case: Case, folder: Path, dtype: str) -> Row:
    """The errors of a case in a dtype on the default device, as a row.

    ``status`` is "measured", "not supported" or "failed", the last two with a
    ``reason``.
    """
    row: Row = {"attention": case.attention, "causal": case.causal}
    row |= {"rows": case.rows, "dtype": dtype}
    problem = refusal(case, dtype)
    if problem is not None:
        return row | {"status": "not supported", "reason": problem}
    try:
        with np.load(file_of(case, folder)) as file:
            inputs = {name: x for name, x in file.items() if name[:3] != "of "}
            references = {name[3:]: x for name, x in file.items() if name[:3] == "of "}
        results = evaluate(case, inputs, dtype)
    except (jax.errors.JaxRuntimeError, ValueError, OSError) as error:
        return row | {"status": "failed", "reason": first_line(error)}
    endless = [name for name, x in results.items() if not np.isfinite(x).all()]
    if endless:
        reason = f"not finite: {', '.join(endless)}"
        return row | {"status": "failed", "reason": reason}
    output = output_error(results["output"], references.pop("output"))
    largest = max(np.abs(y).max() for y in references.values())
    errors = {n: relative_error(results[n], y, largest) for n, y in references.items()}
    worst = max(errors, key=errors.__getitem__)
    return row | {
        "status": "measured",
        "output": output,
        "gradients": errors[worst],
        "worst_gradient": worst,
        "holds": max(output, errors[worst]) <= TOLERANCES[dtype],
    }


def refusal(case: Case, dtype: str) -> str | None:
    """Why this device does not support a case's form; None = it does."""
    work = make_work(dataclasses.replace(case, dtype=dtype))
    try:
        jax.eval_shape(work.function, *jax.eval_shape(work.make))
    except (ValueError, NotImplementedError) as error:
        return first_line(error)
    return None


def output_error(result: np.ndarray, reference: np.ndarray) -> float:
    """The largest `relative_error` of a block of positions of `[B, T, N, H]`.

    Late outputs of a causal form are means over many values, and small: next to the
    first ones, a wrong key in each of them would pass for rounding.
    """
    ends = range(_BLOCK, reference.shape[1], _BLOCK)
    largest = float(np.abs(reference).max())
    blocks = zip(np.split(result, ends, 1), np.split(reference, ends, 1), strict=True)
    return max(relative_error(one, other, largest) for one, other in blocks)


def relative_error(
    result: np.ndarray, reference: np.ndarray, largest: float = 1.0
) -> float:
    """``max |x - y| / max |y|``; or divided by ``largest`` if y, the reference, is zero
    up to rounding."""
    size = float(np.abs(reference).max())
    scale = size if size > _ZERO * largest else largest
    return float(np.abs(result - reference).max() / scale)


def in_words(row: Row) -> str:
    """A row as a line of progress."""
    words = form(row["causal"], row["rows"])
    start = f"{row['attention']}, {words}  {row['dtype']}"
    if row["status"] != "measured":
        return f"{start}  {row['status']}: {row['reason']}"
    return f"{start}  output {row['output']:.1e}, gradients {row['gradients']:.1e}"
