"""Language models from text to text: trained, scored, saved, and asked to go on."""

import json
import math
import random
from pathlib import Path

import helpers
import numpy as np
import pytest
from flax import nnx

from lra_jax import evaluate, generate, train
from lra_jax.configs import Config, get_preset
from lra_jax.data import __main__ as data_command
from lra_jax.data.language.prepare import prepare
from lra_jax.models import CausalLM, MaskedLM, save
from lra_jax.tasks.language import hidden_token_scores, next_token_scores
from lra_jax.vocabularies import Bytes, Words

MODEL = helpers.MODEL | {"num_heads": 2}
TRAIN = {
    "steps": 30,
    "warmup": 3,
    "batch_size": 8,
    "eval_batch_size": 8,
    "eval_every": 15,
    "log_every": 5,
    "learning_rate": 2e-2,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Files of lines that all look alike."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for index in range(6):
        lines = [f"x = f({draw.choice('abc')})\n" for _ in range(40)]
        (folder / f"{index}.py").write_text("".join(lines))
    return folder


def tiny(texts: Path, workdir: Path) -> Config:
    data = {"path": str(texts), "max_length": 32}
    return get_preset("lm").replace(
        workdir=str(workdir), train=TRAIN, model=MODEL, data=data
    )


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory) -> tuple[Path, dict]:
    workdir = tmp_path_factory.mktemp("lm") / "run"
    return workdir, train.run(tiny(texts, workdir), quiet=True)


def test_a_run_goes_on_in_its_text(finished, texts):
    """To the same bits as the run that nothing stopped."""
    result = helpers.resume(tiny(texts, finished[0]), 15).run().to_dict()
    for name in ("test_bits_per_byte_last", "test_bits_per_byte_sliding"):
        assert result[name] == finished[1][name]


def test_a_run_learns_and_says_how_well(finished):
    workdir, result = finished
    # 8 bits would be a guess; a line has one letter of three to guess.
    assert result["test_bits_per_byte_best"] < 4
    assert result["test_bits_per_byte_sliding"] > 0
    assert result["data"].endswith("6 files") and len(result["data_fingerprint"]) == 32
    loss, perplexity = result["test_loss_best"], result["test_perplexity_best"]
    assert perplexity == pytest.approx(math.exp(loss))
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    scored = [x for x in map(json.loads, lines) if x["split"] == "valid"]
    assert [x["step"] for x in scored] == [15, 30]
    assert all("bits_per_byte" in x for x in scored)


def test_evaluate_gives_the_same_scores(finished, capsys):
    workdir, result = finished
    evaluate.main([f"--workdir={workdir}"])
    shown = f"bits_per_byte {result['test_bits_per_byte_best']:.4f}"
    assert shown in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        evaluate.main([f"--workdir={workdir}", "--predictions=p.jsonl"])
    error = capsys.readouterr().err
    helpers.assert_one_error(stop.value.code, error, 2, "--predictions", "--task=lm")


def test_bits_per_byte_count_the_ends_of_documents(finished, texts):
    _, result = finished
    dataset = prepare(path=str(texts), max_length=32)
    size = dataset.num_bytes["test"]
    documents = dataset.num_targets("test") - size
    assert documents == len(dataset._streams["test"].starts) - 1
    expected = result["test_loss_best"] * (size + documents) / math.log(2) / size
    assert result["test_bits_per_byte_best"] == pytest.approx(expected)


@pytest.mark.parametrize("tokenizer", ["words", "bpe"])
def test_words_have_no_bits_per_byte(tokenizer, texts):
    """Unknown ones and white space would cost nothing."""
    settings = {"tokenizer": tokenizer, "vocab_size": 300, "max_length": 32}
    dataset = prepare(path=str(texts), **settings)
    scores = next_token_scores(dataset, "test", 1.0, None)
    assert ("bits_per_byte" in scores) == (tokenizer == "bpe")


def test_a_loss_may_be_too_large_for_a_perplexity(texts):
    """It is then left out: JSON has no infinity."""
    dataset = prepare(path=str(texts), max_length=32)
    scores = next_token_scores(dataset, "valid", 1000.0, None)
    assert list(scores) == ["bits_per_byte"]
    assert 1000 < scores["bits_per_byte"] < 2000
    assert hidden_token_scores(dataset, "valid", 1000.0, None) == {}


