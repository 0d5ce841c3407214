"""Corpora and rows of text: what is predicted, from what, and in which split."""

import itertools
import os
from collections import Counter

import numpy as np
import pytest

from lra_jax import vocabularies
from lra_jax.data import pipeline
from lra_jax.data.language import corpora
from lra_jax.data.language.prepare import prepare
from lra_jax.data.language.rows import SLIDING, cut, fill
from lra_jax.models.raw import check_raw, reader

END = 256


@pytest.fixture
def folder(tmp_path):
    """Nine files of 1 to 240 letters, one of which is cut, and one that is empty."""
    for index in range(9):
        size = 1 + 30 * index - (index == 8)
        text = bytes(97 + (7 * index + i) % 26 for i in range(size))
        (tmp_path / f"{index}.txt").write_bytes(text)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"\0")
    return tmp_path


def documents(dataset, split) -> list[bytes]:
    stream = dataset._streams[split]
    ends = itertools.pairwise(stream.starts.tolist())
    return [bytes(stream.tokens[a + 1 : b].tolist()) for a, b in ends]


def test_every_file_is_in_one_split(folder):
    dataset = prepare(path=str(folder), max_length=32)
    actual = [d for split in dataset.splits for d in documents(dataset, split)]
    expected = [(folder / f"{i}.txt").read_bytes() for i in range(9)]
    assert sorted(actual) == sorted(expected)
    assert all(dataset.num_bytes[split] > 0 for split in dataset.splits)


