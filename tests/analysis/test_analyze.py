"""The command line: pages of real runs, and one clear line for what cannot work."""

import json
import struct
from typing import Any

import helpers
import numpy as np
import pytest

from lra_jax import analyze
from lra_jax.analysis.bert_weights import load_bert

SMALL = ["--layers=1", "--length=8", "--examples=1", "--draws=1"]


def fails(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        analyze.main(args)
    return stop.value.code, capsys.readouterr().err


def test_rank_collapse_makes_a_page(tmp_path, capsys, small_networks):
    out = tmp_path / "out"
    analyze.main(
        [
            "rank-collapse",
            f"--out={out}",
            "--network=albert",
            *SMALL,
            "--attention=softmax,linear",
        ]
    )
    assert str(out / "index.html") in capsys.readouterr().out
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "http" not in page
    assert "](rank-collapse.png)" in (out / "index.md").read_text()
    stored = json.loads((out / "rank-collapse.json").read_text())
    assert len(stored["data"]["ours"]["albert"]["transformer"]["mean"]) == 2
    assert stored["command"].startswith("python -m lra_jax.analyze")
    stored = json.loads((out / "rank-collapse-mechanisms.json").read_text())
    assert set(stored["data"]) == {"softmax", "linear"}


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["rank-collapse", "--netwrk=bert"], ["--netwrk", "--network"]),
        (["rank-collapse", "--length=1"], ["--length: expected at least 2", "got 1"]),
        (
            ["rank-collapse", "--weights=/nowhere"],
            ["--weights: expected a safetensors file, got /nowhere: No such file"],
        ),
        (
            ["rank-collapse", "--weights=/a", "--workdir=/b"],
            ["--weights: expected nothing with --workdir"],
        ),
        *(
            (
                ["rank-collapse", f"--{source}=/a", flag],
                [f"{flag.partition('=')[0]}: expected nothing with --{source}"],
            )
            for source, flag in (
                *(("workdir", "--network=albert"), ("workdir", "--length=64")),
                *(("workdir", "--seed=1"), ("weights", "--attention=flow")),
            )
        ),
        (
            ["spectrum", "--checkpoint=last"],
            ["--checkpoint: expected nothing without --workdir, got 'last'"],
        ),
        (
            ["spectrum", "--workdir=/a", "--attention=flow"],
            ["--attention: expected nothing with --workdir, got 'flow'"],
        ),
    ],
)
def test_one_line_for_what_cannot_work(args, parts, tmp_path, capsys, small_networks):
    if args[0] == "rank-collapse":
        args = [*args, f"--out={tmp_path / 'out'}"]
    code, error = fails(capsys, *args)
    helpers.assert_one_error(code, error, 2, *parts)


def test_what_is_stopped_leaves_no_empty_folder(tmp_path, monkeypatch):
    def stopped(line: str) -> None:
        assert (tmp_path / "new" / "out").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(analyze.progress, "say", stopped)
    settings = analyze.Spectrum(out=str(tmp_path / "new" / "out"))
    with pytest.raises(KeyboardInterrupt):
        analyze.run(settings)
    assert not (tmp_path / "new").exists()


def test_an_empty_out_is_no_folder(capsys):
    code, error = fails(capsys, "rank-collapse", "--out=")
    helpers.assert_one_error(code, error, 2, "--out: expected a folder, got ''")


