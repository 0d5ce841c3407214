"""Time series: the files, and the dataset that they make."""

import importlib.util
import struct
import sys
import zipfile

import numpy as np
import pytest

from lra_jax.data import pipeline, series, series_files
from lra_jax.data.packing import pack

HEADER = """#A comment
% another
@problemName Two
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true ae oe
@data
"""
TRAIN = f"""{HEADER}1.5,1.0,?,2.0:0,1,2,3:ae
1e1,-2.5:NaN,4:oe

3,3,3:1,1,1:ae
1,2,3:4,5,6:oe
1,2,3:4,5,7:ae
2,2:4,5:oe
2,1:4,5:ae
2,0:4,5:oe
"""
TEST = f"{HEADER}1,2,3,4,5,6:?,?,?,?,?,?:oe\n"
ARRAYS = ("tokens", "lengths", "labels")
NUMBERS = "@timestamps false\n@univariate true\n@targetlabel true\n@data\n"


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "Two", TRAIN, TEST)


def write(folder, train, test, name="Two"):
    folder.mkdir(exist_ok=True)
    for split, text in (("TRAIN", train), ("TEST", test)):
        (folder / f"{name}_{split}.ts").write_bytes(text.encode())
    return folder


def prepare(path, **settings):
    settings = {"max_length": None, "validation": "holdout", "seed": 0, **settings}
    return series.prepare(path=path, **settings)


def test_a_file_of_the_archive(folder):
    splits = series_files.read(folder)
    assert sorted(splits) == ["test", "train"]
    values, labels, _ = splits["train"]
    assert labels.tolist() == ["ae", "oe"] * 4
    assert [x.shape for x in values[:3]] == [(4, 2), (2, 2), (3, 2)]
    np.testing.assert_array_equal(values[0], [[1.5, 0], [1, 1], [np.nan, 2], [2, 3]])
    np.testing.assert_array_equal(values[1], [[10, np.nan], [-2.5, 4]])
    for file in folder.iterdir():
        assert series_files.find(file) == series_files.find(folder)


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    text = "\ufeff" + TRAIN.replace("\n", "\r\n")
    folder = write(tmp_path / "Two", text, TEST)
    assert series_files.read(folder)["train"].labels.tolist() == ["ae", "oe"] * 4


def test_several_pairs_in_a_folder(folder):
    write(folder, TRAIN, TEST, name="Two_eq")
    assert series_files.find(folder)[0].name == "Two_TRAIN.ts"
    other = folder.rename(folder.with_name("others"))
    with pytest.raises(ValueError, match=r"one NAME_TRAIN\.ts, got .*Two_eq_TRAIN"):
        series_files.find(other)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1,2:3,4", "label: expected one of ae, oe, got '3,4'"),
        ("1,2:3:ae", "example: expected channels of one length, got 1 and 2 steps"),
        ("1,2:ae", "example: expected 2 channels, as in the first example, got 1"),
        ("1,b:1,2:ae", "value: expected a number, got 'b'"),
        ("1,inf:1,2:ae", "value: expected a finite float32 number, got '1,inf'"),
        ("1,:1,2:ae", "value: expected a number, got ''"),
        ("(2007-01-01,1):ae", "value: expected a number, got '(2007-01-01'"),
        ("ae", "example: expected channels and a label, separated by colons, got 'ae'"),
    ],
)
def test_a_wrong_example_is_named(tmp_path, line, problem):
    folder = write(tmp_path / "Two", f"{HEADER}1,2:3,4:ae\n{line}\n", TEST)
    with pytest.raises(ValueError, match="expected") as error:
        series_files.read(folder)
    assert str(error.value) == f"{folder / 'Two_TRAIN.ts'}, line 12: {problem}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEADER, "expected examples after @data, got none"),
        (f"{HEADER}1,2:ae\n", "expected 2 channels, as @dimensions says, got 1"),
        (
            "1,2:ae\n",
            "line 1: header: expected @data before the examples, got '1,2:ae'",
        ),
        ("@classLabel false\n@data\n", "line 2: header: expected @classLabel true or"),
        (
            f"{NUMBERS}1,2:?\n",
            "line 5: label: expected a finite float32 number, got '?'",
        ),
        (
            f"{NUMBERS}1,2:nan\n",
            "line 5: label: expected a finite float32 number, got 'nan'",
        ),
        ("@a \xff\n".encode("latin-1"), "line 1: .*utf-8"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, problem):
    file = tmp_path / "Two_TRAIN.ts"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=problem) as error:
        series_files.read_ts(file)
    assert str(error.value).startswith(str(file))


