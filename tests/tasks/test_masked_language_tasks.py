"""Masked language models: hidden tokens, and a classifier that begins from one."""

import json
import random
from pathlib import Path
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import originals
import pytest
from flax import nnx

from lra_jax import evaluate, models, train, vocabularies
from lra_jax.configs import ModelConfig, get_preset
from lra_jax.data import __main__ as data_command
from lra_jax.data.language.labelled import prepare
from lra_jax.models.raw import reader
from lra_jax.tasks import get_task, language
from lra_jax.tasks.base import encoder_config
from lra_jax.tasks.language import hidden_token_loss, hide

MODEL = helpers.MODEL | {"num_heads": 2, "max_length": 32}
TRAIN = {
    "steps": 8,
    "warmup": 2,
    "batch_size": 8,
    "eval_batch_size": 8,
    "eval_every": 8,
    "log_every": 4,
}
VOCABULARY = 20


def test_fifteen_percent_are_asked_for_and_most_are_masked():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY - 1, (50, 200)).astype(np.int32)
    lengths = np.array([200] * 25 + [40] * 25)
    real = np.arange(200)[None] < lengths[:, None]
    run = helpers.quick_jit(hide, static_argnums=3)
    hidden, places, labels = map(
        np.asarray, run(jax.random.key(1), tokens, real, VOCABULARY)
    )
    asked = labels >= 0
    np.testing.assert_array_equal(asked.sum(1), [30] * 25 + [6] * 25)
    rows = np.arange(50)[:, None]
    assert real[np.broadcast_to(rows, places.shape)[asked], places[asked]].all()
    np.testing.assert_array_equal(labels[asked], tokens[rows, places][asked])
    there = hidden[rows, places][asked]
    masked = (there == VOCABULARY - 1).mean()
    kept = (there == labels[asked]).mean()
    assert abs(masked - 0.8) < 0.05 and abs(kept - 0.1) < 0.05
    untouched = np.ones(tokens.shape, bool)
    untouched[np.broadcast_to(rows, places.shape)[asked], places[asked]] = False
    np.testing.assert_array_equal(hidden[untouched], tokens[untouched])
    other = run(jax.random.key(2), tokens, real, VOCABULARY)[1]
    assert (np.asarray(other) != places).any()


def test_the_score_of_a_text_does_not_depend_on_its_batch():
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8}
    model = models.MaskedLM(VOCABULARY, mechanism="linear", **sizes, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 1, (4, 64))

    def loss(rows: np.ndarray) -> dict[str, jax.Array]:
        ids = jnp.ones(rows.shape, jnp.int32)
        batch = {"tokens": jnp.asarray(rows), "segment_ids": ids}
        return helpers.call_model(hidden_token_loss, model, batch)

    whole, parts = loss(tokens), map(loss, tokens[:, None])
    sums = jax.tree.map(lambda *x: sum(x), *parts)
    chex.assert_trees_all_close(whole, sums, rtol=1e-5)


def test_a_masked_model_looks_both_ways():
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 16}
    model = models.MaskedLM(VOCABULARY, mechanism="linear", **sizes, rngs=nnx.Rngs(0))
    tokens = jnp.arange(8)[None]
    change = helpers.call_model(type(model).__call__, model, tokens)
    later = helpers.call_model(type(model).__call__, model, tokens.at[0, 7].set(9))
    assert np.abs(change - later)[0, 0].max() > 1e-6
    with pytest.raises(ValueError, match=r"^is_causal: expected False"):
        models.MaskedLM(VOCABULARY, is_causal=True, **sizes, rngs=nnx.Rngs(0))


