"""Text, Image and Retrieval from archives and folders in their true formats."""

import dataclasses
import hashlib
import io
import shutil
import tarfile
import tracemalloc

import numpy as np
import originals
import pytest

from lra_jax.data import image, pipeline, retrieval, text
from lra_jax.models.raw import reader


def examples(dataset, split: str) -> list[tuple]:
    names = (*dataset.sequences, "label")
    return [tuple(e[name] for name in names) for e in dataset.source(split)]


def texts(dataset, split: str) -> list[tuple[bytes, int]]:
    return [(t.tobytes(), int(label)) for t, label in examples(dataset, split)]


@pytest.fixture(scope="module")
def imdb(tmp_path_factory):
    return originals.imdb_archive(tmp_path_factory.mktemp("imdb") / "aclImdb_v1.tar.gz")


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    return originals.cifar_archive(folder / "cifar-10-binary.tar.gz")


@pytest.fixture(scope="module")
def aan(tmp_path_factory):
    return originals.write(tmp_path_factory.mktemp("aan"), originals.aan_files())


def test_text_holds_a_tenth_out(tmp_path, imdb):
    dataset = text.prepare(tmp_path, path=imdb)
    assert [dataset.num_examples(s) for s in dataset.splits] == [36, 4, 16]
    assert (dataset.vocab_size, dataset.num_classes) == (256, 2)
    assert dataset.image_shape is None
    reviews = {
        (content, int("/pos/" in name))
        for name, content in originals.imdb_reviews().items()
        if "/train/" in name
    }
    train, valid = texts(dataset, "train"), texts(dataset, "valid")
    assert set(train) | set(valid) == reviews and not set(train) & set(valid)
    assert np.bincount(dataset.labels("valid")).tolist() == [2, 2]
    # Another seed, other reviews; the same seed, the same data.
    other = text.prepare(tmp_path, path=imdb, seed=1)
    assert set(texts(other, "valid")) != set(valid)
    assert text.prepare(tmp_path / "b", path=imdb).fingerprint == dataset.fingerprint


def test_a_review_that_occurs_often_is_in_one_split(tmp_path):
    files = {
        name.replace(".txt", f"_{copy}.txt"): content
        for name, content in originals.imdb_reviews().items()
        for copy in range(4)
    }
    folder = originals.write(tmp_path / "folder", files)
    dataset = text.prepare(tmp_path / "data", path=folder)
    assert [dataset.num_examples(s) for s in dataset.splits] == [144, 16, 64]
    assert not set(texts(dataset, "train")) & set(texts(dataset, "valid"))
    # A tenth exactly, as in the released archive, which has a few copies.
    for name in ("1_1", "5_5", "9_9"):
        for copy in (1, 2, 3):
            (folder / f"aclImdb/train/pos/{name}_{copy}.txt").unlink()
    for seed in range(6):
        dataset = text.prepare(tmp_path / "data", path=folder, seed=seed)
        assert [dataset.num_examples(s) for s in dataset.splits[:2]] == [136, 15]
        assert not set(texts(dataset, "train")) & set(texts(dataset, "valid"))


def test_validation_reviews_of_its_own(tmp_path):
    files = originals.imdb_reviews()
    renamed = {name.replace("/test/", "/valid/"): x for name, x in files.items()}
    folder = originals.write(tmp_path / "folder", files | renamed)
    dataset = text.prepare(tmp_path / "data", path=folder)
    assert [dataset.num_examples(s) for s in dataset.splits] == [40, 16, 16]
    assert texts(dataset, "valid") == texts(dataset, "test")
    shutil.rmtree(folder / "aclImdb" / "valid" / "pos")
    with pytest.raises(ValueError, match="expected reviews in valid/pos, got none"):
        text.prepare(tmp_path / "data", path=folder)


def test_a_model_reads_a_review_as_training_did(tmp_path, imdb):
    dataset = text.prepare(tmp_path, path=imdb)
    read = reader(dataset.raw, dataset.max_length)
    row = dataset.source("test")[0]["tokens"]
    np.testing.assert_array_equal(read("example", b"\n " + row.tobytes() + b" \n"), row)


