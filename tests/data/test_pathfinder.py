"""Pathfinder as a dataset: generated, or read from folders like the released ones."""

import io
import pathlib
import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from lra_jax.data import pathfinder, pathfinder_images, pipeline

SMALL = {
    "level": "easy",
    "num_train": 80,
    "num_valid": 10,
    "num_test": 10,
    "num_distractors": 1,
    "processes": 1,
}


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """A chunk of 16 images, whose distribution does not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathfinder_images, "CHUNK_PIXELS", 16 * 32**2)
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return pathfinder.prepare(tmp_path_factory.mktemp("data"), **SMALL)


def test_splits(dataset):
    assert dataset.splits == ("train", "valid", "test")
    assert [dataset.num_examples(s) for s in dataset.splits] == [80, 10, 10]
    assert (dataset.vocab_size, dataset.num_classes) == (256, 2)
    assert dataset.image_shape == (32, 32) and dataset.max_length == 1024
    for split in dataset.splits:
        assert dataset.labels(split).mean() == 0.5
        assert (dataset.lengths(split) == 1024).all()
    example = dataset.source("test")[0]
    assert example["tokens"].dtype == np.uint8 and len(example["tokens"]) == 1024
    batch = next(iter(pipeline.EvalBatches(dataset, "test", "none", batch_size=10)))
    assert batch["tokens"].shape == (10, 1024) and batch["tokens"].max() == 255


def test_settings_do_not_share_a_folder(tmp_path, dataset):
    home = pathlib.Path(dataset.folder).parents[2]
    again = pathfinder.prepare(home, **SMALL | {"processes": 2})
    assert again.folder == dataset.folder
    changes = {"seed": 1}, {"level": "intermediate"}, {"num_distractors": 0}
    others = [pathfinder.prepare(tmp_path, **SMALL | change) for change in changes]
    assert len({d.fingerprint for d in (dataset, *others)}) == 4


def test_easier_levels_come_first_and_leave_the_others_alone(tmp_path):
    settings = {"num_train": 3, "num_valid": 2, "num_test": 2, "processes": 1}
    alone = {
        level: pathfinder.prepare(tmp_path, level=level, **settings)
        for level in ("easy", "hard")
    }
    both = pathfinder.prepare(tmp_path, level="hard", easier=("easy",), **settings)
    assert [both.num_examples(split) for split in both.splits] == [6, 2, 2]
    assert both.folder != alone["hard"].folder
    for split, sources in {
        "train": [(alone["easy"], "train"), (alone["hard"], "train")],
        "valid": [(alone["hard"], "valid")],
        "test": [(alone["hard"], "test")],
    }.items():
        expected_tokens = [x["tokens"] for d, name in sources for x in d.source(name)]
        actual = [x["tokens"] for x in both.source(split)]
        np.testing.assert_array_equal(actual, expected_tokens)
    # As many distractors in every level are other images than LRA's number for each.
    fives = pathfinder.prepare(
        tmp_path, level="hard", easier=("easy",), num_distractors=5, **settings
    )
    assert fives.fingerprint != both.fingerprint


def test_a_path_that_does_not_exist_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="/no/such/folder, which does not exist"):
        pathfinder.prepare(tmp_path, **SMALL, path="/no/such/folder")
    assert not list(tmp_path.iterdir())


def line(folder, number, label):
    return f"imgs/{folder} sample_{number}.png {number} {label} 1.0 14 4 2 0.5 1 1"


@pytest.fixture
def release(tmp_path):
    """The hard level, three batches of ten images; one has no bytes."""
    root = tmp_path / "lra_release"
    level = root / "pathfinder32" / "curv_contour_length_14"
    (level / "metadata").mkdir(parents=True)
    for folder in (0, 2, 10):
        images = level / "imgs" / str(folder)
        images.mkdir(parents=True)
        for number in range(10):
            value = 20 * number + folder
            pixels = np.full((32, 32), value, np.uint8)
            Image.fromarray(pixels).save(images / f"sample_{number}.png")
        lines = [line(folder, number, number % 2) for number in range(10)]
        (level / "metadata" / f"{folder}.npy").write_text("\n".join(lines) + "\n")
    (level / "imgs" / "2" / "sample_7.png").write_bytes(b"")
    return root


def level_of(release):
    return release / "pathfinder32" / "curv_contour_length_14"


def examples(dataset):
    return {
        (int(e["tokens"][0]), int(e["label"]))
        for split in dataset.splits
        for e in dataset.source(split)
    }


def test_released_folders(release, tmp_path, caplog):
    dataset = pathfinder.prepare(tmp_path / "data", path=release)
    assert "1 images without bytes are left out" in caplog.text
    assert "sample_7.png" in caplog.text
    assert [dataset.num_examples(s) for s in dataset.splits] == [25, 2, 2]
    expected = {(20 * n + k, n % 2) for k in (0, 2, 10) for n in range(10)}
    assert examples(dataset) == expected - {(142, 1)}
    assert dataset.image_shape == (32, 32)
    reordered = pathfinder.prepare(tmp_path / "data", path=release, seed=1)
    assert reordered.fingerprint != dataset.fingerprint
    assert examples(reordered) == examples(dataset)


def test_images_that_are_left_out_are_counted(release, tmp_path, caplog):
    """A damaged release can lack metadata, or have some twice."""
    metadata = level_of(release) / "metadata"
    (metadata / "10.npy").write_text((metadata / "0.npy").read_text())
    dataset = pathfinder.prepare(tmp_path / "data", path=release)
    assert "10 images that no metadata list are left out" in caplog.text
    assert "10 second rows of an image are left out" in caplog.text
    assert sum(dataset.num_examples(s) for s in dataset.splits) == 19


def test_changed_images_are_other_data(release, tmp_path):
    before = pathfinder.prepare(tmp_path / "data", path=release)
    black = Image.fromarray(np.zeros((32, 32), np.uint8))
    for file in level_of(release).rglob("*.png"):
        black.save(file)
    changed = pathfinder.prepare(tmp_path / "data", path=release)
    assert changed.fingerprint != before.fingerprint
    # One of them had no bytes before.
    assert [changed.num_examples(s) for s in changed.splits] == [24, 3, 3]
    assert all(not example["tokens"].any() for example in changed.source("train"))


def test_the_places_where_a_release_may_lie(release, tmp_path):
    whole = pathfinder.prepare(tmp_path / "data", path=release).fingerprint
    for path in (level_of(release), release / "pathfinder32", release.parent):
        dataset = pathfinder.prepare(tmp_path / "others", path=path)
        assert dataset.fingerprint == whole
    nested = tmp_path / "nested" / "lra_release"
    nested.mkdir(parents=True)
    shutil.copytree(release, nested / "lra_release")
    dataset = pathfinder.prepare(tmp_path / "others", path=nested.parent)
    assert dataset.fingerprint == whole


@pytest.mark.parametrize("kind", [str, bytes])
def test_metadata_as_the_generator_writes_them(release, tmp_path, kind):
    """Under Python 2, for which it was made, strings are bytes."""
    whole = pathfinder.prepare(tmp_path / "data", path=release).fingerprint
    for file in (level_of(release) / "metadata").glob("*.npy"):
        table = np.array([row.split() for row in file.read_text().splitlines()])
        np.save(file, table.astype(kind))
    assert pathfinder.prepare(tmp_path / "data", path=release).fingerprint == whole


def edit(release, text):
    (level_of(release) / "metadata" / "2.npy").write_text(f"{line(2, 0, 0)}\n{text}\n")


def overwrite(release, data):
    (level_of(release) / "imgs" / "10" / "sample_3.png").write_bytes(data)


def png(shape, mode=np.uint8):
    file = io.BytesIO()
    Image.fromarray(np.ones(shape, mode)).save(file, "png")
    return file.getvalue()


def enlarged(side):
    """A PNG whose header says that it is larger."""
    data = png((32, 32))
    header = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def flipped(data):
    """Changed in the last byte of its pixels."""
    place = data.index(b"IEND") - 9
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGED = [
    *(png((32, 32))[:-cut] for cut in (1, 8, 13)),
    flipped(png((32, 32))),
    *(enlarged(side) for side in (30_000, 10_000)),
    png((32, 32)) + bytes(10**6),
]


def overwrite_metadata(release, data, name="0"):
    (level_of(release) / "metadata" / f"{name}.npy").write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: edit(r, "imgs/2 sample_1.png 1"), "2.npy, line 2: .*got 3"),
        (lambda r: edit(r, line(2, 1, 2)), "line 2: .*label of 0 or 1, got '2'"),
        (lambda r: edit(r, line(2, 0, 1)), "line 2: expected the label 0, as before"),
        (lambda r: edit(r, line(2, 99, 0)), "line 2: .*image imgs/2/sample_99.png"),
        (lambda r: edit(r, line("../../..", 1, 0)), "expected an image imgs/../"),
        (lambda r: overwrite(r, png((33, 32))), r"sample_3.png: .*\(33, 32\)"),
        (lambda r: overwrite(r, png((32, 32, 3))), "sample_3.png: expected a grey"),
        (lambda r: overwrite(r, b"hello"), "sample_3.png: expected a whole PNG"),
        (lambda r: shutil.rmtree(level_of(r) / "metadata"), "metadata/ and imgs/"),
        (lambda r: overwrite_metadata(r, b"", "x"), "x.npy: expected a number"),
        (lambda r: overwrite_metadata(r, b"\x93NUMPY\x01"), "0.npy: expected a table"),
        (lambda r: overwrite_metadata(r, b"\xff\xfe"), "0.npy: expected a table"),
        *(
            (
                lambda r, data=data: overwrite(r, data),
                "sample_3.png: expected a .* got ",
            )
            for data in DAMAGED
        ),
    ],
)
def test_what_is_wrong_with_a_release_is_said(
    release, tmp_path, spoil, message, recwarn
):
    spoil(release)
    with pytest.raises(ValueError, match=message) as error:
        pathfinder.prepare(tmp_path / "data", path=release)
    assert "\n" not in str(error.value) and not recwarn.list
    assert not list((tmp_path / "data").rglob("dataset_info.json"))


def test_levels_and_sizes_have_their_own_folders(release, tmp_path):
    with pytest.raises(ValueError, match="pathfinder64/curv_contour_length_14"):
        pathfinder.prepare(tmp_path, path=release, size=64)
    with pytest.raises(ValueError, match="pathfinder32/curv_baseline"):
        pathfinder.prepare(tmp_path, path=release, level="easy")
    with pytest.raises(ValueError, match=r"expected curv_baseline, .* level easy"):
        pathfinder.prepare(tmp_path, path=level_of(release), level="easy")
    archive = tmp_path / "lra_release.gz"
    archive.touch()
    with pytest.raises(ValueError, match=r"a file; unpack it"):
        pathfinder.prepare(tmp_path, path=archive)


def test_too_few_images(release, tmp_path):
    for name in ("0", "10"):
        (level_of(release) / "metadata" / f"{name}.npy").unlink()
    with pytest.raises(ValueError, match="at least 10 images, for three splits, got 9"):
        pathfinder.prepare(tmp_path / "data", path=release)
