"""The decisions of the causal benchmark: which cases run, and how they compare."""

import causal
import pytest


def test_cost_is_extrapolated_by_its_growth() -> None:
    assert causal.expected(2.0, 1024, 4096, growth=1) == 8
    assert causal.expected(2.0, 1024, 4096, growth=2) == 32


def test_a_case_is_refused_for_time_memory_or_an_earlier_refusal() -> None:
    quadratic, linear = causal.FORMS["torch_softmax"], causal.FORMS["attnax"]
    last = {"length": 8192, "seconds": 1.5, "growth_mb": 1e3}
    assert causal.refusal(quadratic, 8192, None, None) is None
    assert "6 s a run" in str(causal.refusal(quadratic, 16384, last, 0.3))
    # As slow as ours allows: 10 times our own time is no reason to stop.
    assert causal.refusal(quadratic, 16384, last, 0.7) is None
    assert causal.refusal(linear, 16384, last, 0.1) is None
    assert "16 GB" in str(causal.refusal(quadratic, 32768, last, 3.0))
    assert causal.refusal(linear, 16384, {"stopped": "before"}, 0.1) == "before"


def test_a_ratio_is_the_median_over_rounds() -> None:
    # The third round met a slow spell, and the other form has one more.
    assert causal.ratio([2.0, 2.2, 9.0, 5.0], [1.0, 1.0, 4.5]) == 2.0


def test_every_round_begins_with_another_case() -> None:
    rounds = [causal.rotate(["a", "b", "c"], number) for number in range(4)]
    assert [cases[0] for cases in rounds] == ["a", "b", "c", "a"]
    assert all(sorted(cases) == ["a", "b", "c"] for cases in rounds)


def test_peers_are_chosen_by_name() -> None:
    kernels = ["linear", "cosformer", "flow"]
    ours = [*kernels, *(f"{name}_xla" for name in kernels), "softmax"]
    assert causal.choose("none") == ours
    assert causal.choose("fla,attnax") == [*ours, "attnax", "fla"]
    assert causal.choose("all") == list(causal.FORMS)
    with pytest.raises(ValueError, match=r"--peers: .*got 'flax'"):
        causal.choose("attnax,flax")