def test_text_validates_on_the_test_split_if_asked(tmp_path, imdb):
    dataset = text.prepare(tmp_path, path=imdb, validation="test", max_length=7)
    assert [dataset.num_examples(s) for s in dataset.splits] == [40, 16, 16]
    assert texts(dataset, "valid") == texts(dataset, "test")
    assert {t for t, _ in texts(dataset, "test")} == {b"bad, aw", b"good, g"}
    assert dataset.max_length == 7 and dataset.lengths("train").max() == 7
    with pytest.raises(ValueError, match=r"^validation: expected one of hold"):
        text.prepare(tmp_path, path=imdb, validation="held-out")  # pyright: ignore


def test_white_space_around_a_review_is_left_out(tmp_path):
    """As in tfds' imdb_reviews, of which LRA takes the first bytes."""
    place = "aclImdb/test/pos/0_0.txt"
    files = originals.imdb_reviews() | {place: b" \r\n good\tfilm \xa0\n "}
    archive = originals.imdb_archive(tmp_path / "aclImdb_v1.tar.gz", files)
    for max_length, kept in ((4000, b"good\tfilm \xa0"), (5, b"good\t")):
        dataset = text.prepare(tmp_path, path=archive, max_length=max_length)
        assert (kept, 1) in texts(dataset, "test")


def test_hidden_files_are_no_reviews(tmp_path, imdb):
    """macOS puts a ._NAME beside each NAME when it makes an archive."""
    whole = text.prepare(tmp_path / "data", path=imdb)
    forks = {
        f"aclImdb/{split}/{label}/._0_7.txt": b"\0\5\x16\7"
        for split in ("train", "test")
        for label in ("neg", "pos")
    }
    files = originals.imdb_reviews() | forks
    archive = originals.imdb_archive(tmp_path / "again.tar.gz", files)
    for place in (archive, originals.write(tmp_path / "folder", files)):
        actual = text.prepare(tmp_path / "data", path=place)
        assert actual.fingerprint == whole.fingerprint


def test_a_folder_gives_what_its_archive_gives(tmp_path, imdb, cifar):
    files = originals.imdb_reviews()
    folder = originals.write(tmp_path / "texts", files)
    whole = text.prepare(tmp_path / "data", path=imdb)
    for place in (folder, folder / "aclImdb", imdb.parent):
        assert text.prepare(tmp_path / "data", path=place).fingerprint == (
            whole.fingerprint
        )
    # Another order in the archive changes nothing either.
    turned = dict(reversed(files.items()))
    again = originals.imdb_archive(tmp_path / "again.tar.gz", turned)
    assert text.prepare(tmp_path / "data", path=again).fingerprint == whole.fingerprint
    folder = originals.write(tmp_path / "images", originals.cifar_files())
    pictures = image.prepare(tmp_path / "data", path=cifar)
    for place in (folder, folder / "cifar-10-batches-bin"):
        actual = image.prepare(tmp_path / "data", path=place)
        assert actual.fingerprint == pictures.fingerprint


