"""The cases that are measured, refused, and kept when a run is cut short."""

import json
import math
import platform
import threading
from concurrent.futures import ThreadPoolExecutor

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention import softmax_attention
from lra_jax.benchmarking import runner as running
from lra_jax.benchmarking import tables
from lra_jax.benchmarking.cases import Case, ModelShape
from lra_jax.benchmarking.fused import best_implementation, fused_softmax_attention
from lra_jax.benchmarking.programs import Program, available_bytes
from lra_jax.benchmarking.roofline import Roofline, least_flops, measure_roofline
from lra_jax.benchmarking.runner import Runner, expected_seconds, exponent
from lra_jax.benchmarking.works import Unsupported, make_work

ROOFLINE = Roofline(1e12, {"float32": 1e12, "bfloat16": 1e12})
SMALL = ModelShape(1, 8, 2, 8, vocab_size=7)


def case(attention: str, work: str = "forward", length: int = 16, **changes) -> Case:
    sizes = {"batch_size": 2, "heads": 2, "head_dim": 4, "model": SMALL}
    return Case(attention, work, length, **sizes | changes)


def run(cases: list[Case], roofline: Roofline = ROOFLINE, **settings) -> Runner:
    settings = {"repeats": 2, "min_seconds": 0.0, **settings}
    runner = Runner(roofline, **settings)
    runner.run(cases)
    return runner


