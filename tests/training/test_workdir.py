"""The run directory: which run it belongs to, and which may go on in it."""

import json
import shutil

import helpers
import pytest
from run_helpers import BOUNDLESS, constant, main, restored

from lra_jax.training import workdir as workdirs
from lra_jax.training.workdir import exclusive, open_workdir


@pytest.mark.parametrize("how", helpers.DAMAGE)
def test_a_config_that_was_changed(finished, foreign, shapes, copied, how):
    helpers.damage(copied / "config.json", how, foreign.workdir / "config.json")
    before = finished.config, finished.dataset.fingerprint
    for read in (
        lambda: workdirs.open_workdir(copied, *before),
        lambda: restored(copied, shapes),
    ):
        try:
            read()
        except ValueError as error:
            assert str(copied) in str(error) and "\n" not in str(error)
            return
    config, fingerprint = workdirs.read_config(copied)
    assert (config.identity(), fingerprint) == (before[0].identity(), before[1])


@pytest.mark.parametrize("how", ["gone", "garbage"])
def test_lock(copied, foreign, how):
    """Its content is nobody's."""
    helpers.damage(copied / ".lock", how, foreign.workdir / ".lock")
    with workdirs.exclusive(copied):
        pass


def test_another_config_in_the_same_directory(finished, capsys):
    changed = finished.config.replace(train={"learning_rate": 0.5})
    code = main(changed)
    rate = finished.config.train.learning_rate
    named = (f"train.learning_rate={rate} (now 0.5)", str(finished.workdir))
    err = capsys.readouterr().err
    helpers.assert_one_error(code, err, 2, *named)
    assert "steps" not in err


def test_two_processes_in_one_directory(data_dir, tmp_path, capsys):
    with exclusive(tmp_path):
        code = main(helpers.tiny(data_dir, tmp_path))
    err = capsys.readouterr().err
    parts = (str(tmp_path), "in use by another process")
    helpers.assert_one_error(code, err, 2, *parts)
    assert not (tmp_path / "config.json").exists()


def test_checkpoints_without_their_config(finished, tmp_path, capsys):
    """Another seed would otherwise go on from them, and claim them."""
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "config.json").unlink()
    code = main(finished.config.replace(workdir=str(workdir), seed=5))
    parts = f"{workdir}/config.json", "got none, but checkpoints"
    helpers.assert_one_error(code, capsys.readouterr().err, 2, *parts)
    assert not (workdir / "config.json").exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_place_of_the_directory(tmp_path, capsys, below):
    file = tmp_path / "file"
    file.touch()
    code = main(helpers.tiny(tmp_path / "data", file / below))
    helpers.assert_one_error(code, capsys.readouterr().err, 2, "cannot be written")
    assert not (tmp_path / "data").exists()  # Before the data are made.


def test_a_directory_of_another_run_is_refused_before_its_data_are_made(
    tmp_path, capsys
):
    config = helpers.tiny(tmp_path / "data", tmp_path / "run")
    (tmp_path / "run").mkdir()
    theirs = config.replace(seed=5).to_dict() | {"data_fingerprint": "ab"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(theirs))
    helpers.assert_one_error(main(config), capsys.readouterr().err, 2, "seed=5 (now 0)")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "curves.png"])
def test_files_of_something_else_are_left_alone(data_dir, tmp_path, name) -> None:
    """A run would replace them at its end."""
    (tmp_path / name).write_text("mine")
    config = helpers.tiny(data_dir, tmp_path)
    with pytest.raises(ValueError, match=f"got none, but {name}"):
        open_workdir(tmp_path, config, "fingerprint")
    assert [x.name for x in tmp_path.iterdir()] == [name]


def test_a_run_that_has_not_ended_has_its_new_length_at_once(tmp_path):
    configs = {n: constant(tmp_path, tmp_path, n) for n in (4, 8, 12)}
    workdirs.open_workdir(tmp_path, configs[4], "ab")
    name = workdirs.identify(tmp_path)
    for steps in (8, 8, 12):
        workdirs.open_workdir(tmp_path, configs[steps], "ab")
        assert workdirs.read_config(tmp_path)[0].train.steps == steps
        assert workdirs.identify(tmp_path) == name
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["first_steps"] == 4
    with pytest.raises(ValueError, match="on other data, ab"):
        workdirs.open_workdir(tmp_path, constant(tmp_path, tmp_path, 16), "cd")
    assert json.loads((tmp_path / "config.json").read_text()) == written


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"length_warmup": "32:0.5"},
            "with --train.schedule=cosine and --train.length_warmup=32:0.5 a longer",
        ),
        (
            {**BOUNDLESS, "curriculum": "40:0.5"},
            "with --train.curriculum=40:0.5 a longer run",
        ),
        ({**BOUNDLESS, "learning_rate": 0.5}, "learning_rate=0.5 (now 0.001)"),
    ],
)
def test_what_cannot_be_made_longer(tmp_path, changes, named):
    config = helpers.tiny(tmp_path, tmp_path, train=changes)
    workdirs.open_workdir(tmp_path, config, "ab")
    longer = config.replace(train={"steps": 80, "learning_rate": 1e-3})
    with pytest.raises(ValueError, match="steps=40 \\(now 80\\)") as error:
        workdirs.open_workdir(tmp_path, longer, "ab")
    assert named in str(error.value) and "\n" not in str(error.value)
    assert "choose another --workdir" in str(error.value)


def test_a_run_of_one_length_does_not_go_on_with_several(tmp_path):
    """Its next batches would be others than those of a run of as many steps."""
    config = helpers.tiny(tmp_path, tmp_path, train=BOUNDLESS, data={"buckets": "auto"})
    workdirs.open_workdir(tmp_path, config, "ab")
    workdirs.open_workdir(tmp_path, config.replace(train={"steps": 399}), "ab")
    with pytest.raises(ValueError, match=r"with --data.buckets=auto a longer run"):
        workdirs.open_workdir(tmp_path, config.replace(train={"steps": 400}), "ab")
