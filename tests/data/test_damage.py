"""Prepared data that are not as they were written: one line, before they are used."""

import pathlib
import shutil

import helpers
import pytest
from helpers import FEW_TREES

from lra_jax import seals
from lra_jax.data import listops

FILES = (
    *(f"lra_listops-{s}.array_record-00000-of-00001" for s in ("train", "valid")),
    "lra_listops-test.array_record-00000-of-00001",
    *("dataset_info.json", "features.json", "metadata.json", seals.NAME),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two data sets of the same sizes, and the folder of all data of the first."""
    homes = [tmp_path_factory.mktemp(name) for name in ("ours", "theirs")]
    made = [listops.prepare(h, seed=i, **FEW_TREES) for i, h in enumerate(homes)]
    return homes[0], *(pathlib.Path(dataset.folder) for dataset in made)


@pytest.fixture
def copied(both, tmp_path):
    """A copy to be spoilt: the folder of all data, ours, and the other one."""
    home, ours, theirs = both
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    return tmp_path, tmp_path / ours.relative_to(home), theirs


def test_the_table_has_every_file(both):
    assert sorted(FILES) == sorted(path.name for path in both[1].iterdir())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, ("gone", "flipped")[number % 2]) for number, name in enumerate(FILES)),
        *((FILES[0], how) for how in ("empty", "cut", "foreign")),
        *((seals.NAME, how) for how in ("cut", "foreign")),
        ("features.json", "foreign"),
    ],
)
def test_every_damage_is_one_line(copied, name, how):
    home, ours, theirs = copied
    helpers.damage(ours / name, how, theirs / name)
    # Without a seal the data are read; these features are the same in both.
    if (name, how) in ((seals.NAME, "gone"), ("features.json", "foreign")):
        again = listops.prepare(home, seed=0, **FEW_TREES)
        assert seals.read(ours) == ({"name": again.name}, "")
        return
    with pytest.raises(ValueError, match=f"^{ours}.*: expected ") as error:
        listops.prepare(home, seed=0, **FEW_TREES)
    line = str(error.value)
    # Another one's seal fits none of the files.
    assert name in line or (name, how) == (seals.NAME, "foreign")
    assert f"delete {ours} and prepare the data again" in line
    assert "\n" not in line


def test_the_whole_folder_of_other_data(copied):
    home, ours, theirs = copied
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    with pytest.raises(ValueError, match=r"expected .*/seed0-.*, got .*/seed1-"):
        listops.prepare(home, seed=0, **FEW_TREES)


def test_a_disk_that_fails_later(copied):
    """The folder is named, whatever array_record says of a file of other records."""
    home, ours, _ = copied
    dataset = listops.prepare(home, seed=0, **FEW_TREES)
    helpers.damage(ours / FILES[0], "cut")
    with pytest.raises(OSError, match=f"^{ours}: expected records") as error:
        dataset.source("train").__getitems__([0, 1])
    assert "\n" not in str(error.value)
