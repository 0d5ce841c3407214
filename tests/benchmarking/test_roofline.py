"""The least work of a case, and the machine's limits."""

import math

from benchmarking.small import ROOFLINE, case, run
from lra_jax.benchmarking import tables
from lra_jax.benchmarking.roofline import Roofline, least_flops, measure_roofline


def test_least_arithmetic() -> None:
    """Counted by hand: 2 samples, 2 heads of 4, 16 tokens."""
    assert least_flops(case("softmax")) == 4 * 4 * 16 * 16 * 4
    assert least_flops(case("softmax", causal=True)) == 2 * 4 * 16 * 16 * 4
    both = [
        least_flops(case(name, "forward+backward"))
        for name in ("softmax", "softmax-fused", "linformer[features=8]")
    ]
    once = 4 * 4 * 16 * 16 * 4
    assert both == [3 * once, 3.5 * once, 3 * 4 * 8 * 16 * 8 * 4]
    assert least_flops(case("linear", "forward+backward")) == 3 * 4 * 4 * 16 * 16
    assert least_flops(case("linformer[features=8]")) == 4 * 8 * 16 * 8 * 4
    assert least_flops(case("linformer[projection=mean,window=8]")) == 0
    assert least_flops(case("reformer")) == 0
    dense = 2 * 16 * 2 * (4 * 64 + 2 * 64)
    assert least_flops(case("nystrom", "train")) == 3 * dense
    # One projection for queries and keys; none at all.
    assert least_flops(case("reformer", "train")) == 3 * 2 * 16 * 2 * (3 + 2) * 64
    assert least_flops(case("fnet", "train")) == 3 * 2 * 16 * 2 * 2 * 64
    attention = 4 * 4 * 16 * 16
    assert least_flops(case("linear", "inference")) == dense + attention


def test_the_floor_is_the_slower_of_moving_and_computing() -> None:
    one = case("softmax")
    assert ROOFLINE.floor(one, 1) == (least_flops(one) / 1e12, "arithmetic")
    seconds, bound = ROOFLINE.floor(one, 10**12)
    assert (seconds, bound) == (1.0, "bytes")


def test_the_machine_is_measured() -> None:
    measured = measure_roofline(["float32"], quick=True)
    assert 0 < measured.bytes_per_second < math.inf
    assert 0 < measured.flops_per_second["float32"] < math.inf


def test_a_share_beyond_the_roofline_is_not_shown() -> None:
    """As after a measurement on a busy machine: one number per second."""
    rows = run([case("linear")], Roofline(1.0, {"float32": 1.0})).rows
    assert rows[0]["status"] == "measured" and "roofline_share" not in rows[0]
    text = tables.make_page("none", rows).markdown()
    assert "%" not in text and "measured on a busy machine" in text
