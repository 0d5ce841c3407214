"""The page of the accelerator's view."""

import json
from pathlib import Path

import pytest

from benchmarking.small import config
from lra_jax.benchmarking import accelerator_page, correctness
from lra_jax.benchmarking.settings import make_cases, timing


def time_row(attention: str, milliseconds: float, **changes) -> dict:
    (case, *_) = make_cases(timing(config("x"), causal=True), on_cpu=False)
    measured = {"status": "measured", "median_ms": milliseconds}
    return case.to_dict() | measured | {"attention": attention} | changes


def test_the_page(tmp_path) -> None:
    """Of made-up figures, with all that a device can have."""
    error = {"attention": "flow", "causal": True, "rows": "padded"}
    error |= {"status": "measured"}
    error |= {"output": 1e-6, "gradients": 2e-6}
    measured_parts = {
        "correctness": {
            "tolerances": correctness.TOLERANCES,
            "rows": [
                error | {"dtype": "float32", "holds": True},
                error | {"dtype": "bfloat16", "gradients": 0.3, "holds": False},
            ],
        },
        "times-causal": {
            "softmax_fused": {"bfloat16": "cudnn"},
            "roofline": {
                "bytes_per_second": 4e12,
                "flops_per_second": {"bfloat16": 7e14},
            },
            "rows": [
                time_row("softmax-fused", 6.0, roofline_share=0.5),
                time_row("linear", 2.0, roofline_share=0.25),
                time_row("linear[implementation=pallas]", 0.5),
                time_row("flow", 0.0, status="does not fit", reason="9 GB"),
            ],
        },
    }
    run = {"attention": "cosformer", "preset": "tiny", "test_accuracy_best": 25.0}
    run |= {"task": "lm", "test_bits_per_byte_best": 5.6, "test_examples": 560}
    run |= {"steps": 10, "steps_per_second": 25.5, "seconds": 4.0}
    measured_parts["lm"] = run | {"parameters": 9, "peak_memory_bytes": None}
    ended = {"status": "done", "reason": None, "seconds": 3.0}
    listed = [{"name": name, "found": x} | ended for name, x in measured_parts.items()]
    listed.append(
        {"name": "listops", "status": "failed", "reason": "ended by SIGSEGV: x"}
        | {"seconds": 9.0, "found": {}}
    )
    values = {"command": "python -m x", "commit": "c0ffee", "device": "1 x H200"}
    values |= {"versions": {"jax": "1.2"}, "complete": False, "parts": listed}
    text = accelerator_page.make(values, tmp_path).markdown()
    for expected in (
        "# lra_jax on 1 x H200",
        "failed: ended by SIGSEGV: x (9 s)",
        "5.600 bits per byte",
        "causal, padded",
        "bfloat16 beyond the tolerance",
        "which holds for 1 of 2 comparisons",
        "copied at 4,000 GB/s",
        "2 (3x, 25 %)",
        "does not fit",
        "0.5 (4x)",
        "(cudnn)",
    ):
        assert expected in text, text


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_published_pages_are_made_from_their_results(name: str, tmp_path) -> None:
    folder = Path(__file__).parents[2] / "results" / "accelerator"
    values = json.loads((folder / f"{name}.json").read_text())
    page = accelerator_page.make(values, tmp_path).markdown()
    assert page == (folder / f"{name}.md").read_text()