def test_a_run_continues_texts(finished, tmp_path, capsys):
    workdir, _ = finished
    generate.main([f"--workdir={workdir}", "--prompt=x = ", "--tokens=20"])
    first = capsys.readouterr().out
    assert first.startswith("x = ") and len(first) > 8
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x = f(\nx\n")
    flags = ["--tokens=5", "--temperature=0", f"--prompts={prompts}"]
    generate.main([f"--workdir={workdir}", *flags])
    out = capsys.readouterr().out
    assert out.startswith("x = f(") and "\nx" in out


def test_a_text_that_has_ended_says_no_more():
    """While another goes on."""
    words = Words.of([b"a b"])
    a, b = words.encode(b"a b")[:2]
    steps = [np.array(step) for step in ([a, b], [words.end, a], [words.end, b])]
    pieces = generate._decode(words, iter(steps), 2, words.end)
    first, second = map("".join, zip(*pieces, strict=True))
    assert (first.strip(" "), second.split()) == ("a", ["b", "a", "b"])
    # But the end of words is that of every line, and text goes on after it.
    assert generate._end(words) is None
    pieces = generate._decode(words, iter(steps), 2, None)
    assert next(iter(map("".join, zip(*pieces, strict=True)))) == "a \n\n"


def test_prompts_are_the_lines_of_their_file(finished, tmp_path, capsys):
    """Whatever other breaks they hold, and without a byte-order mark."""
    workdir, _ = finished
    prompts, out = tmp_path / "prompts.txt", []
    flags = [f"--workdir={workdir}", "--tokens=5", "--temperature=0"]
    for text in ("\ufeffx = f(\nx\x0cx\n", "x = f(\r\nx\x0cx"):
        prompts.write_bytes(text.encode())
        generate.main([*flags, f"--prompts={prompts}"])
        out.append(capsys.readouterr().out)
    assert out[0] == out[1]
    assert out[0].startswith("x = f(") and "\nx\x0cx" in out[0]


@pytest.mark.parametrize(
    ("prompt", "shown"), [("b", "b a a a "), ("b ", "b a a a "), ("", "a a a ")]
)
def test_words_go_on_after_a_blank(prompt, shown, tmp_path, capsys):
    words, file = Words.of([b"a b"]), tmp_path / "m.safetensors"
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 32}
    model = CausalLM(words.size, mechanism="linear", **sizes, rngs=nnx.Rngs(0))
    model.bias[...] = model.bias[...].at[words.encode(b"a")].set(100.0)
    save(file, model, raw=words.raw)
    generate.main([f"--workdir={file}", f"--prompt={prompt}", "--tokens=3"])
    assert capsys.readouterr() == (f"{shown}\n", "")
    generate.main([f"--workdir={file}", "--prompt=b zebra", "--tokens=1"])
    said = "warning: --prompt: 'zebra' not in the vocabulary, read as unknown\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("prompt", "read"), [("", []), ("b", [1]), ("b\n", [1, 0]), ("b\n\n", [1, 0, 0])]
)
def test_a_prompt_of_words_is_read_to_its_end(prompt, read):
    """Unlike a document, it need not end with its last line."""
    words = Words([Words.END, "b"])
    assert generate._encode(words, prompt).tolist() == [words.end, *read]


def test_the_data_are_shown_as_text(texts, capsys):
    flags = ["--task=lm", f"--data.path={texts}", "--data.max_length=32"]
    data_command.main(["describe", *flags])
    assert "rows of 32" in capsys.readouterr().out
    data_command.main(["sample", *flags, "--count=2"])
    assert "x = f(" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--prompt=" + "x" * 60], ["--prompt", "max_length=64", "61 tokens"]),
        (["--tokens=0"], ["--tokens", "a positive int, got 0"]),
        (["--prompts=nowhere.txt"], ["--prompts", "nowhere.txt"]),
    ],
)
def test_a_prompt_that_does_not_fit_is_one_line(finished, flags, parts, capsys):
    workdir, _ = finished
    with pytest.raises(SystemExit) as stop:
        generate.main([f"--workdir={workdir}", "--tokens=10", *flags])
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, *parts)
    assert out == ""


def test_a_model_without_a_stream_is_one_line(tmp_path, capsys):
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 32}
    model = CausalLM(258, mechanism="local", **sizes, rngs=nnx.Rngs(0))
    save(tmp_path / "m.safetensors", model, raw=Bytes().raw)
    with pytest.raises(SystemExit) as stop:
        generate.main([f"--workdir={tmp_path / 'm.safetensors'}", "--tokens=2"])
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, "--workdir", "stream", "'local'")
    assert out == ""


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--data.tokenizer=words"], ["--data.path", "UTF-8", "byte 255 at 4"]),
        (["--data.tokenizer=bpe", "--data.vocab_size=200"], ["--data.vocab_size"]),
    ],
)
def test_a_text_that_a_tokenizer_cannot_read(flags, parts, tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(b"Gr\xc3\xbc\xff" + b"\xff a b" * 5_000)
    args = ["--task=lm", f"--data.path={tmp_path / 'text.txt'}"]
    with pytest.raises(SystemExit) as stop:
        train.main([*args, f"--workdir={tmp_path / 'run'}", *flags])
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, *parts)


def test_code_that_is_not_allowed_names_the_flag(tmp_path, capsys):
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 32}
    spec = "helpers:values_only"
    model = MaskedLM(258, mechanism=spec, **sizes, rngs=nnx.Rngs(0))
    save(tmp_path / "m.safetensors", model, raw=Bytes().raw)
    with pytest.raises(SystemExit) as stop:
        generate.main([f"--workdir={tmp_path / 'm.safetensors'}", "--tokens=2"])
    expected = f"--allow-code: expected True to import {spec!r}"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, expected)