def test_splits_must_agree(tmp_path):
    def refuses(test, problem):
        with pytest.raises(ValueError, match=problem):
            series_files.read(write(tmp_path / "Two", TRAIN, test))

    narrow = HEADER.replace("@dimensions 2", "@dimensions 1")
    refuses(f"{narrow}1,2:ae\n", "expected 2 channels, as in training, got 1")
    refuses(f"{NUMBERS}1,2:3,4:5\n", "expected labels of one kind, got others in test")
    other = HEADER.replace("ae oe", "ae oe ue")
    refuses(f"{other}1:2:ue\n", "expected classes of the training split, got ue")


def test_missing_files(tmp_path, folder):
    (folder / "Two_TEST.ts").unlink()
    for path, problem in (
        (folder, "Two_TEST.ts, which does not exist"),
        (tmp_path, "a folder with one NAME_TRAIN.ts, got .* with none"),
        (tmp_path / "gone", "which does not exist"),
    ):
        with pytest.raises(ValueError, match=problem):
            series_files.find(path)
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"NAME_TRAIN.ts or .npz, or a folder"):
        series_files.find(tmp_path / "a.csv")


def test_numbers_as_labels(tmp_path):
    lines = "".join(f"{i},1:{i / 4}\n" for i in range(10))
    folder = write(tmp_path / "Sum", NUMBERS + lines, f"{NUMBERS}5,1,0:1.5\n", "Sum")
    dataset = prepare(folder)
    assert dataset.has_numbers and dataset.num_classes == 1
    mean, deviation = dataset.scale
    train = dataset.labels("train") * deviation + mean
    assert len(train) == 8 and dataset.labels("train").dtype == np.float32
    np.testing.assert_allclose(dataset.labels("train").std(), 1, rtol=1e-6)
    np.testing.assert_allclose(dataset.labels("test") * deviation + mean, [1.5], 1e-6)
    assert dataset.answer("test", 0) == "number 1.5"
    assert dataset.lengths("test").tolist() == [2]  # The longest of training.


def test_arrays_in_an_npz(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"{split}_{name}": value
        for split, count in (("train", 20), ("valid", 3), ("test", 4))
        for name, value in (
            ("values", rng.normal(size=(count, 6, 2)).astype(np.float32)),
            ("lengths", rng.integers(1, 7, size=count)),
            ("labels", np.arange(count) % 3),
        )
    }
    file = tmp_path / "mine.npz"
    np.savez(file, **arrays)
    dataset = prepare(file)
    assert (dataset.name, dataset.classes, dataset.num_classes) == ("mine", None, 3)
    assert dataset.labels("valid").tolist() == [0, 1, 2]
    for split in dataset.splits:
        lengths = arrays[f"{split}_lengths"].clip(max=dataset.max_length)
        np.testing.assert_array_equal(dataset.lengths(split), lengths)
    for name, value, problem in (
        ("train_values", None, r"train_values: expected numbers .*, got none"),
        ("train_labels", None, "train_labels: expected one for each of 20 .* none"),
        ("test_lengths", np.zeros(4, int), "test_lengths: expected 1 to T=6, got 0"),
        ("test_labels", np.zeros(3, int), "test_labels: expected one for each of 4"),
        (
            "test_labels",
            np.full(4, np.nan),
            "test_labels: expected finite float32 numbers",
        ),
        ("train_values", np.zeros((20, 6, 2), "U1"), "train_values: expected numbers"),
        ("train_values", np.full((20, 6), np.inf), "train_values: expected finite"),
        ("train_values", np.full((20, 6), 1e308), "train_values: expected finite"),
    ):
        changed = {n: a for n, a in arrays.items() if n != name}
        np.savez(file, **changed if value is None else changed | {name: value})
        with pytest.raises(ValueError, match=problem) as error:
            series_files.read(file)
        assert str(error.value).startswith(f"{file}: ")
    file.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"mine\.npz: expected an \.npz file, got"):
        series_files.read(file)


def test_objects_in_an_npz_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", train_values=np.array([{}], object))
    with pytest.raises(ValueError, match=r"expected an \.npz file"):
        series_files.read(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000000,)}",
        "[1, 2",
        "(" * 3_000,
    ],
)
def test_an_npz_with_a_damaged_header_is_named(tmp_path, header):
    file = tmp_path / "a.npz"
    size = struct.pack("<H", len(header) + 1)
    with zipfile.ZipFile(file, "w") as archive:
        content = b"\x93NUMPY\x01\x00" + size + header.encode() + b"\n"
        archive.writestr("train_values.npy", content)
    with pytest.raises(ValueError, match=r"a\.npz: expected an \.npz file"):
        series_files.read(file)


def test_gaps_are_interpolated():
    nan = np.nan
    values = np.array([[nan, nan], [1, nan], [nan, nan], [nan, nan], [4, nan]])
    filled = series.fill_gaps(values)
    np.testing.assert_array_equal(filled[:, 0], [1, 1, 2, 3, 4])
    assert np.isnan(filled[:, 1]).all()