def test_nothing_leaves_the_folder(tmp_path):
    """Members with hostile names, links included, are neither written nor read."""
    archive = tmp_path / "in" / "evil.tar.gz"
    archive.parent.mkdir()
    reviews = originals.imdb_reviews()
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in {
            "../escaped.txt": b"x",
            "/tmp/lra_jax_escaped.txt": b"x",
            "aclImdb/../../escaped.txt": b"x",
            **reviews,
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("aclImdb/train/pos/999_9.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    dataset = text.prepare(tmp_path / "data", path=archive)
    assert dataset.num_examples("train") + dataset.num_examples("valid") == 40
    names = {file.name for file in tmp_path.rglob("*")}
    assert not [name for name in names if "escaped" in name]


def test_image(tmp_path, cifar):
    dataset = image.prepare(tmp_path, path=cifar)
    assert [dataset.num_examples(s) for s in dataset.splits] == [18, 2, 12]
    assert dataset.image_shape == (32, 32) and dataset.max_length == 1024
    with pytest.raises(ValueError, match=r"expected none for images.*'9:0.5'"):
        pipeline.train_iterator(
            dataset, batch_size=2, seed=0, num_steps=2, length_warmup="9:0.5"
        )
    files = originals.cifar_files()
    names = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    records = np.frombuffer(b"".join(files[n] for n in names), np.uint8)
    records = records.reshape(20, 3073)
    got = examples(dataset, "train") + examples(dataset, "valid")
    for record, (pixels, label) in zip(records, got, strict=True):
        assert label == record[0]
        red, green, blue = record[1:].reshape(3, 1024).astype(np.float64)
        exact = (0.2989 * red + 0.5870 * green + 0.1140 * blue) / 255 * 255.5
        assert np.abs(pixels - np.floor(exact)).max() <= 1
        assert (pixels == np.floor(exact)).mean() > 0.99


def test_grey_of_white_black_and_pure_colours():
    colours = np.array(
        [[255, 255, 255], [0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]]
    )
    got = image.grey(colours.astype(np.uint8)[:, :, None])[:, 0]
    assert got.tolist() == [255, 0, 76, 149, 29]


@pytest.mark.parametrize("place", ["", "tsv_data", "lra_release/lra_release/tsv_data"])
def test_retrieval(tmp_path, aan, place):
    folder = originals.write(tmp_path / "in" / place, originals.aan_files())
    dataset = retrieval.prepare(tmp_path / "data", path=tmp_path / "in", max_length=30)
    assert [dataset.num_examples(s) for s in dataset.splits] == [40, 12, 12]
    assert dataset.sequences == ("tokens_1", "tokens_2")
    for split, name in (("train", "train"), ("valid", "eval"), ("test", "test")):
        lines = (folder / f"new_aan_pairs.{name}.tsv").read_bytes().splitlines()
        actual = examples(dataset, split)
        for line, (one, two, label) in zip(lines, actual, strict=True):
            columns = line.split(b"\t")
            assert float(columns[0]) == label
            assert (one.tobytes(), two.tobytes()) == (columns[3][:30], columns[4][:30])


def test_retrieval_from_the_release_as_it_is(tmp_path, aan):
    members = {"lra_release/listops-1000/basic_train.tsv": b"other"}
    for name, content in originals.aan_files().items():
        members[f"./lra_release/lra_release/tsv_data/{name}"] = content
    archive = originals.tar(tmp_path / "lra_release.gz", members)
    whole = retrieval.prepare(tmp_path / "data", path=archive)
    assert whole.fingerprint == retrieval.prepare(tmp_path, path=aan).fingerprint
    assert not list((tmp_path / "data").rglob("*.unfinished"))
    del members["./lra_release/lra_release/tsv_data/new_aan_pairs.test.tsv"]
    lacking = originals.tar(tmp_path / "lacking.gz", members)
    with pytest.raises(ValueError, match=r"that end in .*test\.tsv, got none"):
        retrieval.prepare(tmp_path / "data", path=lacking)
    archive.write_bytes(archive.read_bytes()[:400])
    with pytest.raises(ValueError, match="cut short or damaged"):
        retrieval.prepare(tmp_path / "data", path=archive)
    assert not list((tmp_path / "data").rglob("*.unfinished"))


def test_files_of_integers(tmp_path):
    rows = [[5, 6, 7], [255], [0, 1]]
    folder = originals.token_files(tmp_path / "t", {".src": rows}, [0, 1, 1])
    dataset = text.prepare(tmp_path / "data", path=folder, max_length=2)
    for split in dataset.splits:
        got = [(t.tolist(), int(label)) for t, label in examples(dataset, split)]
        assert got == [([5, 6], 0), ([255], 1), ([0, 1], 1)]
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1024)).tolist()
    folder = originals.token_files(tmp_path / "i", {".src": pixels}, [9, 0, 3])
    dataset = image.prepare(tmp_path / "data", path=folder)
    got = examples(dataset, "test")
    assert [p.tolist() for p, _ in got] == pixels and [x for _, x in got] == [9, 0, 3]
    pairs = {".src": rows, ".src1": rows[::-1]}
    folder = originals.token_files(tmp_path / "r", pairs, [0, 1, 1])
    dataset = retrieval.prepare(tmp_path / "data", path=folder)
    one, two, label = examples(dataset, "valid")[0]
    assert (one.tolist(), two.tolist(), label) == ([5, 6, 7], [0, 1], 0)


