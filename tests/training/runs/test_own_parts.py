"""Runs with parts of one's own: trained, resumed bit for bit, scored again."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import cli, evaluate, models, report, train
from lra_jax.configs import registry
from lra_jax.training.session import Session
from lra_jax.training.trainer import Trainer

TRAIN = {"steps": 10, "eval_every": 5, "log_every": 5, "warmup": 2}


def train_twice(config: Any, tmp_path: Any) -> tuple[Trainer, Any]:
    """Runs to the end, and there again from the middle, with the same bits."""
    with Session(config.replace(workdir=str(tmp_path / "run")), quiet=True) as run:
        result = run.run()
    second = helpers.resume(run.config, 5)
    helpers.assert_equal_trees(second.trainer.state, run.trainer.state)
    return run.trainer, result


def test_averages_are_scored_kept_and_resumed(data_dir, tmp_path) -> None:
    """Those of Muon, whose state holds that of Adam beside its own."""
    train = {**TRAIN, "ema": 0.7, "label_smoothing": 0.1}
    train |= {"optimizer": "muon", "weight_decay": 0.1, "decay_vectors": False}
    config = helpers.tiny(data_dir, train=train)
    trainer, result = train_twice(config, tmp_path)

    def loss(params: Any) -> float:
        return trainer.evaluate(params, "test")["loss"]

    assert result.test_loss_last == loss(trainer.scored_params)
    assert abs(result.test_loss_last - loss(trainer.state.params)) > 1e-4
    for which, loss_then in (
        ("last", result.test_loss_last),
        ("best", result.test_loss_best),
    ):
        again = evaluate.EvaluateConfig(str(tmp_path / "run-again"), checkpoint=which)
        assert evaluate.run(again)["loss"] == loss_then


TASK = "my_parts:SUMS"
PAGE = Path(__file__).parents[3] / "docs" / "own_parts.md"
PARTS = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
COMMANDS = re.findall(r"--(\w[\w.]*=[^\s`]+)", PAGE.read_text())


def test_a_run_of_ones_own_parts(tmp_path, monkeypatch) -> None:
    """Those of the page: trained, resumed, and scored and shown elsewhere."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    of_page = [x for x in COMMANDS if "my_parts:" in x or "options=" in x]
    sizes = [f"--train.{name}={value}" for name, value in TRAIN.items()]
    sizes += ["--train.batch_size=8", "--data.num_train=40", "--data.num_test=20"]
    sizes += ["--model.num_layers=1", "--model.embed_dim=16", "--model.mlp_dim=16"]
    words = [f"--{x}" for x in dict.fromkeys(of_page)]
    words += [*sizes, "--attention=linear", "--data.length=9"]
    config = cli.parse_config("train", "", words)
    assert sorted(config.own_parts) == [
        *("--model.block", "--model.mlp", "--model.positions"),
        *("--task", "--train.optimizer"),
    ]
    trainer, result = train_twice(config, tmp_path)
    assert result.task == TASK and result.chance == pytest.approx(100 / 3)
    model: Any = trainer.model_at(trainer.state.params)
    block = model.encoder.blocks[0]
    assert type(block).__name__ == "Parallel"
    assert block.mlp.inner.kernel.shape == (16, 3 * 16)
    assert np.isfinite(np.asarray(model.encoder.positions(9))).all()
    folder = tmp_path / "run-again"
    assert (folder / "code" / "my_parts.py").read_text() == PARTS
    assert json.loads((folder / "config.json").read_text())["task"] == TASK

    # In another process, from another folder, where only the run has the code.
    (tmp_path / "my_parts.py").unlink()
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "my_parts")
    monkeypatch.setattr(registry, "_ALLOWED", set())
    command = evaluate.EvaluateConfig(str(folder))
    refusal = "^--allow-code: expected True to import the task 'my_parts:SUMS', got Fal"
    with pytest.raises(ValueError, match=refusal):
        evaluate.run(command)
    with pytest.raises(ValueError, match=r"--allow-code: .*'my_parts:SUMS', got False"):
        report.write_report(folder, tmp_path / "report")
    with pytest.raises(ValueError, match=r"^allow_code: expected True to import 'my_p"):
        models.load(folder)
    assert "my_parts" not in sys.modules
    scored = evaluate.run(dataclasses.replace(command, allow_code=True))
    assert scored["loss"] == result.test_loss_best
    assert sys.modules["my_parts"].__file__ == str(folder / "code" / "my_parts.py")
    report.write_report(folder, tmp_path / "report", allow_code=True)
    page = (tmp_path / "report" / "report.md").read_text()
    assert all(f"my_parts:{x}" in page for x in ("SUMS", "Squared", "signum"))
    assert "NOT the published" not in page and "differ from LRA" not in page
    assert (tmp_path / "report" / "curves-my_parts.SUMS.png").exists()
    again: Any = models.load(folder, allow_code=True).model
    assert type(again.encoder.blocks[0]).__name__ == "Parallel"


NOT_A_TASK = 3


def wide(config, rngs):
    """An MLP that returns another width."""
    return lambda x, mask=None, rngs=None: jnp.concatenate([x, x], -1)


def short(config, rngs):
    """Positions that are too few."""
    return lambda length: jnp.zeros((3, config.embed_dim))


def no_block(attention, mlp, config, rngs):
    return attention


def nothing(config, rngs):
    return None


MODULE = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--task=no_such:TASK", "importable module before ':' in 'no_such:TASK'"),
        ("--task={}:NOT_A_TASK", "to be a lra_jax.tasks.Task, got an int"),
        ("--task={}:NOT_A_TSK", "no attribute 'NOT_A_TSK'"),
        ("--model.block=parallel", "one of residual, or 'package.module:thing', got"),
        ("--model.block={}:no_block", "to make a Block, got a MultiHeadAttention"),
        ("--model.block={}:wide", r"to take \(attention, mlp, config, rngs\), got too"),
        ("--model.mlp={}:MODULE", "a class or a function, got a Linear"),
        ("--model.mlp={}:no_block", r"to take \(config, rngs\), got missing"),
        ("--model.mlp={}:wide", r"B, T, D\]=\(2, 64, 16\), got \(2, 64, 32\)"),
        ("--model.mlp={}:NOT_A_TASK", "a class or a function, got an int"),
        ("--model.positions={}:short", r"\[T, D\]=\(64, 16\), got \(3, 16\)"),
        ("--model.positions=leraned", "got 'leraned'; did you mean 'learned'"),
        ("--model.positions={}:shrt", "no attribute 'shrt'; did you mean 'short'"),
    ],
)
def test_a_wrong_part_is_refused(flag, words, data_dir, capsys) -> None:
    """In one line, before the data are made."""
    flag = flag.format(__name__)
    sizes = [f"--model.{name}={value}" for name, value in helpers.MODEL.items()]
    where = ["--data.path=/nowhere", "--data.max_length=60", "--attention=linear"]
    with pytest.raises(SystemExit) as stop:
        train.main([*where, *sizes, flag])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert re.search(words, line) and flag.split(".")[-1].split("=")[0] in line


def test_parts_of_python_objects() -> None:
    """A class stands for its path; one that no path finds is refused."""
    config = models.ModelConfig(mlp=nothing, mechanism="linear")
    assert config.mlp == f"{__name__}:nothing"
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 12}
    model = models.SequenceClassifier(5, 2, config=config, **sizes, rngs=nnx.Rngs(0))
    assert model.encoder.blocks[0].mlp is None

    def local(config, rngs):
        return None

    with pytest.raises(ValueError, match=r"^mlp: expected an object that its module"):
        models.ModelConfig(mlp=local)
