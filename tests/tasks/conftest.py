"""Runs without their picture, a third of the time of a small one."""

import pytest

from lra_jax import train


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/training/test_profile.py draws them."""
    monkeypatch.setattr(train, "_draw", lambda session: None)
