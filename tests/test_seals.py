"""A seal finds every change of the files below its folder."""

import json

import helpers
import pytest

from lra_jax import seals

FILES = ("a.json", "state/d/1", "state/d/2", "state/empty")


def write_folder(folder, text):
    """A sealed folder."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name.endswith("empty") else f"{text} {name}")
    seals.write(folder, run=text)
    return folder


@pytest.mark.parametrize("how", helpers.DAMAGE)
@pytest.mark.parametrize("name", [*FILES, seals.NAME])
def test_every_damage_is_seen(tmp_path, name, how):
    ours, theirs = (write_folder(tmp_path / text, text) for text in ("ours", "theirs"))
    assert seals.read(ours) == ({"run": "ours"}, "")
    before = (ours / name).read_bytes()
    helpers.damage(ours / name, how, theirs / name)
    about, reason = seals.read(ours)
    if (name, how) == (seals.NAME, "gone"):
        assert (about, reason) == (None, "")
    elif (name, how) == (seals.NAME, "foreign"):
        assert about == {"run": "theirs"} and reason == f"another {FILES[0]}"
    elif how == "gone":
        assert reason == f"no {name}"
    elif name == seals.NAME:
        assert (about, reason) == ({}, f"a damaged {name}")
    elif (ours / name).read_bytes() == before:
        assert reason == ""
    else:
        assert (about, reason) == ({"run": "ours"}, f"another {name}")


def test_a_seal_is_of_its_values_too(tmp_path):
    file = write_folder(tmp_path, "ours") / seals.NAME
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"run": "theirs"}))
    assert seals.read(tmp_path) == ({}, f"a damaged {seals.NAME}")


def test_files_that_came_later_do_not_count(tmp_path):
    (write_folder(tmp_path, "ours") / "later").touch()
    assert seals.read(tmp_path) == ({"run": "ours"}, "")
