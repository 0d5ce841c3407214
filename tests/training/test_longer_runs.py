"""A run is made longer where no step depends on how many there are."""

import json
import shutil

import helpers
import pytest

from lra_jax import runs, train
from lra_jax.training import workdir as workdirs
from lra_jax.training.loop import Interrupted
from lra_jax.training.metrics import read_metrics
from lra_jax.training.restore import load_run
from lra_jax.training.result import write_result
from lra_jax.training.session import Session
from lra_jax.training.trainer import Trainer

BOUNDLESS = {"schedule": "constant", "length_warmup": ""}


def constant(data_dir, workdir, steps):
    settings = {**BOUNDLESS, "steps": steps, "eval_every": 4}
    return helpers.tiny(data_dir, workdir, train=settings, data={"buckets": "60"})


def losses(workdir):
    return [(m["step"], m["split"], m["loss"]) for m in read_metrics(workdir)]


def test_a_longer_run_ends_as_one_from_the_start(data_dir, tmp_path):
    """Bit for bit; and the shorter one stays what it was until then."""
    whole = constant(data_dir, tmp_path / "whole", 12)
    with Session(whole, quiet=True) as session:
        wanted = session.run()
    unbroken = session.trainer.state
    short = constant(data_dir, tmp_path / "run", 4)
    first = train.run(short, quiet=True)
    longer = constant(data_dir, tmp_path / "run", 12)
    with Session(longer, quiet=True) as session, pytest.raises(Interrupted):
        session.console = helpers.Closed(12, quiet=True)
        session.run()
    assert session.console.start == 4
    assert train.run(short, quiet=True) == first
    assert load_run(str(tmp_path / "run"), "last").step == 7
    with Session(longer, quiet=True) as session:
        result = session.run()
        assert session.console.start == 7
    helpers.assert_equal_trees(session.trainer.state, unbroken)
    for name in ("test_loss_best", "test_loss_last", "best_step", "steps"):
        assert getattr(result, name) == getattr(wanted, name)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert train.run(longer, quiet=True) == result.to_dict()
    assert load_run(str(tmp_path / "run")).step == result.best_step
    curves, end = (tmp_path / "run" / n for n in ("curves.png", "result.json"))
    assert curves.stat().st_mtime >= end.stat().st_mtime
    with pytest.raises(ValueError, match="can be made longer, not shorter"):
        Session(short, quiet=True)


def test_a_longer_run_counts_a_best_checkpoint_again(data_dir, tmp_path):
    """It goes back behind the shorter one's end, whose parameters were the best."""
    short = constant(data_dir, tmp_path / "run", 6)
    assert train.run(short, quiet=True)["best_step"] == 6
    longer = short.replace(train={"steps": 9})
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    wanted = train.run(longer.replace(workdir=str(tmp_path / "whole")), quiet=True)
    (tmp_path / "run/checkpoints/latest/6/state/_METADATA").unlink()
    with Session(longer, quiet=True) as session:
        result = session.run()
        assert session.console.start == 4
    scored, others = (
        [line for line in losses(tmp_path / name) if line[1] == "valid"]
        for name in ("run", "whole")
    )
    assert scored == others and [line[0] for line in scored] == [4, 6, 8, 9]
    for name in ("best_step", "test_loss_best", "valid_accuracy_best"):
        assert getattr(result, name) == wanted[name]
    assert load_run(str(tmp_path / "run")).step == result.best_step


def test_a_best_checkpoint_is_the_one_that_is_there(data_dir, tmp_path, monkeypatch):
    """On another device the steps after a crash may end with a lower score."""
    scores = [0.1, 0.5]

    def evaluate(self, params, split, *_, **__):
        accuracy = scores.pop(0) if split == "valid" else 0.0
        return {"accuracy": accuracy, "loss": 1.0}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    config = constant(data_dir, tmp_path, 12).replace(train={"best_by": "accuracy"})
    with Session(config, quiet=True) as session, pytest.raises(OSError, match="full"):
        save = session.trainer.checkpoints.save_latest

        def full(step, *rest):
            if step == 8:
                raise OSError("full")
            save(step, *rest)

        monkeypatch.setattr(session.trainer.checkpoints, "save_latest", full)
        session.run()
    scores += [0.05, 0.02]
    with Session(config, quiet=True) as session:
        result = session.run()
        assert session.console.start == 4
    assert result.best_step == load_run(str(tmp_path)).step == 8
    assert result.valid_accuracy_best == pytest.approx(5)


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


def test_a_result_of_fewer_steps_is_no_result(tmp_path):
    """As where the process died between writing the new length and the new result."""
    config = constant(tmp_path, tmp_path, 40)
    workdirs.open_workdir(tmp_path, config, "ab")
    write_result(tmp_path, helpers.result(steps=40))
    workdirs.lengthen(tmp_path, 80)
    longer = config.replace(train={"steps": 80})
    assert runs.finished_result(runs.Planned(longer, tmp_path, (), "")) is None


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
