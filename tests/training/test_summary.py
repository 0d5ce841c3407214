"""The last words of a run: its scores beside chance, baselines and published rows."""

import helpers

from lra_jax.configs import get_preset
from lra_jax.tasks import get_task
from lra_jax.training.console import RunConsole
from lra_jax.training.session import Session
from lra_jax.training.summary import facts, show_result


def test_a_checkpoint_chosen_on_the_test_split_is_said_to_be(capsys):
    shown = {}
    for validation in ("holdout", "test"):
        task = get_task("text")
        config = get_preset("text", "official", "flow")
        result = helpers.result(
            **{"test_accuracy_best": 64.0, "test_accuracy_last": 63.0},
            **{"best_step": 4, "steps": 9, "test_examples": 25_000},
            **{"official_data": True, "validation": validation},
        )
        show_result(RunConsole(9), task, config, result)
        shown[validation] = capsys.readouterr().out
    assert "chosen on the test split itself" in shown["test"]
    assert "chosen on" not in shown["holdout"]
    for part in (
        "baseline: chance",
        "50.00",
        "published: Flowformer",
        "64.29",
        "figure of the thuml/Flowformer repository",
    ):
        assert part in shown["test"]
    # Rows of other protocols are not shown, nor any next to a run of another length.
    assert "Transformer" not in shown["test"]
    shorter = config.replace(train={"steps": 9})
    show_result(RunConsole(9), task, shorter, result)
    assert "published" not in capsys.readouterr().out


def test_the_end_of_a_run_tells_parts_and_chance(capsys):
    task, config = get_task("parity"), get_preset("parity", "quick", "linear")
    result = helpers.result(
        **{"test_accuracy_best": 60.0, "test_accuracy_last": 59.0, "best_step": 4},
        **{"test_accuracy_by_length": {"64": 55.0, "256": 51.0}, "chance": 50.0},
        **{"test_scaled_accuracy": 0.2, "steps": 9, "test_examples": 100},
    )
    show_result(RunConsole(9), task, config, result)
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "(standard error over 100 examples, each counted once)",
        "part 64 55.00 best checkpoint part 256 51.00 best checkpoint",
        "mean over the parts 53.00",
        "chance 50.00 the best checkpoint is 20.0 % of the way from it to 100",
    ):
        assert words in said, said


def test_a_short_run_says_that_it_has_one_length(tmp_path):
    long = {"max_length": 200, "min_length": 10, "buckets": "auto"}
    config = helpers.tiny(
        tmp_path,
        tmp_path / "run",
        data=helpers.FEW_TREES | long,
        model={"max_length": 200},
    )
    said = {}
    for steps in (40, 400):
        changed = config.replace(train={"steps": steps})
        trainer = Session(changed, quiet=True).trainer
        said[steps] = trainer.buckets, facts(trainer)["training"]
    assert len(said[40][0]) == 1 < len(said[400][0])
    assert said[40][0] == said[400][0][-1:]
    assert "(one length: in less than 400 steps" in said[40][1]
    assert "one length" not in said[400][1]
