"""Own texts and token ids without code: tables, several labels each, and numbers."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import evaluate, models, train
from lra_jax.configs import Config, get_preset
from lra_jax.data import __main__ as data_command
from lra_jax.data import packing
from lra_jax.data.labels import _in_order
from lra_jax.data.language.labelled import prepare
from lra_jax.tasks import base, get_task

TRAIN = {**helpers.TRAIN, "steps": 8, "warmup": 2, "eval_every": 8}
TAGS = ("first", "second", "third")


def texts(count: int) -> list[str]:
    """Texts of the letters a, b and c, with a comma and a line end."""
    rng = np.random.default_rng(0)
    return ["".join(rng.choice([*'abc,"\n'], 12)) for _ in range(count)]


def tags(text: str) -> list[str]:
    """One for each of the letters that a text begins with; it may have none."""
    return [tag for tag, letter in zip(TAGS, "abc", strict=True) if letter in text[:3]]


def write(file: Path, rows: list[tuple[str, Any]]) -> Path:
    """A .csv table as a spreadsheet writes it."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([("text", "label"), *rows])
    return file


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    return write(tmp_path / "t.csv", [(x, "; ".join(tags(x))) for x in texts(60)])


def config(path: Path, folder: Path, **data: Any) -> Config:
    return get_preset("finetune").replace(
        attention="linear",
        workdir=str(folder / "run"),
        train=TRAIN | {"best_by": "accuracy"},
        model=helpers.MODEL | {"num_heads": 2},
        data={"path": str(path), "max_length": 16, **data},
    )


