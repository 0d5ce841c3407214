"""The benchmark of acting: a few steps of each mode."""

import acting


def test_both_modes_are_timed():
    row = acting.measure("linear", context=3, rounds=1, steps=6)
    assert row["speed_up"] > 0
    assert all(
        row[f"{mode}_{span}"] > 0
        for mode in ("stream", "context")
        for span in ("ms", "first_ms", "last_ms")
    )
