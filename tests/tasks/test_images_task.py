"""Images from flags to a score, on small pictures in folders."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from lra_jax import analyze, evaluate, models, train
from lra_jax.configs import get_preset
from lra_jax.data import __main__ as data_command
from lra_jax.models.layers import Dense
from lra_jax.tasks import get_task

TRAIN = {
    **{"steps": 4, "warmup": 0, "batch_size": 4, "eval_batch_size": 4},
    **{"eval_every": 2, "log_every": 2, "mixup": 0.8, "cutmix": 1.0},
}
MODEL = {
    **{"num_layers": 2, "stages": "1,1", "embed_dim": 8, "num_heads": 2, "qkv_dim": 8},
    **{"mlp_dim": 8, "patch": 2},
}


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Dark and bright pictures of 8 x 8 pixels."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("valid", 2), ("test", 3)):
        for name, least in (("bright", 128), ("dark", 0)):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(least, least + 128, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "pictures"


def config(path: Path, attention="flow", workdir="run", **changes):
    made = get_preset("images", "small", attention).replace(
        train=TRAIN,
        model=MODEL,
        data={"path": str(path), "size": 8},
        workdir=str(path.parent / workdir),
    )
    return made.replace(**changes)


def test_a_run(pictures, tmp_path, capsys):
    model = MODEL | {"attention_options": "grid=true"}
    run = config(pictures, attention="cosformer", model=model)
    result = train.run(run, quiet=True)
    assert result["test_examples"] == 6 and not result["official_data"]
    loaded = models.load(str(tmp_path / "run"))
    assert loaded.about["classes"] == ["bright", "dark"]
    files = sorted((pictures / "test").glob("*/*.png"))
    images = [np.asarray(Image.open(file)) for file in files]
    labels = loaded.predict(images).labels
    right = [
        ("bright", "dark")[x] == file.parent.name
        for x, file in zip(labels, files, strict=True)
    ]
    scored = evaluate.run(evaluate.EvaluateConfig(str(tmp_path / "run")))
    assert scored["accuracy"] == pytest.approx(100 * np.mean(right))
    with pytest.raises(ValueError, match=r"expected an image \[rows, columns, 3\]"):
        loaded.predict([images[0][:, :, 0]])
    other = shutil.copytree(tmp_path / "run", tmp_path / "other")
    runs = f"{tmp_path / 'run'},{other}"
    analyze.run(analyze.Maps(workdir=runs, out=str(tmp_path / "maps"), layer=2))
    drawn = json.loads((tmp_path / "maps" / "map-runs.json").read_text())["data"]
    assert drawn["names"] == ["cosformer grid=true"] * 2
    assert np.shape(drawn["values"]) == (2, 4) and np.shape(drawn["tokens"]) == (64, 3)
    with pytest.raises(ValueError, match="expected blocks of one length and width"):
        analyze.run(analyze.Spectrum(workdir=str(tmp_path / "run")))


def test_own_attention_is_resumed_bit_for_bit(pictures, tmp_path, monkeypatch):
    """With the same mixtures of images."""
    (tmp_path / "image_mean.py").write_text(
        "import jax.numpy as jnp\n"
        "def average(query, key, value):\n"
        "    return jnp.broadcast_to(value.mean(1, keepdims=True), value.shape)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = config(pictures, attention="image_mean:average")
    result = train.run(run, quiet=True)
    assert result["attention"] == "image_mean:average"
    helpers.resume(run, 2)


def test_data_in_words_and_as_a_sheet(pictures, tmp_path, capsys):
    sheet = tmp_path / "sheet.png"
    flags = ["--task=images", f"--data.path={pictures}", "--data.size=8"]
    data_command.main(["describe", *flags])
    assert "images of 8 x 8" in capsys.readouterr().out
    data_command.main(["sample", *flags, "--count=4", f"--out={sheet}"])
    with Image.open(sheet) as drawn:
        assert drawn.mode == "RGB"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"data": {"size": 6}},
            r"patch: expected a divisor .*\(4 in the last",
        ),
        ({"model": {"stages": "2"}, "data": {"size": 7}}, r"patch: expected a divisor"),
        ({"model": {"stages": "1,2"}}, r"num_layers: expected 3, the blocks of stages"),
        ({"data": {"path": "/dev/null/x"}}, "which does not exist"),
        ({"train": {"length_warmup": "2:0.5"}}, "length_warmup: expected none for im"),
        ({"data": {"packing": True}}, r"--data\.packing: expected False"),
    ],
)
def test_settings_that_do_not_fit(pictures, changes, problem):
    with pytest.raises(ValueError, match=problem):
        train.run(config(pictures).replace(**changes), quiet=True)


def test_sizes_by_default():
    data = get_preset("images").data
    assert (data.image_shape, data.reader_arguments["size"]) == ((8, 8), 8)
    folder = dataclasses.replace(data, path="pictures")
    assert (folder.image_shape, folder.reader_arguments["size"]) == ((32, 32), 32)
    assert get_preset("images", "official").max_length == 224 * 224


def test_mixtures_need_images():
    changes = {"train": {"mixup": 0.8}}
    with pytest.raises(ValueError, match=r"--train\.mixup: expected 0 for --task=text"):
        train.run(get_preset("text").replace(**changes), quiet=True)


def test_official_model_has_the_published_size_and_cost():
    official, task = get_preset("images", "official", "flow"), get_task("images")
    sizes = {"vocab_size": 256, "num_classes": 1_000, "max_length": 224 * 224}
    shapes = {"image_shape": (224, 224), "token_shape": (3,)}
    data: Any = SimpleNamespace(**sizes, **shapes)
    model = nnx.eval_shape(lambda: task.make_model(official, data, nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    assert sum(x.size for x in jax.tree.leaves(params)) == 43_311_304
    encoder = model.encoder
    lengths = [encoder.config.at(index).length for index in range(19)]
    assert [*dict.fromkeys(lengths)] == [3136, 784, 196, 49]

    def products(module: nnx.Module) -> int:
        """Of a module's dense layers, at one position each."""
        layers = (x for _, x in nnx.iter_modules(module) if isinstance(x, Dense))
        return sum(x.in_features * x.out_features for x in layers)

    total = lengths[0] * products(encoder.embed) + products(model.logits)
    total += sum(n * products(x) for n, x in zip(lengths, encoder.blocks, strict=True))
    for index, merge in encoder.merges.items():
        total += lengths[int(index)] * products(merge)
    # The paper counts 2^20 parameters as a million: 41; and 2^30 products as a GFLOP.
    assert round(total / 2**30, 1) == 6.3
