"""Words, byte pairs and WikiText's own files."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from lra_jax.data.language import wikitext
from lra_jax.data.language.prepare import prepare
from lra_jax.vocabularies import Bpe, Bytes, Words, from_raw

# As the files of WikiText are: blanks around lines, titles, and unknown words.
ARTICLE = (
    " \n = {0} = \n \n The {0} is a <unk> . \n \n = = Section = = \n \n It {1} . \n"
)
TRAIN = ARTICLE.format("cat", "sleeps") + ARTICLE.format("dog", "barks") * 9 + " \n"
TEST = ARTICLE.format("dog", "sleeps") + " \n"


def write_files(folder: Path, ending: str = "tokens", line_end: str = "\n") -> Path:
    """WikiText's three files; the test split is longer than the validation split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in (("train", TRAIN), ("valid", TEST), ("test", TEST + TEST)):
        content = text.replace("\n", line_end).encode()
        (folder / f"wiki.{split}.{ending}").write_bytes(content)
    return folder


@pytest.fixture
def archive(tmp_path) -> Path:
    file = tmp_path / "wikitext-103-v1.zip"
    with zipfile.ZipFile(file, "w") as content:
        for split, text in (("train", TRAIN), ("valid", TEST), ("test", TEST)):
            content.writestr(f"wikitext-103/wiki.{split}.tokens", text)
    return file


def test_wikitext_counts_words_and_ends_of_lines(archive, tmp_path):
    dataset = prepare(path=str(archive), tokenizer="words", max_length=16)
    # The official counts: every word, and an end for every line.
    official = len(TEST.split()) + TEST.count("\n")
    # The end of the file's last line ends the last article.
    assert dataset.num_targets("test") == official
    corpus = wikitext.read(str(archive))
    assert corpus is not None
    assert len(corpus.documents["train"]) == 10
    assert b"".join(corpus.documents["train"]) == TRAIN.encode()
    assert corpus.documents["train"][0].startswith(b" \n = cat = \n")
    # Every word of the training text, the end of a line, and the mask.
    assert dataset.vocab_size == len(set(TRAIN.split())) + 2
    with zipfile.ZipFile(archive) as content:
        content.extractall(tmp_path)
    folder = prepare(
        path=str(tmp_path / "wikitext-103"), tokenizer="words", max_length=16
    )
    assert folder.fingerprint == dataset.fingerprint


def test_articles_are_found_whatever_ends_the_lines(tmp_path):
    fingerprints = set()
    for end in ("\n", "\r\n"):
        folder = write_files(tmp_path / f"{len(end)}", line_end=end)
        dataset = prepare(path=str(folder), tokenizer="words", max_length=16)
        fingerprints.add(dataset.fingerprint)
    assert len(fingerprints) == 1


def test_words_come_back_and_unknown_ones_are_known_to_be():
    words = Words.of([TRAIN.encode()])
    tokens = words.encode(b"The dog\n barks .\n")
    assert words.decode(tokens) == b"The dog \nbarks . "
    assert tokens.max() < words.mask == words.size - 1
    unknown = words.encode(b"zebra")
    assert words.decode(unknown) == b"<unk> "
    counts = [TRAIN.split().count(w) for w in ("dog", "barks", "cat")]
    ids = [int(words.encode(w.encode())[0]) for w in ("dog", "barks", "cat")]
    assert sorted(counts, reverse=True) == counts and sorted(ids) == ids
    without = Words(["<eos>", "a"])
    with pytest.raises(ValueError, match=r"^text: expected words of the .* got 'b'"):
        without.encode(b"a b")


def test_byte_pairs_express_every_text():
    bpe = Bpe.of([b"def f(x):\n    return x\n" * 20], 300)
    for text in ("def f(y):\n\treturn 2\n", "Grüße \u2192 \U0001f600"):
        tokens = bpe.encode(text.encode())
        assert bpe.decode(tokens).decode() == text
        assert tokens.max() < bpe.end
    assert len(bpe.encode(b"    return x")) <= 4
    assert bpe.size <= 300
    with pytest.raises(ValueError, match=r"^text: expected UTF-8 .* byte 255"):
        bpe.encode(b"\xff")
    with pytest.raises(ValueError, match=r"^vocab_size: expected at least 258"):
        Bpe.of([b"a"], 200)


