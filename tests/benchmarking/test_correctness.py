"""Errors of mechanisms against float64."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from benchmarking.small import config
from lra_jax.benchmarking import correctness, one_part


def test_errors_are_those_of_the_device(tmp_path) -> None:
    """A reference that is off by a thousandth is told from rounding."""
    chosen = config(tmp_path)
    cases = correctness.make_cases(chosen)
    assert [case.causal for case in cases] == [False, True]
    with jax.enable_x64(True):
        correctness.write_references(cases, tmp_path, print)
    row = correctness.compare(cases[0], tmp_path, "float32")
    assert row["holds"] and 0 < row["output"] < 1e-5
    file = correctness.file_of(cases[0], tmp_path)
    with np.load(file) as arrays:
        changed = dict(arrays)
    changed["of key"] *= 1.001
    np.savez(file, **changed)
    row = correctness.compare(cases[0], tmp_path, "float32")
    assert not row["holds"] and row["worst_gradient"] == "key"
    assert row["gradients"] == pytest.approx(1e-3, rel=0.1)


def test_kernels_are_compared_with_padding_too(tmp_path, monkeypatch) -> None:
    chosen = config(tmp_path)
    kernels = correctness.kernel_cases(chosen)
    assert {kernel.attention for kernel in kernels} == {"linear[implementation=pallas]"}
    with jax.enable_x64(True):
        correctness.write_references(
            correctness.reference_cases(chosen), tmp_path, print
        )
    outputs = []
    for kernel in kernels:
        row = correctness.compare(kernel, tmp_path, "float32")
        assert row["status"] == "not supported" and "on this machine" in row["reason"]
        plain = dataclasses.replace(kernel, attention="linear")
        row = correctness.compare(plain, tmp_path, "float32")
        assert row["holds"] and row["rows"] == kernel.rows
        with np.load(correctness.file_of(kernel, tmp_path)) as arrays:
            outputs.append(arrays["of output"])
    assert len(outputs) == 2 * 2
    for one, other in itertools.combinations(outputs, 2):
        assert np.abs(one - other).max() > 1e-3
    assert one_part._kernels(chosen) == []
    monkeypatch.setattr(correctness, "refusal", lambda case, dtype: None)
    assert one_part._kernels(chosen) == kernels


def test_errors_of_late_positions_are_not_small_beside_the_first() -> None:
    expected = np.ones((1, 130, 1, 4))
    expected[:, 64:] = 0.01
    got = expected.copy()
    got[:, 129] *= 1.1
    assert correctness.relative_error(got, expected) == pytest.approx(1e-3)
    assert correctness.output_error(got, expected) == pytest.approx(0.1)
