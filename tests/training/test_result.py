"""``result.json``: what it holds, and that it is as it was written."""

import json
import shutil

import helpers
import jax
import pytest
from run_helpers import STEPS, constant, main, reference_means

from lra_jax import runs
from lra_jax.training import workdir as workdirs
from lra_jax.training.metrics import read_metrics
from lra_jax.training.result import read_result, write_result


def test_result(finished):
    result = json.loads((finished.workdir / "result.json").read_text())
    assert result.pop("seal")
    assert result == finished.result.to_dict()
    valid = [m for m in read_metrics(finished.workdir) if m["split"] == "valid"]
    assert result["best_by"] == finished.config.train.best_by == "loss"
    best = min(valid, key=lambda m: m["loss"])
    assert result["best_step"] == best["step"]
    assert result["valid_accuracy_best"] == pytest.approx(100 * best["accuracy"])
    last = reference_means(finished.trainer, "test")
    assert result["test_accuracy_last"] == pytest.approx(100 * last["accuracy"])
    assert result["test_loss_last"] == pytest.approx(last["loss"], rel=1e-5)
    assert result["test_examples"] == 45 and result["steps"] == STEPS
    params = jax.tree.leaves(finished.trainer.state.params)
    assert result["parameters"] == sum(x.size for x in params)
    assert result["data_fingerprint"] == finished.dataset.fingerprint
    assert result["versions"]["jax"] == jax.__version__


def test_damaged_result(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").write_text("{}")
    code = main(finished.config.replace(workdir=str(workdir)))
    helpers.assert_one_error(
        code, capsys.readouterr().err, 2, "result.json: ", "delete it to score"
    )


@pytest.mark.parametrize("how", helpers.DAMAGE)
def test_a_result_that_was_changed(finished, foreign, tmp_path, how):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    file = workdir / "result.json"
    helpers.damage(file, how, foreign.workdir / "result.json")
    if how == "gone":
        assert read_result(workdir) is None
        return
    with pytest.raises(ValueError, match=f"^{file}: (.*: )?expected ") as error:
        read_result(workdir)
    assert "\n" not in str(error.value)


def test_any_changed_number_of_a_result_is_found(finished, tmp_path):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    plan = runs.Planned(finished.config, workdir, "")
    assert runs.finished_result(plan) == finished.result
    written = json.loads((workdir / "result.json").read_text())
    for name, value in written.items():
        if isinstance(value, float) or (isinstance(value, int) and value > 1):
            other = value / 2 + 0.1 if isinstance(value, float) else value - 1
            changed = json.dumps(written | {name: other})
            (workdir / "result.json").write_text(changed)
            with pytest.raises(ValueError, match="as it was written, got other values"):
                read_result(workdir)
            assert runs.finished_result(plan) is None


def test_a_result_of_fewer_steps_is_no_result(tmp_path):
    """As where the process died between writing the new length and the new result."""
    config = constant(tmp_path, tmp_path, 40)
    workdirs.open_workdir(tmp_path, config, "ab")
    write_result(tmp_path, helpers.result(steps=40))
    workdirs.lengthen(tmp_path, 80)
    longer = config.replace(train={"steps": 80})
    assert runs.finished_result(runs.Planned(longer, tmp_path, "")) is None