def test_byte_pairs_give_every_byte_back_token_by_token():
    """Of a character that is several tokens each is a part, as in generation."""
    text = "".join(map(chr, range(1, 0x250))) + "\u65e5\u672c \U0001f600"
    bpe = Bpe.of([b"a b c"], 258)
    tokens = bpe.encode(text.encode())
    assert b"".join(bpe.decode(token[None]) for token in tokens) == text.encode()
    beyond = np.array([bpe.end, *tokens[:1], bpe.mask])
    assert bpe.decode(beyond) == text[:1].encode()


@pytest.mark.parametrize(
    "vocabulary",
    [Bytes(), Words.of([b"a b c\n"]), Bpe.of([b"a b c a b c"], 262)],
    ids=["bytes", "words", "bpe"],
)
def test_a_vocabulary_comes_back_from_its_description(vocabulary):
    again = from_raw(vocabulary.raw)
    assert (again.size, again.end, again.mask) == (
        vocabulary.size,
        vocabulary.end,
        vocabulary.size - 1,
    )
    tokens = vocabulary.encode(b"b a c")
    np.testing.assert_array_equal(again.encode(b"b a c"), tokens)
    assert again.decode(tokens) == vocabulary.decode(tokens)


def test_a_folder_of_wikitext_keeps_its_splits(tmp_path):
    """Also the raw form; its three files are not split by their names."""
    corpus = wikitext.read(str(write_files(tmp_path, "raw")))
    assert corpus is not None
    texts = {s: b"".join(x).decode() for s, x in corpus.documents.items()}
    assert texts == {"train": TRAIN, "valid": TEST, "test": TEST + TEST}
    (tmp_path / "wiki.train.raw").unlink()
    with pytest.raises(FileNotFoundError, match=r"wiki\.train\.raw"):
        prepare(path=str(tmp_path))


def test_a_folder_above_wikitext_keeps_its_splits(tmp_path):
    """Files of one folder must not be divided by their names; two are refused."""
    write_files(tmp_path / "unzipped" / "wikitext-103")
    (tmp_path / "wikitext-103-v1.zip").touch()
    (tmp_path / ".hidden").touch()
    corpus = wikitext.read(str(tmp_path))
    assert corpus is not None and corpus.name == "wikitext-103"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a text")
    with pytest.raises(ValueError, match=r"one folder of texts, such as .*text-103"):
        prepare(path=str(tmp_path))


def test_a_folder_with_nothing_but_the_archive_is_read_as_the_archive(archive):
    plain = prepare(path=str(archive), tokenizer="words", max_length=16)
    above = prepare(path=str(archive.parent), tokenizer="words", max_length=16)
    assert above.fingerprint == plain.fingerprint
    (archive.parent / "a.txt").write_text("a text")
    assert wikitext.read(str(archive.parent)) is None


def test_a_damaged_archive_is_one_line(archive):
    """Wherever it is: some damage is found by its checksum, some by zlib."""
    words = np.random.default_rng(0).integers(9, size=3000).astype(str)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as content:
        for split in ("train", "valid", "test"):
            content.writestr(f"wiki.{split}.tokens", " ".join(words))
    whole = archive.read_bytes()
    for place in range(0, len(whole), 100):
        archive.write_bytes(whole[:place] + bytes(40) + whole[place + 40 :])
        with pytest.raises(ValueError, match=r"^--data.path: expected an archive of W"):
            wikitext.read(str(archive))


def test_archives_that_are_not_whole(tmp_path):
    bad = tmp_path / "bad.zip"
    bad.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"^--data.path: expected an archive of Wiki"):
        prepare(path=str(bad))
    with zipfile.ZipFile(tmp_path / "part.zip", "w") as content:
        content.writestr("wiki.train.tokens", TRAIN)
    with pytest.raises(ValueError, match=r"without wiki.valid.tokens"):
        prepare(path=str(tmp_path / "part.zip"))
