"""Checkpoints as a library's users meet them."""

import contextlib
import logging

import helpers
import jax.numpy as jnp
import pytest
from flax import nnx

from lra_jax.training.checkpoints import Checkpoints


def test_only_messages_of_orbax_are_dropped(tmp_path, caplog):
    """It shares its logger with everything else that uses absl."""
    (tmp_path / "config.json").write_text("{}")
    with caplog.at_level(logging.INFO, logger="absl"):
        with contextlib.closing(Checkpoints(tmp_path)):
            logging.getLogger("absl").info("the sky falls")
        assert [record.message for record in caplog.records] == ["the sky falls"]


def test_a_save_that_cannot_be_read_is_an_error(tmp_path):
    """Orbax reads a path as a pattern, and writes no manifest into such a folder."""
    folder = tmp_path / "run [2]"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        params = nnx.State({"kernel": nnx.Param(jnp.ones(4))})
        with pytest.raises(OSError, match=r"step 3 cannot be written.*manifest"):
            checkpoints.save_best(3, params)


LATE = """
import asyncio, contextlib, pathlib, sys, time
import numpy as np
import tensorstore
from lra_jax.training.checkpoints import Checkpoints

folder = pathlib.Path(sys.argv[1])


class Broken:
    def __del__(self):
        raise RuntimeError("the sky falls")


async def write(name):
    store = {"driver": "file", "path": str(folder / name)}
    form = {"driver": "zarr3", "kvstore": store}
    array = np.ones((1_000, 1_000), np.float32)
    opened = await tensorstore.open(
        form, create=True, dtype=array.dtype, shape=array.shape
    )
    await opened.write(array).commit


async def fail():
    left = [asyncio.ensure_future(write(str(number))) for number in range(20)]
    await asyncio.sleep(0.002)
    return left


with contextlib.closing(Checkpoints(folder)):
    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(fail())
    loop.close()
    time.sleep(1)
    made = Broken()
    del made
"""


def test_writes_that_end_after_their_save_failed_are_not_reported(tmp_path):
    """Orbax runs a save in an event loop of its own, and closes it after an error."""
    (tmp_path / "config.json").write_text("{}")
    end = helpers.run("-c", LATE, str(tmp_path))
    assert end.returncode == 0, end.stderr
    assert "Event loop is closed" not in end.stderr
    assert "the sky falls" in end.stderr