def test_options_that_only_set_widths_are_not_passed_over() -> None:
    with pytest.raises(Unsupported, match="expansion sets the widths of a layer"):
        make_work(case("gau[expansion=4]"))
    make_work(case("gau[activation=laplace]"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_are_softmax_attention(masked: bool, is_causal: bool) -> None:
    """Output and gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, cotangent = (jax.random.normal(k, (2, 10, 2, 4)) for k in keys)
    mask = jnp.arange(10)[None] < jnp.array([[10], [7]]) if masked else None
    if masked:
        key = key.at[1, 7:].set(jnp.nan)

    def both(function, **options):
        def call(*arrays):
            return function(*arrays, mask, is_causal, **options)

        out, pullback = jax.vjp(call, query, key, value)
        return out, pullback(cotangent)

    wanted = both(softmax_attention, implementation="dense")
    got = both(fused_softmax_attention, implementation="blocks")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_the_best_softmax_depends_on_the_machine() -> None:
    assert best_implementation("bfloat16", "gpu") == "cudnn"
    assert best_implementation("float32", "gpu") == "blocks"
    assert best_implementation("float32", "tpu") == "flash"
    assert best_implementation("float32", "cpu") == "blocks"
    arrays = [jnp.ones((1, 2, 1, 2))] * 3
    with pytest.raises(ValueError, match=r"implementation: .*got 'cudn'.*'cudnn'"):
        fused_softmax_attention(*arrays, implementation="cudn")


def test_decoding_has_gates_and_a_cache_of_its_dtype() -> None:
    given = make_work(case("gla", "decode")).make()[1]
    assert given["log_decay"].shape == given["gate"].shape == (2, 2, 4)
    state = make_work(case("softmax", "decode", dtype="bfloat16")).make()[0]
    assert state.key.dtype == state.value.dtype == jnp.bfloat16
    (row,) = run([case("gla", "decode")]).rows
    assert row["status"] == "measured"


@pytest.mark.parametrize(
    ("attention", "learned"),
    [
        ("linear", set()),
        ("gla", {"log_decay", "gate"}),
        ("linformer[features=8]", {"key_projection", "value_projection"}),
        ("performer", set()),
    ],
)
def test_gates_and_parameters_have_gradients(attention: str, learned: set[str]) -> None:
    """But not Performer's random features, which are not trained."""
    work = make_work(case(attention, "forward+backward"))
    _, (own, *inputs) = jax.eval_shape(work.function, *work.make())
    assert set(own) == learned
    assert len(inputs) == 3


def test_every_work_of_a_linear_mechanism() -> None:
    works = ("forward", "forward+backward", "decode", "inference", "train")
    rows = run([case("flow", work) for work in works]).rows
    assert {row["work"]: row["status"] for row in rows} == dict.fromkeys(
        works, "measured"
    )
    for row in rows:
        assert 0 < row["fastest_ms"] <= row["median_ms"] <= row["slowest_ms"]
        tokens = 2 * (1 if row["work"] == "decode" else 16)
        assert row["tokens_per_second"] == pytest.approx(
            1e3 * tokens / row["median_ms"]
        )
        assert row["peak_bytes"] > 0 and row["roofline_share"] > 0


def test_a_share_beyond_the_roofline_is_not_shown() -> None:
    """As after a measurement on a busy machine: one number per second."""
    rows = run([case("linear")], Roofline(1.0, {"float32": 1.0})).rows
    assert rows[0]["status"] == "measured" and "roofline_share" not in rows[0]
    text = tables.make_page("none", rows).markdown()
    assert "%" not in text and "measured on a busy machine" in text


def test_memory_is_that_of_the_arrays() -> None:
    """Query, key, value and output at least; softmax's matrix beyond."""
    sizes = {"length": 64, "batch_size": 1, "heads": 1}
    linear, naive = (Program(case(x, **sizes)).memory for x in ("linear", "softmax"))
    array = 4 * 64 * 4
    assert linear.arguments == naive.arguments == 3 * array
    assert linear.results == array
    assert naive.peak >= 4 * array + 4 * 64 * 64 > linear.peak
    free = available_bytes()
    assert free is None or free > 1e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    script = """
import ctypes, os, pathlib
from lra_jax import runtime
def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before, size = resident(), 100 << 20
buffer = libc.malloc(size)
ctypes.memset(buffer, 1, size)
libc.free(buffer)
kept = resident() - before
runtime.release_memory()
print(kept > size // 2, resident() - before < size // 2)
"""
    names = "mmap_threshold", "trim_threshold"
    tunables = ":".join(f"glibc.malloc.{name}=34359738368" for name in names)
    end = helpers.run("-c", script, GLIBC_TUNABLES=tunables)
    assert end.stdout.split() == ["True", "True"], end.stderr


def test_what_cannot_run_is_said() -> None:
    cases = [case("fnet", "decode"), case("linformer", causal=True), case("linear")]
    rows = {row["attention"]: row for row in run(cases).rows}
    assert rows["fnet"]["reason"] == "no stream to decode with"
    assert rows["linformer"]["reason"] == "no causal form"
    assert rows["linear"]["status"] == "measured"


def test_what_does_not_fit_is_said_and_the_rest_runs() -> None:
    cases = [case("softmax", length=n) for n in (16, 512)] + [
        case("linear", length=512)
    ]
    rows = run(cases, max_bytes=1_000_000).rows
    statuses = [(r["attention"], r["length"], r["status"]) for r in rows]
    assert ("softmax", 16, "measured") in statuses
    assert ("softmax", 512, "does not fit") in statuses
    assert ("linear", 512, "measured") in statuses
    (refused,) = (row for row in rows if row["status"] == "does not fit")
    assert "GB needed" in refused["reason"] and refused["peak_bytes"] > 4e6


def test_memory_that_runs_out_in_a_call_is_said(monkeypatch) -> None:
    def exhausted(self: Program, min_seconds: float) -> float:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Program, "load", exhausted)
    (row,) = run([case("linear")]).rows
    assert row["status"] == "does not fit" and "Out of memory" in row["reason"]


def test_what_would_take_too_long_is_left_out() -> None:
    lengths = (16, 1 << 20, 1 << 21)
    cases = [case("linear", length=length) for length in lengths]
    rows = run(cases, max_seconds=0.5, max_bytes=10**12).rows
    assert [row["status"] for row in rows] == ["measured", "left out", "left out"]
    assert "would take about" in rows[1]["reason"]
    assert "at 1,048,576 tokens" in rows[2]["reason"]
    # The compiler says what it would need all the same.
    assert rows[2]["peak_bytes"] > rows[1]["peak_bytes"] > 1e8


def test_what_was_measured_before_ctrl_c_is_kept(monkeypatch) -> None:
    sample = Program.sample
    calls = []

    def interrupted(self: Program) -> float:
        calls.append(self)
        if len(calls) == 4:  # In the second round of the first length.
            raise KeyboardInterrupt
        return sample(self)

    monkeypatch.setattr(Program, "sample", interrupted)
    names = ("linear", "cosformer")
    runner = run([case(name, length=n) for n in (16, 32) for name in names])
    assert runner.interrupted
    assert [(row["attention"], row["samples"]) for row in runner.rows] == [
        ("linear", 2),
        ("cosformer", 1),
    ]
    assert all(row["cut_short"] for row in runner.rows)


def test_rows_of_an_earlier_run_are_kept_in_whole_groups(monkeypatch) -> None:
    """16 is whole; of 32 one row is missing, of 64 one failed, of 128 one was cut."""
    cases = [case(x, length=n) for n in (16, 32, 64, 128) for x in ("linear", "flow")]
    before = json.loads(json.dumps(run(cases).rows))
    wanted = [(row["attention"], row["length"]) for row in before]
    del before[3]
    before[3]["status"] = "failed"
    before[6]["cut_short"] = True
    for row in before:
        row["median_ms"] = 1e6

    timed, sample = [], Program.sample

    def recorded(self: Program) -> float:
        timed.append(self.case.length)
        return sample(self)

    monkeypatch.setattr(Program, "sample", recorded)
    runner = run(cases, before=before, max_seconds=1e9)
    assert [(row["attention"], row["length"]) for row in runner.rows] == wanted
    assert set(timed) == {32, 64, 128}
    assert [row["median_ms"] == 1e6 for row in runner.rows] == [True] * 2 + [False] * 6

    # The times so far also tell what would take too long.
    statuses = [row["status"] for row in run(cases, before=before).rows]
    assert statuses == ["measured"] * 2 + ["left out"] * 6


@pytest.mark.parametrize(
    ("long_seconds", "order"),
    [(0.0, ["linear"] * 3 + ["cosformer"] * 3), (1e3, ["linear", "cosformer"] * 3)],
)
def test_quick_calls_take_turns_and_long_ones_do_not(
    long_seconds: float, order: list[str], monkeypatch
) -> None:
    called, sample = [], Program.sample

    def recorded(self):
        called.append(self.case.attention)
        return sample(self)

    monkeypatch.setattr(Program, "sample", recorded)
    monkeypatch.setattr(running, "_LONG_SECONDS", long_seconds)
    runner = run([case("linear"), case("cosformer")], repeats=3)
    assert called == order
    assert [row["samples"] for row in runner.rows] == [3, 3]


def test_expected_time_follows_the_measured_growth() -> None:
    assert expected_seconds([], 1024) == 0
    assert expected_seconds([(1024, 1.0)], 4096) == 16
    assert expected_seconds([(512, 1.0), (1024, 2.0)], 4096) == pytest.approx(8)
    assert expected_seconds([(512, 1.0), (1024, 4.0)], 2048) == pytest.approx(16)
    # A quick second length says nothing of the third: at least linear.
    assert expected_seconds([(512, 1.0), (1024, 0.1)], 2048) == pytest.approx(0.2)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_the_exponent_of_a_power_is_the_power(power: int) -> None:
    lengths = [1024, 4096, 8192, 16384]
    # Costs below 4,096 are left out where there are two lengths beyond.
    costs = [1e9, *(3.0 * n**power for n in lengths[1:])]
    assert exponent(lengths, costs) == pytest.approx(power, abs=1e-9)
    assert exponent([16, 32], [16.0**power, 32.0**power]) == pytest.approx(power)
    assert exponent([16], [1.0]) is None


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
    found = measure_roofline(["float32"], copy_bytes=4096, matmul_size=8, repeats=2)
    assert 0 < found.bytes_per_second < math.inf
    assert 0 < found.flops_per_second["float32"] < math.inf


def test_an_error_of_one_case_is_its_row(monkeypatch) -> None:
    def broken(case: Case) -> None:
        raise ValueError("blocks of 128 only")

    monkeypatch.setattr(running, "Program", broken)
    (row,) = run([case("linear")]).rows
    assert (row["status"], row["reason"]) == ("failed", "blocks of 128 only")


def test_what_has_not_begun_when_the_work_ends_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after Ctrl-C, which must not wait for a whole group of compilations."""
    begun: list[int] = []
    closed = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            closed.set()
            super().shutdown(wait=wait)

    def work(item: int) -> int:
        begun.append(item)
        if item > 1:
            closed.wait(60)
        return -item

    monkeypatch.setattr(running, "ThreadPoolExecutor", Pool)
    results = running.side_by_side(work, range(100))
    assert [next(results), next(results)] == [0, -1]
    results.close()
    assert begun in ([0, 1], [0, 1, 2])
    assert list(running.side_by_side(work, range(3))) == [0, -1, -2]
