"""Checkpoints: which are kept, and that none is read that is not as it was written.

It is recovered to the same bits, or one line says which file is damaged, and how.
Prepared data have a table of their own in tests/data/test_damage.py.
"""

import contextlib
import gc
import json
import logging
import resource
import shutil
import subprocess
import sys

import helpers
import jax.numpy as jnp
import pytest
from flax import nnx
from run_helpers import (
    LATEST,
    STEPS,
    damage,
    main,
    restored,
    trainer,
)

from lra_jax import seals
from lra_jax.training.checkpoints import Checkpoints, Progress, check_space
from lra_jax.training.session import Session


def test_only_messages_of_orbax_are_dropped(tmp_path, caplog):
    """It shares its logger with everything else that uses absl."""
    (tmp_path / "config.json").write_text("{}")
    with caplog.at_level(logging.INFO, logger="absl"):
        with contextlib.closing(Checkpoints(tmp_path)):
            logging.getLogger("absl").info("the sky falls")
        assert [record.message for record in caplog.records] == ["the sky falls"]


def test_space(tmp_path):
    check_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"No space left on device, 1,000,000,000.* free"):
        check_space(tmp_path, 10**18)


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


def test_checkpoints_hold_the_latest_and_the_best(finished, dataset, tmp_path):
    folders = finished.workdir / "checkpoints"
    kept = sorted(p.name for p in (folders / "latest").iterdir())
    assert kept == [str(STEPS - 10), str(STEPS)]
    best_step = finished.result.best_step
    assert [p.name for p in (folders / "best").iterdir()] == [str(best_step)]
    again = trainer(finished.config, dataset, finished.workdir)
    assert again.restore() == STEPS
    helpers.assert_equal_trees(again.state, finished.trainer.state)
    assert again.progress == finished.trainer.progress
    best, _ = again.checkpoints.load_params("best", again.state)
    again.checkpoints.close()
    means = again.evaluate(best, "valid")
    assert 100 * means["accuracy"] == pytest.approx(finished.result.valid_accuracy_best)


@pytest.mark.parametrize("best_by", ["accuracy", "loss"])
def test_the_best_checkpoint_is_best_in_what_was_asked(best_by):
    """Scores of four evaluations: the earliest of equals counts."""
    progress, kept = Progress(), []
    for loss, accuracy in ((2.0, 0.3), (1.8, 0.2), (1.8, 0.3), (1.9, 0.4)):
        means = {"loss": loss, "accuracy": accuracy}
        kept.append(progress.is_improved_by(means, best_by))
        if kept[-1]:
            progress = Progress(len(kept), accuracy, loss)
    expected = [True, True, False, False]
    assert kept == (expected if best_by == "loss" else [True, False, False, True])


@pytest.mark.parametrize("change", [{"mlp_dim": 32}, {"num_layers": 2}])
def test_a_checkpoint_of_another_model_is_one_line(finished, dataset, data_dir, change):
    other = helpers.tiny(data_dir, model=change)
    again = trainer(other, dataset, finished.workdir)
    expected = r"^checkpoint \S+/\d+: expected \S+ of shape [^\n]+, got [^\n]+$"
    for load in (
        again.restore,
        lambda: again.checkpoints.load_params("best", again.state),
        lambda: again.checkpoints.load_params("last", again.state),
    ):
        with pytest.raises(ValueError, match=expected):
            load()
    again.checkpoints.close()


@pytest.fixture(scope="module")
def earlier(finished, shapes):
    """The whole state at the checkpoint before the last."""
    with_one = shapes.workdir / "earlier"
    shutil.copytree(finished.workdir, with_one)
    shutil.rmtree(with_one / LATEST)
    return restored(with_one, shapes)[0]


# What damage a seal finds is tested with seals; here is what comes of it.
DAMAGED = [
    ("state/d/*", "flipped"),
    (seals.NAME, "gone"),
    (seals.NAME, "foreign"),
]


@pytest.mark.parametrize(("name", "how"), DAMAGED)
def test_the_newest_checkpoint(
    finished, foreign, shapes, earlier, copied, caplog, name, how
):
    """The one before it is taken, and a line names the file."""
    place = damage(copied, foreign, LATEST, name, how)
    state, progress = restored(copied, shapes)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("lra_jax")]
    if (name, how) == (seals.NAME, "gone"):
        assert not lines and progress == finished.trainer.progress
        helpers.assert_equal_trees(state, finished.trainer.state)
        return
    (line,) = lines
    assert line.startswith(f"{copied / LATEST}: expected a whole checkpoint, got ")
    assert line.endswith("going back to step 30") and "\n" not in line
    assert place in line or (name, how) == (seals.NAME, "foreign")
    helpers.assert_equal_trees(state, earlier)


