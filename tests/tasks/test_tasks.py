"""Every task end to end on small archives in the true formats: train, score, again."""

import helpers
import originals
import pytest

from lra_jax import evaluate, train
from lra_jax.configs import get_preset

pytestmark = pytest.mark.slow

TRAIN = {
    **{"steps": 30, "batch_size": 8, "eval_batch_size": 8, "eval_every": 30},
    **{"warmup": 5, "learning_rate": 1e-2, "schedule": "cosine", "log_every": 10},
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
        ("retrieval", "modern", "cosformer", 90),
        ("image", "modern", "linear", 30),
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
