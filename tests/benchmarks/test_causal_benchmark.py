"""The decisions of the causal benchmark: which cases run, and how they compare."""

import causal
import pytest


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