# Orbax leaves tasks behind when a load fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("state/_METADATA", "gone"),
        ("state/manifest.ocdbt", "cut"),
        ("data/process_0-of-1.json", "flipped"),
    ],
)
def test_without_a_seal(foreign, shapes, earlier, copied, caplog, name, how):
    """Orbax finds the damage, and the checkpoint before is taken."""
    damage(copied, foreign, LATEST, name, how)
    (copied / LATEST / seals.NAME).unlink()
    state, _ = restored(copied, shapes)
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("lra_jax")
    ]
    assert line.startswith(f"{copied / LATEST}: expected a whole checkpoint, got ")
    assert line.endswith("going back to step 30") and "\n" not in line
    helpers.assert_equal_trees(state, earlier)
    (aside,) = (copied / "checkpoints" / "damaged").iterdir()
    assert aside.name.startswith(f"{STEPS}-")


@pytest.mark.parametrize(
    ("name", "how"), [(name.replace("state", "params"), how) for name, how in DAMAGED]
)
def test_the_best_checkpoint(finished, foreign, shapes, copied, name, how):
    """It is found before the run goes on."""
    best, theirs = (
        f"checkpoints/best/{run.result.best_step}" for run in (finished, foreign)
    )
    place = damage(copied, foreign, best, name, how, theirs)
    if (name, how) == (seals.NAME, "gone"):
        state, _ = restored(copied, shapes)
        helpers.assert_equal_trees(state, finished.trainer.state)
        return
    with pytest.raises(ValueError, match=f"^{copied / best}: expected ") as error:
        restored(copied, shapes)
    assert "\n" not in str(error.value)
    assert place in str(error.value) or (name, how) == (seals.NAME, "foreign")


def test_a_changed_setting_is_not_scored(shapes, copied):
    """Of the same shapes: the checkpoint knows its run."""
    values = json.loads((copied / "config.json").read_text())
    values["attention"] = "linear"
    (copied / "config.json").write_text(json.dumps(values))
    checkpoints = Checkpoints(copied, clean=False)
    refusal = "a checkpoint of the run in config.json, got one of other settings"
    for which in ("best", "last"):
        with pytest.raises(ValueError, match=refusal):
            checkpoints.load_params(which, shapes.state)
    with pytest.raises(ValueError, match="checkpoint: expected one of best, last"):
        checkpoints.load_params("bset", shapes.state)
    checkpoints.close()


# Orbax leaves tasks in its closed event loop when a load or a save fails.
orbax_leaves_tasks = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@orbax_leaves_tasks
def test_no_checkpoint_is_whole(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    for folder in (workdir / "checkpoints" / "latest").iterdir():
        helpers.damage(folder / "state" / "_METADATA", "gone")
    before = sorted(workdir.rglob("*"))
    code = main(finished.config.replace(workdir=str(workdir)))
    parts = "latest/40: expected a whole checkpoint", "latest/30: expected a whole"
    helpers.assert_one_error(code, capsys.readouterr().err, 2, *parts)
    after = [p for p in workdir.rglob("*") if p.name != ".lock"]
    assert sorted(after) == [p for p in before if p.name != ".lock"]


# Fills the small disk after the first checkpoint, and copies what is on it.
SCRIPT = """
set -u
mount -t tmpfs -o size=64m tmpfs "$DISK"
{ "$@" > /dev/null 2> "$OUT/err"; echo $? > "$OUT/code"; } &
until [ -e "$DISK/run/checkpoints/latest/10" ] || [ -e "$OUT/code" ]; do
    sleep 0.002
done
cat /dev/zero > "$DISK/filler" 2> /dev/null
wait
cp -r "$DISK/run" "$OUT/run"
"""


def can_mount(folder) -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", folder]
    return shutil.which("unshare") is not None and not subprocess.call(command)


@pytest.mark.slow
def test_a_full_disk(finished, tmp_path):
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    out.mkdir()
    if not can_mount(disk):
        pytest.skip("no small disk can be mounted here")
    flags = helpers.flags(finished.config.replace(workdir=str(disk / "run")))
    command = [sys.executable, "-m", "lra_jax.train", *flags]
    environment = helpers.environment({"DISK": str(disk), "OUT": str(out)})
    subprocess.run(
        ["unshare", "-rm", "bash", "-c", SCRIPT, "train", *command],
        env=environment,
        check=True,
    )
    code, error = int((out / "code").read_text()), (out / "err").read_text()
    helpers.assert_one_error(code, error, 1, str(disk / "run"), "No space left")
    # There is room again.
    config = finished.config.replace(workdir=str(out / "run"))
    with Session(config, quiet=True) as session:
        step = session.trainer.restore()
        assert step >= 10
        written, unbroken = map(helpers.without_times, (out / "run", finished.workdir))
        kept = [line for line in unbroken if line["step"] <= step]
        assert written[: len(kept)] == kept


@orbax_leaves_tasks
def test_a_checkpoint_that_the_system_refuses(
    data_dir, dataset, tmp_path, monkeypatch, capsys
):
    """A limit on the size of files, as a quota is one that no check foresees."""
    usual = Checkpoints.save_latest

    def limited(*args):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        try:
            usual(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(Checkpoints, "save_latest", limited)
    few = {"steps": 2, "warmup": 0, "eval_every": 2}
    code = main(helpers.tiny(data_dir, tmp_path / "run", train=few))
    parts = "checkpoints/", "cannot be written, earlier ones are kept"
    helpers.assert_one_error(code, capsys.readouterr().err, 1, *parts)
    gc.collect()  # Now, and not in the midst of a later test.
