"""Images with a class each: folders, CIFAR-10 in colour, and the digits."""

import gzip
import importlib.util
import sys

import numpy as np
import pytest
from PIL import Image

from lra_jax.data import image, images
from lra_jax.data.images import read_picture
from lra_jax.data.memory import hold_out

RED, BLUE = (255, 0, 0), (0, 0, 255)


def draw(file, colour=RED, size=(6, 4), **settings):
    """A picture of one colour, with a black line on the left and on the right."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), colour, np.uint8)
    pixels[:, [0, -1]] = 0
    Image.fromarray(pixels).save(file, **settings)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 10), ("val", 2), ("test", 3)):
        for number in range(count):
            draw(tmp_path / split / "red" / f"{number:02}.png")
            file = tmp_path / split / "blue" / f"{number:02}.JPEG"
            draw(file, BLUE, quality=100, subsampling=0)
    (tmp_path / "train" / "red" / "notes.txt").touch()
    (tmp_path / ".cache").mkdir()
    return tmp_path


def prepare(path, size=4, seed=0):
    return images.prepare(path=path, size=size, seed=seed)


def test_a_folder_of_splits(folder):
    dataset = prepare(folder)
    assert [dataset.num_examples(x) for x in dataset.splits] == [20, 4, 6]
    assert dataset.classes == ["blue", "red"] and dataset.num_classes == 2
    assert (dataset.image_shape, dataset.token_shape) == ((4, 4), (3,))
    source, labels = dataset.source("test"), dataset.labels("test")
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    # The square in the middle, without the black lines at the sides.
    for index, colour in ((0, BLUE), (3, RED)):
        tokens = source[index]["tokens"]
        assert (tokens.shape, tokens.dtype) == ((16, 3), np.uint8)
        assert np.abs(tokens.astype(int) - colour).max() < 10
    assert dataset.answer("test", 3) == "label red"
    assert dataset.raw == {"kind": "pixels", "shape": [4, 4, 3]}


def test_a_folder_of_classes_alone(folder):
    dataset = prepare(folder / "train")
    assert [dataset.num_examples(x) for x in dataset.splits] == [12, 4, 4]
    for split in dataset.splits:
        counts = np.bincount(dataset.labels(split))
        assert counts[0] == counts[1]
    again, other = prepare(folder / "train"), prepare(folder / "train", size=2)
    assert again.fingerprint == dataset.fingerprint != other.fingerprint


def test_a_large_folder_is_read_while_training(folder, monkeypatch):
    in_memory = prepare(folder)
    monkeypatch.setattr(images, "MOST_BYTES", 0)
    lazy = prepare(folder)
    for split in lazy.splits:
        pairs = zip(lazy.source(split), in_memory.source(split), strict=True)
        assert all((a["tokens"] == b["tokens"]).all() for a, b in pairs)
    assert lazy.fingerprint == prepare(folder).fingerprint
    draw(folder / "train" / "red" / "00.png", BLUE, size=(9, 9))
    assert lazy.fingerprint != prepare(folder).fingerprint


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_pictures_of_other_kinds_are_read_in_colour(folder, mode):
    file = folder / "test" / "red" / "00.png"
    Image.new(mode, (4, 4), 1 if mode in "1P" else "white").save(file)
    assert prepare(folder).source("test")[3]["tokens"].shape == (16, 3)


def test_what_is_wrong_with_a_folder(folder):
    def refuses(problem, path=folder):
        with pytest.raises(ValueError, match=problem):
            prepare(path)

    cut = folder / "test" / "red" / "00.png"
    content = cut.read_bytes()
    for wrong in (content[:60], b"", b"GIF89a", content[:20] + b"\0" * 40):
        cut.write_bytes(wrong)
        refuses(f"{cut}: expected a PNG or JPEG image, got")
    cut.write_bytes(content)
    (folder / "test" / "green").mkdir()
    refuses("test/green: expected a class of the training split, got green")
    (folder / "test" / "green").rename(folder / "train" / "green")
    refuses(r"train/green: expected pictures ending in \.png, .*, got none")
    refuses("expected a folder for each of two classes or more", folder / "val" / "red")
    refuses("gone, which does not exist", folder / "gone")
    (folder / "a.zip").write_bytes(b"PK")
    refuses("cifar-10-binary", folder / "a.zip")


def test_cifar_in_colour(tmp_path):
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    records = {name: rng.integers(0, 10, (4, 3073), np.uint8) for name in names}
    for name, rows in records.items():
        rows[:, 1:] *= 20
        (tmp_path / name).write_bytes(rows.tobytes())
    dataset = prepare(tmp_path, size=32)
    assert [dataset.num_examples(x) for x in dataset.splits] == [18, 2, 4]
    rows = records["test_batch.bin"]
    assert dataset.labels("test").tolist() == rows[:, 0].tolist()
    planes = rows[1, 1:].reshape(3, 1024)  # Red, green and blue, each row by row.
    np.testing.assert_array_equal(dataset.source("test")[1]["tokens"], planes.T)
    grey = image.prepare(tmp_path / "prepared", path=tmp_path)
    expected = image.grey(planes[None])[0]
    np.testing.assert_array_equal(grey.source("test")[1]["tokens"], expected)
    assert prepare(tmp_path, size=8).source("train")[0]["tokens"].shape == (64, 3)


def test_the_format_of_the_digits(tmp_path, monkeypatch):
    folder = tmp_path / "sklearn" / "datasets" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").write_text("raise ImportError")
    rows = [
        [*(n % 17 for n in range(k, k + 64)), k % 10] for k in range(100)
    ]  # Ten of each class.
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (folder / "digits.csv.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.syspath_prepend(tmp_path)
    dataset = prepare(None, size=8)
    assert [dataset.num_examples(x) for x in dataset.splits] == [60, 20, 20]
    for split in dataset.splits:
        labels = dataset.labels(split)
        for row, label in zip(dataset.source(split), labels, strict=True):
            ink = np.rint(row["tokens"] / 255 * 16).astype(int).tolist()
            assert [*ink, label] in rows
    other = prepare(None, size=8, seed=1)
    assert dataset.source("test")[3]["tokens"].tolist() == (
        other.source("test")[3]["tokens"].tolist()
    )
    assert dataset.fingerprint != other.fingerprint


def test_the_digits_without_importing_scikit_learn():
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("needs the extra images")
    dataset = prepare(None, size=16)
    assert "sklearn" not in sys.modules
    assert [dataset.num_examples(x) for x in dataset.splits] == [1151, 287, 359]
    assert (dataset.image_shape, dataset.token_shape) == ((16, 16), ())


def test_how_to_get_the_default(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install lra_jax\[images\]"):
        prepare(None)


def test_a_share_of_each_group_is_held_out():
    groups = np.array([0] * 10 + [1] * 5 + [2] * 2)
    held = hold_out(groups, 0, "valid")
    assert np.bincount(groups[held], minlength=3).tolist() == [2, 1, 0]
    assert (held != hold_out(groups, 1, "valid")).any()
    with pytest.raises(ValueError, match="to hold out one, got 4 in all"):
        hold_out(np.array([0, 0, 1, 1]), 0, "valid")


def test_pixels_of_16_bits_are_refused(tmp_path):
    """Pillow would show nearly all of them as white."""
    file = tmp_path / "deep.png"
    Image.fromarray(np.full((8, 8), 30_000, np.uint16)).save(file)
    with pytest.raises(
        ValueError, match=r"deep.png: expected .* 8 bits a pixel, got 16 bits"
    ):
        read_picture(file, 8)


def test_arrays_in_python():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 2, 3, 3), np.uint8)
    labels = np.array([0, 1, 1, 0, 1, 0])
    splits = {"train": (pixels, labels)}
    splits |= {x: (pixels[n:], labels[n:]) for n, x in enumerate(("valid", "test"), 3)}
    dataset = images.ImageDataset("mine", splits, (2, 3, 3), ["a", "b"])
    assert [dataset.num_examples(x) for x in dataset.splits] == [6, 3, 2]
    assert (dataset.max_length, dataset.answer("test", 0)) == (6, "label b")
    row = dataset.source("valid")[1]["tokens"]
    np.testing.assert_array_equal(row, pixels[4].reshape(6, 3))
    splits["test"] = pixels[::2], labels[::2]
    other = images.ImageDataset("mine", splits, (2, 3, 3), ["a", "b"])
    assert other.fingerprint != dataset.fingerprint