def test_integers_are_validated_on_the_test_split_if_asked(tmp_path):
    """Results say so; without being asked, the files' own split is used."""
    folder = originals.token_files(tmp_path / "t", {".src": [[1], [2]]}, [0, 1])
    (folder / "input/test.src").write_bytes(b"3\n4\n")
    for validation, tokens in (("holdout", [1, 2]), ("test", [3, 4])):
        dataset = text.prepare(tmp_path / "d", path=folder, validation=validation)
        got = [int(t[0]) for t, _ in examples(dataset, "valid")]
        assert got == tokens, validation


REVIEWS = originals.imdb_reviews(10, 1)
IMAGES = originals.cifar_files(4, 4)
BATCH = "cifar-10-batches-bin/data_batch_2.bin"
POSITIVE = {name: x for name, x in REVIEWS.items() if "test/pos" not in name}
LABEL_12 = IMAGES[BATCH][:3073] + b"\x0c" + IMAGES[BATCH][3074:]
BAD_ARCHIVES = [
    (text, REVIEWS | {"aclImdb/train/neutral/1_5.txt": b"so"}, "label .*'neutral'"),
    (text, REVIEWS | {"aclImdb/train/pos/1_5.text": b"so"}, "1_5.text: .*another file"),
    (text, POSITIVE, "expected reviews in test/pos, got none"),
    (text, IMAGES, "expected reviews in train/neg, got none"),
    (text, originals.imdb_reviews(9, 1), "train/neg: .* at least 10 .* got 9"),
    (image, IMAGES | {BATCH: IMAGES[BATCH][:-1]}, "batch_2.bin: .* got 12,291 bytes"),
    (image, IMAGES | {BATCH: LABEL_12}, "data_batch_2.bin, image 2: .*label .* got 12"),
    (image, IMAGES | {BATCH: b""}, "got 0 bytes"),
    (image, {k: x for k, x in IMAGES.items() if k != BATCH}, "data_batch_2.*got none"),
]


@pytest.mark.parametrize(("module", "files", "message"), BAD_ARCHIVES)
def test_archives_that_do_not_hold_the_task(tmp_path, module, files, message):
    archive = originals.tar(tmp_path / "x.tar.gz", files)
    with pytest.raises(ValueError, match=message):
        module.prepare(tmp_path / "data", path=archive)
    assert not list(tmp_path.rglob("*.array_record*"))
    assert not list(tmp_path.rglob("incomplete.*"))


LARGE = bytes(150 << 20)


@pytest.mark.parametrize("kind", ["text", "image", "name", "pairs"])
def test_members_are_read_up_to_what_is_kept(tmp_path, kind):
    """An archive of 200 kB can hold one of any size."""
    module, files, name = {
        "text": (text, REVIEWS, "aclImdb/train/pos/0_0.txt"),
        "image": (image, IMAGES, BATCH),
        "name": (image, IMAGES, "long" * (20 << 20)),
        "pairs": (retrieval, {}, "tsv_data/new_aan_pairs.train.tsv"),
    }[kind]
    content = b"" if kind == "name" else LARGE
    archive = originals.tar(tmp_path / "x.tar.gz", files | {name: content})
    tracemalloc.start()
    try:
        if kind == "text":
            module.prepare(tmp_path / "data", path=archive)
        else:
            with pytest.raises(ValueError, match=r"expected (images of|a whole)"):
                module.prepare(tmp_path / "data", path=archive)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def damage_flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:3],
        lambda data: b"<html>403 Forbidden</html>",
        damage_flip,
        lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:],
    ],
)
@pytest.mark.parametrize("module", [text, image])
def test_damaged_archives(tmp_path, imdb, cifar, module, damage):
    source = imdb if module is text else cifar
    archive = tmp_path / source.name
    archive.write_bytes(damage(source.read_bytes()))
    with pytest.raises(ValueError, match="cut short or damaged") as caught:
        module.prepare(tmp_path / "data", path=archive)
    for part in (str(archive), module.ARCHIVE.url, f"{module.ARCHIVE.size:,} bytes"):
        assert part in str(caught.value)
    assert not list(tmp_path.rglob("*.array_record*"))


