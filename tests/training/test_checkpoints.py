"""Checkpoints as a library's users meet them."""

import contextlib
import logging

from lra_jax.training.checkpoints import Checkpoints


def test_only_messages_of_orbax_are_dropped(tmp_path, caplog):
    """It shares its logger with everything else that uses absl."""
    (tmp_path / "config.json").write_text("{}")
    with caplog.at_level(logging.INFO, logger="absl"):
        with contextlib.closing(Checkpoints(tmp_path)):
            logging.getLogger("absl").info("the sky falls")
        assert [record.message for record in caplog.records] == ["the sky falls"]
