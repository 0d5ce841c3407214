"""A trace of a few steps."""

import helpers
import jax.numpy as jnp
import pytest

from lra_jax import train
from lra_jax.reports import curves
from lra_jax.training.profile import Profile


def test_a_profile_and_the_curves_of_a_run(
    data_dir, tmp_path, monkeypatch, capsys
) -> None:
    config = helpers.tiny(
        *(data_dir, tmp_path / "run"),
        train={"steps": 12, "eval_every": 12},
        profile=True,
    )
    train.run(config, quiet=True)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    # As after MPLBACKEND=nope: the run stays finished.
    (tmp_path / "run" / "curves.png").unlink()
    monkeypatch.setattr(curves, "draw_run", lambda *_: [][1])
    train.run(config)
    assert "no curves: list index out of range" in capsys.readouterr().out


def test_a_run_too_short_for_a_profile_says_so(tmp_path) -> None:
    profile = Profile(tmp_path)
    profile.step(jnp.zeros(()))
    with pytest.warns(UserWarning, match="no trace: .* 5 compiled steps, .* a step"):
        profile.close()
    profile.close()
    Profile(None).close()
    assert not list(tmp_path.iterdir())