def test_an_altered_copy_of_the_released_archive(tmp_path, imdb, monkeypatch, caplog):
    content = imdb.read_bytes()
    released = dataclasses.replace(
        text.ARCHIVE, size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    monkeypatch.setattr(text, "ARCHIVE", released)
    text.prepare(tmp_path / "data", path=imdb)
    assert not caplog.records
    other = dataclasses.replace(released, sha256="0" * 64)
    monkeypatch.setattr(text, "ARCHIVE", other)
    with pytest.raises(ValueError, match=f"sha256 0000.*, got {released.sha256}"):
        text.prepare(tmp_path / "data2", path=imdb)
    monkeypatch.setattr(text, "ARCHIVE", dataclasses.replace(other, size=7))
    text.prepare(tmp_path / "data3", path=imdb)
    assert "read as a file of your own" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\tP\tQ\tone text\n", r"expected 5 columns \(label, .*\), got 4"),
        (b"\n", "got 1"),
        (b"yes\tP\tQ\ta\tb\n", "label of 0 or 1, got 'yes'"),
    ],
)
def test_malformed_pairs(tmp_path, line, message):
    folder = originals.write(tmp_path / "in", originals.aan_files(4, 4))
    file = folder / "new_aan_pairs.eval.tsv"
    file.write_bytes(file.read_bytes() + line)
    with pytest.raises(ValueError, match=message) as caught:
        retrieval.prepare(tmp_path / "data", path=folder)
    assert str(caught.value).startswith(f"{file}, line 5: ")
    assert not list((tmp_path / "data").rglob("*.array_record*"))


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        ([[1, 256]], [0], r"train\.src, line 1: .* 0\.\.255, got '1 256"),
        ([[1], []], [0, 1], r"train\.src, line 2: .* got ''"),
        ([[1]], [2], r"train\.label, line 1: expected integers of 0\.\.1, got '2'"),
        ([[1]], ["1 0"], r"train\.label, line 1: expected one label, got 2"),
        ([[1], [2]], [0], r"the same number of lines.*train\.src: 2, train\.label: 1"),
        ([], [], r"train\.src: expected lines, got an empty file"),
    ],
)
def test_malformed_files_of_integers(tmp_path, rows, labels, message):
    folder = originals.token_files(tmp_path / "in", {".src": rows}, labels)
    with pytest.raises(ValueError, match=message):
        text.prepare(tmp_path / "data", path=folder)


def test_images_of_another_size(tmp_path):
    for pixels in (1023, 1025):
        folder = originals.token_files(
            tmp_path / str(pixels), {".src": [[7] * pixels]}, [0]
        )
        expected = rf"train\.src, line 1: expected 1024 integers, got {pixels}$"
        with pytest.raises(ValueError, match=expected):
            image.prepare(tmp_path / "data", path=folder)


@pytest.mark.parametrize("module", [text, image, retrieval])
def test_paths_without_data(tmp_path, module):
    with pytest.raises(ValueError, match=r"--data\.path: .*nowhere, which"):
        module.prepare(tmp_path / "data", path=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"--data\.path: expected .*, got .*"):
        module.prepare(tmp_path / "data", path=tmp_path)
    assert not (tmp_path / "data").exists()
    originals.write(tmp_path, {"input/train.src": b"1\n", "label/train.label": b"1\n"})
    with pytest.raises(ValueError, match=r"got no .*input/valid\.src"):
        module.prepare(tmp_path / "data", path=tmp_path)