def test_out_that_is_a_file(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    code, error = fails(capsys, "rank-collapse", f"--out={tmp_path / 'out'}")
    helpers.assert_one_error(code, error, 2, "--out", "can be written")


def write_safetensors(file, arrays):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        kind = {"float32": "F32", "int64": "I64"}[array.dtype.name]
        end = len(data) + array.nbytes
        offsets = [len(data), end]
        header[name] = {
            "dtype": kind,
            "shape": array.shape,
            "data_offsets": offsets,
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def bert_arrays(width=128, mlp=8, layers=1):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    found = {
        "embeddings.word_embeddings.weight": draw(20, width),
        "embeddings.position_embeddings.weight": draw(16, width),
        "embeddings.token_type_embeddings.weight": draw(2, width),
        "embeddings.LayerNorm.gamma": draw(width),
        "embeddings.LayerNorm.beta": draw(width),
    }
    for layer in range(layers):
        sizes = {
            "attention.self.query": (width, width),
            "attention.self.key": (width, width),
            "attention.self.value": (width, width),
            "attention.output.dense": (width, width),
            "intermediate.dense": (mlp, width),
            "output.dense": (width, mlp),
        }
        for name, size in sizes.items():
            found[f"encoder.layer.{layer}.{name}.weight"] = draw(*size)
            found[f"encoder.layer.{layer}.{name}.bias"] = draw(size[0])
        for name in ("attention.output", "output"):
            found[f"encoder.layer.{layer}.{name}.LayerNorm.weight"] = draw(width)
            found[f"encoder.layer.{layer}.{name}.LayerNorm.bias"] = draw(width)
    return {f"bert.{name}": array for name, array in found.items()}


def test_bert_weights_from_a_file(tmp_path):
    file = tmp_path / "model.safetensors"
    arrays = bert_arrays(layers=2)
    places = np.arange(16, dtype=np.int64)[None]
    write_safetensors(file, arrays | {"bert.embeddings.position_ids": places})
    network, shape = load_bert(file)
    assert (shape.num_layers, shape.num_heads, shape.mlp_dim) == (2, 2, 8)
    assert (shape.vocab_size, shape.max_length) == (20, 16)
    block: Any = network.blocks[1]
    for ours, theirs in (
        (block.attention.out.kernel, "attention.output.dense.weight"),
        (block.inner.kernel, "intermediate.dense.weight"),
        (block.mlp_norm.bias, "output.LayerNorm.bias"),
    ):
        expected = arrays[f"bert.encoder.layer.1.{theirs}"].T
        np.testing.assert_array_equal(ours[...], expected)
    np.testing.assert_array_equal(
        network.norm.scale[...], arrays["bert.embeddings.LayerNorm.gamma"]
    )


def test_the_config_beside_weights_has_their_heads(tmp_path):
    """MiniLM has heads of 32 columns; without a config they would be 64 wide."""
    file = tmp_path / "model.safetensors"
    write_safetensors(file, bert_arrays(width=128))
    config = {
        **{"model_type": "bert", "vocab_size": 20, "max_position_embeddings": 16},
        **{"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 8},
        **{"num_attention_heads": 4, "hidden_act": "gelu_new"},
    }
    beside = tmp_path / "config.json"
    beside.write_text(json.dumps(config))
    network, shape = load_bert(file)
    assert (shape.num_heads, shape.gelu) == (4, "tanh")
    attention: Any = network.blocks[0].attention
    assert attention.head_dim == 32
    for change, part in (
        ({"hidden_act": "relu"}, r"hidden_act.*'relu'"),
        ({"num_attention_heads": 3}, "num_attention_heads that divide 128"),
    ):
        beside.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=part):
            load_bert(file)
    beside.unlink()
    write_safetensors(file, bert_arrays(width=72))
    with pytest.raises(ValueError, match=r"config\.json.*a width of 72"):
        load_bert(file)


def test_rank_collapse_of_weights(tmp_path):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, bert_arrays())
    out = tmp_path / "out"
    settings = analyze.RankCollapse(
        out=str(out), weights=str(file), length=16, examples=1
    )
    analyze.run(settings)
    stored = json.loads((out / "rank-collapse-bert.json").read_text())
    (curves,) = [stored["data"]["ours"]]
    assert len(curves["attention + skip"]["mean"]) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-4],
        lambda data: b"PK\3\4" + data,
        lambda data: b"",
        lambda data: data[:8] + b"[" + data[9:],
    ],
)
def test_a_file_that_is_no_safetensors(spoil, tmp_path):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, bert_arrays())
    file.write_bytes(spoil(file.read_bytes()))
    wanted = r"^--weights: expected a safetensors file, got .*model\.safetensors: "
    with pytest.raises(ValueError, match=wanted):
        load_bert(file)


def test_weights_of_another_model(tmp_path):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"wte.weight": np.ones((3, 2), np.float32)})
    with pytest.raises(ValueError, match=r"expected the weights of a BERT.*wte"):
        load_bert(file)
    arrays = bert_arrays()
    del arrays["bert.encoder.layer.0.output.dense.bias"]
    write_safetensors(file, arrays)
    with pytest.raises(ValueError, match=r"output\.dense\.bias"):
        load_bert(file)