def test_only_hidden_folders_are_left_out(folder):
    """The library's own build folders have names that a user's may have, too."""
    for name in (".git", "config-notes", "tests"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(f"the text of {name}")
    dataset = prepare(path=str(folder), max_length=32)
    actual = [d for split in dataset.splits for d in documents(dataset, split)]
    extra = {d for d in actual if d.startswith(b"the text of")}
    assert extra == {b"the text of config-notes", b"the text of tests"}


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    (folder / "secret").mkdir()
    scan = os.scandir

    def refused(place):
        if "secret" in str(place):
            raise PermissionError(13, "Permission denied", str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ValueError, match=r"^--data.path: .* got .*secret: Permission"):
        corpora.of_path(str(folder))


@pytest.mark.parametrize("split", ["train", "test", SLIDING])
def test_every_token_is_predicted_once_from_its_own_document(folder, split):
    dataset = prepare(path=str(folder), max_length=32)
    whole = [b"", *documents(dataset, split)]
    pairs = Counter()
    for row in dataset.source(split):
        for number in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == number
            tokens, labels = (
                row["tokens"][inside].tolist(),
                row["labels"][inside].tolist(),
            )
            nexts = zip(tokens[1:], labels, strict=False)
            assert all(label in (-1, token) for token, label in nexts)
            text = bytes(t for t in tokens if t != END)
            assert any(text in document for document in whole)
            pairs.update(p for p in zip(tokens, labels, strict=True) if p[1] >= 0)
        assert (row["labels"][row["segment_ids"] == 0] == -1).all()
    expected = Counter(
        pair
        for document in documents(dataset, split)
        for pair in itertools.pairwise([END, *document, END])
    )
    assert pairs == expected
    assert dataset.num_targets(split) == expected.total()


def test_sliding_rows_have_half_a_row_of_context():
    pieces = cut(np.array([0, 10, 100]), length=32, step=16)
    scored = [i for piece in pieces for i in range(piece.scored, piece.stop)]
    assert scored == list(range(100))
    assert all(p.scored - p.start in (0, 16) for p in pieces)
    assert {p.scored for p in pieces if p.scored == p.start} == {0, 10}


def test_rows_are_full_and_hold_every_piece_once():
    sizes = np.random.default_rng(0).integers(1, 100, 50)
    pieces = cut(np.cumsum([0, *sizes]), length=32, step=32)
    rows = fill(pieces, 32)
    assert sorted(p for row in rows for p in row) == sorted(pieces)
    used = [sum(p.stop - p.start for p in row) for row in rows]
    assert max(used) <= 32
    assert len(rows) <= 1.1 * sizes.sum() / 32 + 1


def test_one_file_is_cut_into_three_parts(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {i}\n" for i in range(500)))
    dataset = prepare(path=str(file), max_length=16)
    parts = [documents(dataset, split)[0] for split in ("train", "valid", "test")]
    assert b"".join(parts) == file.read_bytes()
    assert [p.endswith(b"\n") for p in parts] == [True] * 3
    assert 0.93 < len(parts[0]) / len(file.read_bytes()) < 0.95


@pytest.mark.parametrize(
    "text",
    [b"line\n" * 100 + b"x" * 300, b"head\n" + b"x" * 500, b"x" * 500],
    ids=["long_end", "long_line", "one_line"],
)
def test_long_lines_leave_every_part_its_share(tmp_path, text):
    (tmp_path / "a.txt").write_bytes(text)
    dataset = prepare(path=str(tmp_path / "a.txt"), max_length=16)
    parts = [documents(dataset, split)[0] for split in ("train", "valid", "test")]
    assert b"".join(parts) == text
    shares = [len(part) / len(text) for part in parts]
    np.testing.assert_allclose(shares, [0.94, 0.03, 0.03], atol=0.031)
    assert all(parts)


@pytest.mark.parametrize("ascii_before", range(3))
def test_a_long_line_is_not_cut_within_a_character(tmp_path, ascii_before):
    text = "a" * ascii_before + "\u4e2d" * 710
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    parts = corpora.of_path(str(tmp_path / "a.txt")).documents.values()
    assert "".join(part.decode() for (part,) in parts) == text


def test_links_to_folders_are_followed_once(folder, tmp_path_factory):
    apart = tmp_path_factory.mktemp("apart")
    (apart / "linked.txt").write_text("elsewhere")
    (apart / "back").symlink_to(folder)
    before = corpora.of_path(str(folder)).documents
    for name in ("first", "second"):
        (folder / name).symlink_to(apart)
    after = corpora.of_path(str(folder)).documents
    texts = [Counter(itertools.chain(*x.values())) for x in (before, after)]
    assert texts[1] - texts[0] == Counter({b"elsewhere": 1})


def test_a_pattern_for_a_folder_below_the_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    whole = prepare(path=str(folder), pattern="*.txt", max_length=32)
    actual = prepare(path=f"~/{folder.name}", pattern="*.txt", max_length=32)
    assert actual.fingerprint == whole.fingerprint


def test_the_fingerprint_is_of_the_text_and_the_rows(folder):
    first = prepare(path=str(folder), max_length=32).fingerprint
    assert prepare(path=str(folder), max_length=32).fingerprint == first
    assert prepare(path=str(folder), max_length=16).fingerprint != first
    (folder / "3.txt").write_text("changed")
    assert prepare(path=str(folder), max_length=32).fingerprint != first


def test_the_fingerprint_is_of_the_words(tmp_path):
    """Which may have the ids of other words."""
    actual = set()
    for word in ("cat", "cow"):
        file = tmp_path / "a.txt"
        file.write_text(f"the {word} sat\n" * 90)
        settings = {"tokenizer": "words", "max_length": 8}
        dataset = prepare(path=str(file), **settings)
        actual.add(dataset.fingerprint)
    assert len(actual) == 2


@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe"])
def test_a_saved_model_reads_texts_in_the_same_way(tokenizer, tmp_path):
    """With the ends of lines, and words that training did not have."""
    (tmp_path / "a.txt").write_text("the cat sat\n\nthe cow\n" * 90)
    settings = {"tokenizer": tokenizer, "vocab_size": 300, "max_length": 8}
    dataset = prepare(path=str(tmp_path / "a.txt"), **settings)
    check_raw(dataset.raw)
    vocabulary = vocabularies.from_raw(dataset.raw)
    tokens = reader(dataset.raw, 99)("text", "the cat\n\nsaw")
    expected = "the cat \n\n<unk> " if tokenizer == "words" else "the cat\n\nsaw"
    assert vocabulary.decode(tokens).decode() == expected


def test_a_large_file_that_leaves_little_to_train_on_is_said(tmp_path, caplog):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_bytes(b"a" * 100)
    corpora.of_path(str(tmp_path))
    assert "which leaves 25 % for valid and 25 % for test" in caplog.text


def test_batches_go_on_where_they_stopped(folder):
    dataset = prepare(path=str(folder), max_length=32)
    settings = {"batch_size": 3, "seed": 1, "num_steps": 9, "num_threads": 0}
    whole = list(pipeline.train_iterator(dataset, **settings))
    first = pipeline.train_iterator(dataset, **settings)
    for _ in range(4):
        next(first)
    again = pipeline.train_iterator(dataset, **settings)
    again.set_state(first.get_state())
    for one, two in zip(whole[4:], again, strict=True):
        assert set(one) == {"tokens", "segment_ids", "labels"}
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
    counted = pipeline.EvalBatches(dataset, "train", batch_size=4)
    total = sum((b["labels"] >= 0)[b["weights"] > 0].sum() for b in counted)
    assert total == dataset.num_targets("train")


def test_the_standard_library_is_the_default():
    corpus = corpora.standard_library()
    sizes = {split: sum(map(len, texts)) for split, texts in corpus.documents.items()}
    assert "standard library of Python 3" in corpus.name
    assert sizes["train"] > 5_000_000
    assert min(sizes["valid"], sizes["test"]) > 0.025 * sum(sizes.values())


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, {}, "a file or a folder, got .*which does not exist"),
        ({"a.txt": b""}, {}, "text, got empty files"),
        ({"a.txt": b"abc\0"}, {}, r"text, got .*a.txt, which has a byte 0"),
        ({"a.txt": b"abc"}, {}, "at least a row of --data.max_length=32 tokens"),
        ({"a.txt": b"x" * 15}, {"max_length": 8}, "text for .*, got none for test"),
        ({"a.txt": b"abc"}, {"pattern": "*.py"}, r"files '\*.py', got none in"),
    ],
)
def test_what_is_no_corpus(tmp_path, files, options, message):
    folder = tmp_path / "texts"
    if files:
        folder.mkdir()
    for name, text in files.items():
        (folder / name).write_bytes(text)
    with pytest.raises(ValueError, match=f"^--data.path: expected {message}"):
        prepare(path=str(folder), **{"max_length": 32, **options})