def predictions(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The scores of a run, and its answers to the test split."""
    file = folder / "p.jsonl"
    run = evaluate.EvaluateConfig(str(folder / "run"), predictions=str(file))
    means = evaluate.run(run)
    return means, [json.loads(line) for line in file.read_text().splitlines()]


def test_a_csv_table_is_read_as_spreadsheets_write_it(tmp_path: Path) -> None:
    rows = [(text, "yes" if "a" in text[:3] else "no") for text in texts(40)]
    dataset = prepare(path=str(write(tmp_path / "t.csv", rows)), max_length=32)
    assert dataset.classes == ["no", "yes"] and not dataset.several
    read = {
        np.uint8(row["tokens"]).tobytes().decode(): dataset.answer(split, index)
        for split in dataset.splits
        for index, row in enumerate(dataset.source(split))
    }
    assert read == {text: f"label {label}" for text, label in rows}
    for name in ("train", "test"):
        write(tmp_path / f"{name}.csv", rows)
    (tmp_path / "t.csv").unlink()
    assert prepare(path=str(tmp_path)).num_examples("test") == 40


def test_several_labels_each(tagged: Path, tmp_path: Path) -> None:
    """F1 and accuracy are means over the labels, as of the predictions."""
    one = config(tagged, tmp_path, labels="multi")
    result = train.run(one, quiet=True)
    dataset = get_task("finetune").prepare(one.data)
    assert dataset.classes == sorted(TAGS) and dataset.labels("test").shape == (6, 3)
    means, answers = predictions(tmp_path)
    marks = {
        name: np.array([[tag in x[name] for tag in sorted(TAGS)] for x in answers])
        for name in ("label", "prediction")
    }
    truth, guess = marks["label"], marks["prediction"]
    np.testing.assert_array_equal(truth, dataset.labels("test"))
    accuracy = (truth == guess).mean(0)
    f1 = 2 * (truth & guess).sum(0) / np.maximum(truth.sum(0) + guess.sum(0), 1)
    assert means["label_accuracy"] == pytest.approx(accuracy.mean())
    assert means["f1"] == pytest.approx(f1.mean())
    assert result["metric"] == "f1"
    assert result["test_f1_best"] == pytest.approx(f1.mean())
    assert result["test_accuracy_best"] == pytest.approx(100 * f1.mean())
    chances = np.array([x["probabilities"] for x in answers])
    np.testing.assert_array_equal(chances > 0.5, guess)
    saved = models.load(tmp_path / "run")
    rows = [np.uint8(row["tokens"]).tobytes() for row in dataset.source("test")]
    labels, probabilities = saved.predict(rows)
    np.testing.assert_array_equal(labels, guess)
    np.testing.assert_allclose(probabilities, chances, atol=1e-4)


def test_several_labels_are_shown(tagged: Path, capsys) -> None:
    flags = ["--task=finetune", f"--data.path={tagged}", "--data.labels=multi"]
    data_command.main(["describe", *flags])
    assert "labels first: " in capsys.readouterr().out
    data_command.main(["sample", *flags, "--count=2"])
    assert capsys.readouterr().out.startswith("label [")


def test_numbers_of_texts(tmp_path: Path) -> None:
    rows = [(text, 100 + 7 * text.count("a")) for text in texts(60)]
    one = config(write(tmp_path / "t.csv", rows), tmp_path, labels="numbers")
    result = train.run(one, quiet=True)
    means, answers = predictions(tmp_path)
    truth, guess = (np.array([x[n] for x in answers]) for n in ("label", "prediction"))
    assert {*truth.round(3).tolist()} <= {float(label) for _, label in rows}
    error = np.mean((truth - guess) ** 2)
    assert means["squared_error"] == pytest.approx(error, rel=1e-3)
    assert means["r2"] == pytest.approx(1 - error / truth.var(), rel=1e-3)
    assert result["metric"] == "r2"
    labels, _ = models.load(tmp_path / "run").predict(["abc", "aaa"])
    assert 50 < labels.mean() < 200


@pytest.mark.parametrize("kind", ["classes", "multi", "numbers"])
def test_arrays_of_token_ids(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in {"train": 40, "test": 10}.items():
        ids = rng.integers(0, 1000, (count, 12))
        has = np.stack([ids.max(1) > 900, ids.min(1) < 90], 1)
        labels = {"classes": has[:, 0].astype(int), "multi": has, "numbers": ids[:, 0]}
        arrays[f"{split}_values"], arrays[f"{split}_labels"] = ids, labels[kind]
        arrays[f"{split}_lengths"] = rng.integers(1, 13, count)
    arrays["train_values"][0, 0] = 1023
    arrays["train_lengths"][0] = 12
    if kind == "numbers":
        arrays |= {x: arrays[x] / 2 for x in ("train_labels", "test_labels")}
    np.savez(tmp_path / "a.npz", **arrays)
    one = config(tmp_path / "a.npz", tmp_path)
    dataset = get_task("finetune").prepare(one.data)
    assert dataset.vocab_size == 1024 and dataset.token_dtype == np.uint16
    assert [dataset.num_examples(x) for x in dataset.splits] == [36, 4, 10]
    assert (dataset.has_numbers, dataset.several) == (
        kind == "numbers",
        kind == "multi",
    )
    for row, ids, length in zip(
        dataset.source("test"),
        arrays["test_values"],
        arrays["test_lengths"],
        strict=True,
    ):
        np.testing.assert_array_equal(row["tokens"], ids[:length])
    if kind == "classes":
        train.run(one, quiet=True)
        read = models.load(tmp_path / "run").predict([[1, 2, 3], [1023]])
        assert read.probabilities.shape == (2, 2)


def test_packed_rows_have_the_same_loss() -> None:
    """Several labels of each of several examples; weights 0 do not count."""
    rng = np.random.default_rng(0)
    lengths = np.array([3, 2, 4, 1], np.int32)
    labels = rng.integers(0, 2, (4, 3)).astype(np.int32)
    batch = {"tokens": np.ones((4, 4), np.uint8), "lengths": lengths, "labels": labels}
    rows = packing.pack(batch, 5)
    assert rows["labels"].shape == (*rows["labels"].shape[:2], 3)
    there = rows["labels"][..., 0] >= 0
    assert sorted(map(tuple, rows["labels"][there])) == sorted(map(tuple, labels))

    class Constant:
        """Logits of 0.5, -1 and 2 for any example."""

        INPUTS = ("tokens", "lengths")

        def __call__(self, tokens, lengths, rngs=None, documents=0, **_):
            shape = (len(tokens), documents) if documents else (len(tokens),)
            return jnp.broadcast_to(jnp.array([0.5, -1, 2]), (*shape, 3))

    model: Any = Constant()
    plain, packed = (
        base.supervised_loss(model, batch),
        base.supervised_loss(model, rows),
    )
    for name, value in plain.items():
        np.testing.assert_allclose(packed[name], value, rtol=1e-6)
    logits = np.broadcast_to([0.5, -1, 2], (4, 3))
    signs = np.where(labels > 0, -1, 1)
    np.testing.assert_allclose(
        plain["loss"], np.log1p(np.exp(signs * logits)).mean(1).sum(), rtol=1e-6
    )
    np.testing.assert_allclose(plain["members"], labels.sum(0))
    filled = {**batch, "weights": np.array([1, 0, 0, 0], np.float32)}
    np.testing.assert_allclose(
        base.supervised_loss(model, filled)["members"], labels[0]
    )


@pytest.mark.parametrize(
    ("name", "text", "labels", "part"),
    [
        ("t.csv", 'text,label\n"a\nb",0\n"c,1\n', "classes", "line 4: expected cells"),
        ("t.csv", 'text,label\n"a\nb",0\nc\n', "classes", "got 'c' in line 4 of"),
        (
            "t.csv",
            'text,label\n"a,b",0\n"c,d",1,\n',
            "classes",
            """got '"c,d",1,' in""",
        ),
        ("t.csv", '"text",tag\n', "classes", """got '"text",tag' in"""),
        ("t.csv", "text;label\na;0\n", "classes", "first line with the columns"),
        ("t.csv", "text,label\na,1\nb,x\n", "numbers", "line 3: label: expected a fin"),
        ("t.csv", "text,label\na,nan\n", "numbers", "float32 number, got 'nan'"),
        ("t.csv", "text,label\na,\nb,\n", "multi", "expected two classes or more"),
        ("t.tsv", "text\tlabel\na\tx,y\nb\tx\n", "classes", "too; --data.labels=multi"),
    ],
)
def test_tables_that_cannot_be_read(
    tmp_path: Path, name: str, text: str, labels: Any, part: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"^--data.path: ") as error:
        prepare(path=str(tmp_path / name), labels=labels)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_class_of_the_test_split_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", [(x, ",".join(tags(x))) for x in texts(30)])
    write(tmp_path / "test.csv", [("a\nb", "first"), ("c", "second,fourth")])
    with pytest.raises(ValueError, match=r"test.csv, line 4: label: .* got 'fourth'"):
        prepare(path=str(tmp_path), labels="multi")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"train_values": np.ones((4, 3)) / 2}, "train_values: expected token ids"),
        ({"train_values": -np.ones((4, 3), int)}, "train_values: expected token ids"),
        ({"train_values": np.ones((4, 3, 2), int)}, "expected 2 channels"),
        ({"train_labels": np.full((4, 2), 2)}, "one for each of 4 examples"),
        ({"test_labels": np.array([5])}, "expected classes of the training split"),
    ],
)
def test_arrays_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    arrays = {"train_values": np.ones((4, 3), int), "train_labels": np.arange(4) % 2}
    arrays |= {"test_values": np.ones((1, 3), int), "test_labels": np.array([1])}
    np.savez(tmp_path / "a.npz", **(arrays | changes))
    with pytest.raises(ValueError) as error:
        prepare(path=str(tmp_path / "a.npz"))
    assert part in str(error.value) and "a.npz" in str(error.value)


def test_reviews_have_classes(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^--data.path: expected a table of texts, for"
    ):
        prepare(path=None, labels="multi")


def test_series_may_have_several_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in {"train": 30, "test": 10}.items():
        values = rng.normal(size=(count, 8, 2)).astype(np.float32)
        arrays[f"{split}_values"] = values
        arrays[f"{split}_labels"] = (values.mean(1) > 0).astype(int)
    np.savez(tmp_path / "a.npz", **arrays)
    data = get_preset("series").replace(data={"path": str(tmp_path / "a.npz")}).data
    dataset = get_task("series").prepare(data)
    assert dataset.several and dataset.metric == "f1" and dataset.num_classes == 2
    np.testing.assert_array_equal(dataset.labels("test"), arrays["test_labels"])
    assert dataset.raw is not None and dataset.raw["several"]


def test_the_order_of_classes_does_not_depend_on_the_order_of_words() -> None:
    orders = [
        sorted(x, key=_in_order) for x in itertools.permutations(["nan", "2", "b"])
    ]
    assert orders == 6 * [["2", "b", "nan"]]