def test_channels_are_standardised_by_the_training_split(folder):
    dataset = prepare(folder, validation="test")
    assert dataset.token_shape == (2,) and dataset.max_length == 4
    train = np.concatenate([x["tokens"] for x in dataset.source("train")])
    assert train.dtype == np.float32
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(0), 1, rtol=1e-6)
    raw = series_files.read(folder)["train"].values
    steps = np.concatenate([series.fill_gaps(x) for x in raw])
    # The test has no value in its second channel, which is then at the mean.
    expected = (np.arange(1, 5) - steps[:, 0].mean()) / steps[:, 0].std()
    np.testing.assert_allclose(
        dataset.source("test")[0]["tokens"], np.stack([expected, 0 * expected], 1), 1e-5
    )
    assert dataset.classes == ["ae", "oe"] and dataset.answer("test", 0) == "label oe"


def test_a_constant_channel_is_zero():
    values = [np.array([[1.0, 5.0], [2.0, 5.0]]), np.array([[3.0, 5.0]])]
    one = series_files.Series(values, np.array(["0", "1"]))
    dataset = series.SeriesDataset("made", dict.fromkeys(series.SPLITS, one))
    assert all((x["tokens"][:, 1] == 0).all() for x in dataset.source("train"))


def test_a_fifth_of_each_class_is_held_out():
    labels = np.array(["1"] * 10 + ["2"] * 20 + ["10"] * 5)
    values = [np.full((1, 1), i) for i in range(35)]
    parts = series.hold_out(series_files.Series(values, labels), seed=0)
    words, counts = np.unique(parts["valid"].labels, return_counts=True)
    assert dict(zip(words, counts, strict=True)) == {"1": 2, "2": 4, "10": 1}
    both = np.concatenate([np.concatenate(x.values) for x in parts.values()])
    assert sorted(both[:, 0].tolist()) == list(range(35))
    again = series.hold_out(series_files.Series(values, labels), seed=1)
    assert again["valid"].values != parts["valid"].values


def test_settings_and_files_decide_on_the_fingerprint(folder):
    first = prepare(folder)
    assert prepare(folder).fingerprint == first.fingerprint
    assert prepare(folder, seed=1).fingerprint != first.fingerprint
    assert prepare(folder, max_length=2).fingerprint != first.fingerprint
    assert prepare(folder, max_length=2).max_length == 2


def test_japanese_vowels_without_importing_aeon():
    if importlib.util.find_spec("aeon") is None:
        pytest.skip("needs the extra series")
    dataset = prepare(None)
    assert "aeon" not in sys.modules
    assert [dataset.num_examples(x) for x in dataset.splits] == [216, 54, 370]
    assert (dataset.token_shape, dataset.num_classes) == ((12,), 9)
    assert dataset.max_length == 26


def test_how_to_get_the_default(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install lra_jax\[series\]"):
        prepare(None)


def test_batches_are_padded_with_zeros(folder):
    dataset = prepare(folder, validation="test")
    batches = pipeline.train_iterator(
        dataset, batch_size=4, seed=0, num_steps=4, buckets=(2, 4), num_threads=0
    )
    source = dataset.source("train")
    labels = dataset.labels("train").tolist()
    rows = {x["tokens"].tobytes(): y for x, y in zip(source, labels, strict=True)}
    for batch in batches:
        assert (batch["tokens"].dtype, batch["labels"].dtype) == (np.float32, np.int32)
        assert batch["tokens"].shape[1:] in ((2, 2), (4, 2))
        for tokens, length, label in zip(*(batch[x] for x in ARRAYS), strict=True):
            assert rows[tokens[:length].tobytes()] == label
            assert not tokens[length:].any()


def test_packed_vectors_and_numbers():
    rng = np.random.default_rng(0)
    lengths = np.array([3, 5, 2, 1], np.int32)
    tokens = rng.normal(size=(4, 5, 2)).astype(np.float32)
    labels = np.arange(4, dtype=np.float32) / 2
    made = pack({"tokens": tokens, "lengths": lengths, "labels": labels}, 6)
    assert made["tokens"].shape == (*made["segment_ids"].shape, 2)
    assert sorted(made["labels"][~np.isnan(made["labels"])].tolist()) == [
        0,
        0.5,
        1,
        1.5,
    ]
    for row, number in np.argwhere(~np.isnan(made["labels"])).tolist():
        example = int(2 * made["labels"][row, number])
        inside = made["segment_ids"][row] == number + 1
        np.testing.assert_array_equal(
            made["tokens"][row, inside], tokens[example, : lengths[example]]
        )


def test_series_of_several_classes_are_held_out_whatever_they_are():
    """Nearly every combination of classes is unique."""
    labels = np.array([f"{i},{i + 1}" for i in range(50)])
    values = [np.full((2, 1), i, float) for i in range(50)]
    made = series_files.Series(values, labels, several=True)
    assert len(series.hold_out(made, seed=0)["valid"].labels) == 10