def test_a_large_vocabulary_has_the_same_loss(monkeypatch):
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 16}
    model = models.MaskedLM(VOCABULARY, mechanism="linear", **sizes, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 5, 8)), jnp.float32)
    labels = jnp.asarray(rng.integers(-1, VOCABULARY, (3, 5)))
    batch = {"weights": jnp.array([1.0, 1.0, 0.0])}

    def sums(x):
        results = language._sums(model, x, labels, batch, label_smoothing=0.1)
        return results["loss"], results

    results = []
    for large in (language._LARGE, 10):
        monkeypatch.setattr(language, "_LARGE", large)
        run = helpers.quick_jit(jax.value_and_grad(sums, has_aux=True))
        results.append(run(x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Texts whose label is their letter."""
    draw = random.Random(0)
    lines = ["label\tnumber\ttext"]
    for number in range(60):
        letter = draw.choice("ab")
        lines.append(f"{letter}\t{number}\t{letter * draw.randint(3, 20)}")
    file = tmp_path_factory.mktemp("table") / "letters.tsv"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("mlm")
    (folder / "text.txt").write_text("some letters, a few words\n" * 60)
    config = get_preset("mlm").replace(
        attention="linear",
        workdir=str(folder / "run"),
        train=TRAIN,
        model=MODEL,
        data={"path": str(folder / "text.txt"), "max_length": 32},
    )
    return folder / "run", train.run(config, quiet=True)


def _finetuning(table: Path, checkpoint: Path, workdir: Path):
    return get_preset("finetune").replace(
        attention="linear",
        workdir=str(workdir),
        train=TRAIN,
        model=MODEL,
        data={"path": str(table), "checkpoint": str(checkpoint), "max_length": 32},
    )


def test_a_classifier_begins_with_the_checkpoint(pretrained, table, tmp_path):
    run, result = pretrained
    assert result["test_perplexity_best"] > 1
    assert not any("sliding" in name for name in result)
    config = _finetuning(table, run, tmp_path / "run")
    task = get_task("finetune")
    model = task.make_model(config, task.prepare(config.data), nnx.Rngs(0))
    saved = models.load(run)
    loaded = nnx.state(saved.model.encoder, nnx.Param)
    arrays = nnx.state(model.encoder, nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, arrays, loaded)
    tuned = train.run(config, quiet=True)
    assert tuned["test_examples"] == 6
    assert tuned["shown_before"] == TRAIN["steps"] * TRAIN["batch_size"]


def test_a_checkpoint_that_was_trained_again(pretrained, table, tmp_path):
    """A run that started from the earlier one is not taken for one from this."""
    start = tmp_path / "m.safetensors"
    saved = models.load(pretrained[0])
    models.save(start, saved.model, raw=saved.raw)
    config = _finetuning(table, start, tmp_path / "run")
    result = train.run(config, quiet=True)
    assert train.run(config, quiet=True) == result
    scale = saved.model.encoder.norm.scale
    scale[...] = scale[...] + 1
    models.save(start, saved.model, raw=saved.raw)
    expected = (
        r"^--workdir: expected a run that started from the model of digest \w{64},"
    )
    with pytest.raises(ValueError, match=expected):
        train.run(config, quiet=True)


def test_a_checkpoint_can_be_pretrained_further(pretrained, table, tmp_path):
    """On the texts of the task; the vector of hidden tokens is added to its arrays."""
    config = _finetuning(table, pretrained[0], tmp_path).replace(pretrain={"steps": 2})
    task = get_task("finetune")
    model = task.make_model(config, task.prepare(config.data), nnx.Rngs(0))
    assert model.encoder.hidden is not None
    saved = models.load(pretrained[0]).model.encoder
    np.testing.assert_array_equal(model.encoder.positions, saved.positions)


def test_tables_are_split_and_read(table):
    dataset = prepare(path=str(table), max_length=8)
    sizes = [dataset.num_examples(split) for split in dataset.splits]
    assert sizes == [47, 7, 6] and dataset.num_classes == 2
    for split in dataset.splits:
        rows = dataset.source(split).__getitems__(list(range(5)))
        for row, label in zip(rows, dataset.labels(split), strict=False):
            assert set(row["tokens"].tolist()) == {ord("ab"[label])}
            assert len(row["tokens"]) <= 8


def test_labelled_texts_are_shown_as_text(table, capsys):
    flags = ["--task=finetune", f"--data.path={table}", "--split=test", "--count=6"]
    data_command.main(["sample", *flags])
    rows = [x.split(": ") for x in capsys.readouterr().out.splitlines() if "tok" in x]
    assert len(rows) == 6
    for name, text in rows:
        assert name == f"tokens ({len(text)})" and set(text) in ({"a"}, {"b"})


@pytest.mark.parametrize("kind", ["words", "bpe"])
@pytest.mark.parametrize("reviews", [False, True])
def test_texts_are_read_in_the_vocabulary_of_the_checkpoint(kind, reviews, tmp_path):
    texts = ["a good film, very good", "a bad film", "good", "not as bad as that"]
    vocabulary = vocabularies.make(kind, 300, [text.encode() for text in texts])
    source = tmp_path / "texts.tsv"
    lines = [f"{text}\t{'bad' in text}" for text in texts * 5]
    source.write_text("\n".join(["text\tlabel", *lines]))
    if reviews:
        source = write_reviews(tmp_path / "aclImdb", *texts[:2])
    checkpoint = tmp_path / "m.safetensors"
    config = _finetuning(source, checkpoint, tmp_path / "run")
    config = config.replace(data={"dir": str(tmp_path / "data")})
    encoder = encoder_config(config)
    model = models.MaskedLM(vocabulary.size, config=encoder, rngs=nnx.Rngs(0))
    models.save(checkpoint, model, raw=vocabulary.raw)
    task = get_task("finetune")
    dataset: Any = task.prepare(config.data)
    read = reader(dataset.raw, 32)
    for split in dataset.splits:
        rows = dataset.source(split).__getitems__(list(range(2)))
        for row, label in zip(rows, dataset.labels(split), strict=False):
            text = vocabulary.decode(row["tokens"]).decode().strip()
            assert text in texts
            known = "0" if "bad" in text else "1"
            known = known if reviews else str("bad" in text)
            names = dataset.classes or ["0", "1"]
            assert names[label] == known
            assert dataset.decode(row["tokens"]).strip() == text
            # A saved model reads raw texts in the same way.
            np.testing.assert_array_equal(read("one", text), row["tokens"])
    assert dataset.raw["vocabulary"] == vocabulary.raw
    made = task.make_model(config, dataset, nnx.Rngs(0))
    assert made.encoder.vocab_size == vocabulary.size


def write_reviews(folder: Path, *texts: str) -> Path:
    """Twenty positive and negative reviews in each split."""
    for split in ("train", "valid", "test"):
        for label, text in zip(("pos", "neg"), texts, strict=True):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(20):
                (place / f"{number}_1.txt").write_text(text, encoding="utf-8")
    return folder


def test_a_review_may_be_cut_within_a_character(tmp_path):
    """512 bytes are read for 32 tokens: the last one is the first of two."""
    reviews = write_reviews(tmp_path / "aclImdb", *["a" + "\u00e9" * 300] * 2)
    dataset: Any = prepare(
        str(tmp_path / "data"),
        path=str(reviews),
        max_length=32,
        vocabulary=vocabularies.Words.of([b"a"]),
    )
    assert set(dataset.lengths("test").tolist()) == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "softmax"}, "--attention: expected linear, of the checkpoint"),
        ({"model": {"mlp_dim": 8}}, "--model.mlp_dim: expected 16, of the chec"),
        (
            {"model": {"attention_options": "eps=0.1"}},
            "--model.attention_options: expected none",
        ),
        ({"model": {"pooling": "cls"}}, "--model.pooling: expected that of a"),
        ({"data": {"checkpoint": "nowhere"}}, "--data.checkpoint: expected a run"),
    ],
)
def test_a_checkpoint_that_does_not_fit(changes, message, pretrained, table, tmp_path):
    config = _finetuning(table, pretrained[0], tmp_path).replace(**changes)
    task = get_task("finetune")
    with pytest.raises(ValueError, match=f"^{message}"):
        task.make_model(config, task.prepare(config.data), nnx.Rngs(0))


def test_options_are_those_of_the_checkpoint_in_any_order():
    same = [ModelConfig(attention_options=x) for x in ("a=1,b=2", {"b": 2, "a": 1})]
    assert len({language._as_flag(x, "attention_options") for x in same}) == 1


def test_integers_are_not_read_in_the_vocabulary_of_a_checkpoint(tmp_path):
    folder = originals.token_files(tmp_path / "t", {".src": [[1], [2]]}, [0, 1])
    words = vocabularies.Words.of([b"a"])
    expected = "^--data.path: expected texts, .* got files of integers in "
    with pytest.raises(ValueError, match=expected):
        prepare(str(tmp_path), path=str(folder), vocabulary=words)


@pytest.mark.parametrize("kind", [models.SequenceClassifier, models.CausalLM])
def test_a_checkpoint_of_another_kind(kind, table, tmp_path):
    """Before the texts are read in its vocabulary."""
    file = tmp_path / "m.safetensors"
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 32}
    classes = (2,) if kind is models.SequenceClassifier else ()
    models.save(
        file, kind(257, *classes, mechanism="linear", **sizes, rngs=nnx.Rngs(0))
    )
    config = _finetuning(table, file, tmp_path / "run")
    expected = (
        f"^--data.checkpoint: expected .* of --task=mlm, got one of a {kind.__name__}"
    )
    with pytest.raises(ValueError, match=expected):
        get_task("finetune").prepare(config.data)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_ends_of_lines_end_a_row(encoding, end, tmp_path):
    """A text may hold other breaks, as reviews do; a mark may begin the file."""
    texts = ["one\x85more", "two\u2028more", "three\x0cmore", "four\rmore"]
    lines = ["label\ttext", *(f"{index % 2}\t{x}" for index, x in enumerate(texts))]
    file = tmp_path / "t.tsv"
    file.write_bytes((end.join(lines) + end).encode(encoding))
    dataset = prepare(path=str(file), max_length=32)
    results = [x["tokens"] for split in dataset.splits for x in dataset.source(split)]
    assert {x.tobytes() for x in map(np.uint8, results)} == {x.encode() for x in texts}


def test_a_text_that_recurs_is_in_one_split(tmp_path):
    texts = [f"{number % 20}\tone" for number in range(40)]
    texts += [f"other {number}\ttwo" for number in range(20)]
    (tmp_path / "a.tsv").write_text("\n".join(["text\tlabel", *texts]))
    dataset = prepare(path=str(tmp_path / "a.tsv"), max_length=32)
    results = {
        split: {row["tokens"].tobytes() for row in dataset.source(split)}
        for split in dataset.splits
    }
    assert sum(map(len, results.values())) == 40
    assert sum(map(dataset.num_examples, dataset.splits)) == 60


@pytest.mark.parametrize("names", [["t"], ["train", "test"]])
def test_a_rare_label_is_trained_on_whatever_the_seed(names, tmp_path):
    lines = [f"text {number}\t{number % 2}" for number in range(16)]
    table = "\n".join(["text\tlabel", *lines, "the only one\trare", ""])
    for name in names:
        (tmp_path / f"{name}.tsv").write_text(table)
    path = tmp_path / "t.tsv" if names == ["t"] else tmp_path
    for seed in range(20):
        dataset: Any = prepare(path=str(path), seed=seed, max_length=32)
        assert dataset.classes == ["0", "1", "rare"]
        assert dataset.num_examples("valid") == 2
        assert sum(dataset.labels("train") == 2) == 1


def test_texts_that_differ_in_their_label_each_cannot_be_held_out(tmp_path):
    (tmp_path / "t.tsv").write_text("text\tlabel\nx\t0\ny\t1\nz\t2\nz\t2\n")
    expected = (
        "^--data.path: expected enough texts of each label to hold 2 or more out, got "
        "different texts: 3, labels: 3"
    )
    with pytest.raises(ValueError, match=expected):
        prepare(path=str(tmp_path / "t.tsv"))


def test_a_validation_split_that_is_the_test_split(table, tmp_path, capsys):
    lines = table.read_text()
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.tsv").write_text(lines)
    args = ["--task=finetune", f"--data.path={tmp_path}", f"--workdir={tmp_path / 'r'}"]
    with pytest.raises(SystemExit) as stop:
        train.main(args)
    expected = "--data.path: expected a validation split other than the test split"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, expected)


def test_blanks_around_a_label_do_not_make_a_class(tmp_path):
    file = tmp_path / "t.tsv"
    file.write_text("label\ttext\nno\ta\nno \tb\n yes\tc\nyes\td\n")
    dataset: Any = prepare(path=str(file), max_length=32)
    assert dataset.classes == ["no", "yes"]


def test_labels_keep_their_words(table, tmp_path):
    """In what is shown, in predictions, in the model's file, and in the fingerprint."""
    text = table.read_text().replace("\na\t", "\nno\t").replace("\nb\t", "\nyes\t")
    file = tmp_path / "t.tsv"
    file.write_text(text)
    config = _finetuning(file, tmp_path, tmp_path / "run")
    config = config.replace(data={"checkpoint": None})
    train.run(config, quiet=True)
    dataset = get_task("finetune").prepare(config.data)
    assert dataset.answer("test", 0) in ("label no", "label yes")
    out = tmp_path / "p.jsonl"
    evaluate.run(evaluate.EvaluateConfig(str(tmp_path / "run"), predictions=str(out)))
    shown = [json.loads(line) for line in out.read_text().splitlines()]
    labels = dataset.labels("test").tolist()
    assert [line["label"] for line in shown] == [["no", "yes"][x] for x in labels]
    assert {line["prediction"] for line in shown} <= {"no", "yes"}
    assert models.load(tmp_path / "run").about["classes"] == ["no", "yes"]
    file.write_text(text.replace("\nyes\t", "\nsometimes\t"))
    assert get_task("finetune").prepare(config.data).fingerprint != dataset.fingerprint


TABLE = "text\tlabel\nx\t0\ny\t1\nz\t1\n"


def write_tables(folder: Path, **tables: str | bytes) -> Path:
    for name, text in tables.items():
        content = text if isinstance(text, bytes) else text.encode()
        (folder / f"{name}.tsv").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("names", "path", "got"),
    [
        (["t.txt"], "t.txt", "a .tsv or .csv table, a folder"),
        (["t.tsv.gz"], "t.tsv.gz", "a .tsv or .csv table, a folder"),
        (["train.tsv"], "", "a .tsv or .csv table, a folder"),
        (["test.csv"], "", "a .tsv or .csv table, a folder"),
        (["train.csv", "test.csv", "train.tsv"], "", ".*no other table.*train.tsv"),
        # The error is not about the IMDb reviews alone.
        (["reviews.tsv"], "", ".*, got .*, with reviews.tsv"),
        (["a.txt"], "", ".*, got .*, with none"),
        (["train.tsv", "test.tsv", "dev.tsv"], "", ".*no other table.*dev.tsv"),
    ],
)
def test_files_of_another_kind(names, path, got, tmp_path):
    for name in names:
        (tmp_path / name).write_text(TABLE)
    with pytest.raises(ValueError, match=f"^--data.path: expected {got}"):
        prepare(path=str(tmp_path / path))


def test_quotation_marks_are_said_to_be_kept(tmp_path, caplog):
    file = tmp_path / "t.tsv"
    rows = [
        '"a ""b"" c"\t"0"',
        '"a" and "b"\t1',
        *(f"z{n}\t{n % 2}" for n in range(20)),
    ]
    file.write_text("\n".join(["text\tlabel", *rows]))
    prepare(path=str(file), seed=1)
    assert "2 cells are in quotation marks" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text\tlabel\nx\t0\nz\tnew\n", r"test\.tsv, line 3: label: .* got 'new'"),
        (b"text\tlabel\nx\t0\n\xffz\t1\n", r"UTF-8 text, got .*test\.tsv, line 3: "),
        ("text\tlabel\n", "texts after the first line, got none in .*test"),
    ],
)
def test_a_test_split_without_texts(text, message, tmp_path):
    write_tables(tmp_path, train=TABLE, test=text)
    with pytest.raises(ValueError, match=f"^--data.path: .*{message}"):
        prepare(path=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a first line with the columns text and label, got none"),
        ("text\tlabel\ttext\nx\t1\ty", "a first line"),
        ("text\tlabel\nx", "2 columns with text and label, got 'x' in line 2"),
        ("text\tlabel\nx\t1\ny\t \nz\t2", r"2 columns with .*, got 'y\\t ' in line 3"),
        ("text\tlabel\nx\t1\ny\t1\nz\t1\n", r"two classes or more, got \['1'\]"),
    ],
)
def test_what_is_no_table(text, message, tmp_path):
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(ValueError, match=f"^--data.path: expected {message}"):
        prepare(path=str(tmp_path / "t.tsv"))
