"""Every task end to end on small archives in the true formats: train, score, again."""

import helpers
import originals
import pytest

from lra_jax import evaluate, train
from lra_jax.configs import get_preset

pytestmark = pytest.mark.slow

TRAIN = {
    **{"steps": 60, "batch_size": 8, "eval_batch_size": 8, "eval_every": 20},
    **{"warmup": 5, "learning_rate": 1e-2, "schedule": "cosine", "log_every": 20},
}
MODEL = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "qkv_dim": 16, "mlp_dim": 16}
SHORT = {"max_length": 64}


def sources(folder):
    """Where each task's original files lie, and how they are cut."""
    imdb = originals.imdb_archive(folder / "aclImdb_v1.tar.gz")
    cifar = originals.cifar_files(16, 20)
    cifar = originals.cifar_archive(folder / "cifar-10-binary.tar.gz", cifar)
    aan = originals.write(folder / "tsv_data", originals.aan_files(80))
    return {"text": imdb, "image": cifar, "retrieval": aan.parent}


@pytest.mark.parametrize(
    ("task", "preset", "attention", "least"),
    [
        ("text", "modern", "softmax", 90),
        ("retrieval", "modern", "cosformer", 60),
        ("image", "modern", "linear", 20),
    ],
)
def test_train_and_score(tmp_path, task, preset, attention, least):
    """Data that tell their labels are learnt, so labels belong to their examples."""
    path = str(sources(tmp_path)[task])
    size = {} if task == "image" else SHORT
    config = get_preset(task, preset, attention).replace(
        workdir=str(tmp_path / "run"),
        train=TRAIN,
        model=MODEL | size,
        data={"dir": str(tmp_path / "data"), "path": path, "buckets": "auto"} | size,
    )
    result = train.run(config, quiet=True)
    assert result["test_accuracy_best"] >= least, result
    assert result["official_data"] is False
    again = evaluate.run(evaluate.EvaluateConfig(workdir=str(tmp_path / "run")))
    assert again["accuracy"] == pytest.approx(result["test_accuracy_best"])
    assert again["examples"] == result["test_examples"]


def test_a_checkpoint_chosen_on_the_test_split_is_said_to_be(capsys):
    from lra_jax.tasks import get_task
    from lra_jax.training.console import RunConsole
    from lra_jax.training.summary import show_result

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


def test_no_data_and_no_network_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with pytest.raises(SystemExit) as stop:
        train.main(["--task=text", f"--data.dir={tmp_path}"])
    out, err = capsys.readouterr()
    parts = ("aclImdb_v1.tar.gz", "84,125,825 bytes", "https://ai.stanford.edu")
    helpers.assert_one_error(
        stop.value.code, err, 2, *parts, f"{tmp_path}/downloads", "--data.path"
    )
    assert out == ""
