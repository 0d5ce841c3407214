"""Reading and writing the official files."""

import numpy as np
import pytest

from lra_jax.data import listops, listops_files

LINES = ["Source\tTarget", "( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [SM 8 ) 9 ) ] )\t7"]


def write_files(folder, lines=LINES):
    folder.mkdir(parents=True, exist_ok=True)
    for name in listops_files.FILES.values():
        (folder / name).write_bytes("\r\n".join([*lines, ""]).encode())
    return folder


def test_round_trip(dataset, data_dir, tmp_path):
    listops.write_tsv(dataset, tmp_path / "listops-1000")
    content = (tmp_path / "listops-1000" / "basic_test.tsv").read_bytes()
    assert content.startswith(b"Source\tTarget\r\n") and content.endswith(b"\r\n")
    again = listops.prepare(data_dir, path=tmp_path)
    assert again.splits == ("train", "valid", "test")
    assert again.fingerprint == dataset.fingerprint
    for split in dataset.splits:
        np.testing.assert_array_equal(again.labels(split), dataset.labels(split))
        np.testing.assert_array_equal(again.lengths(split), dataset.lengths(split))
        for a, b in zip(again.source(split), dataset.source(split), strict=True):
            np.testing.assert_array_equal(a["tokens"], b["tokens"])


@pytest.mark.parametrize(
    "place", ["", "listops-1000", "lra_release/lra_release/listops-1000"]
)
def test_nested_folders(tmp_path, place):
    write_files(tmp_path / "source" / place)
    dataset = listops.prepare(tmp_path / "data", path=tmp_path / "source")
    assert dataset.num_examples("valid") == 2
    assert dataset.labels("test").tolist() == [9, 7]
    assert listops.decode(dataset.source("train")[0]["tokens"]) == "[MAX 2 9 ]"


def test_prepared_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    source = write_files(tmp_path / "source")
    first = listops.prepare(tmp_path / "data", path=source)
    with monkeypatch.context() as patch:
        patch.setattr(listops_files, "read", None)
        second = listops.prepare(tmp_path / "data", path=source)
    assert second.folder == first.folder
    write_files(source, LINES[:2])
    third = listops.prepare(tmp_path / "data", path=source)
    assert third.num_examples("train") == 1
    assert first.num_examples("train") == 2


@pytest.mark.parametrize("lines", [[*LINES, ""], [line + " " for line in LINES[:1]]])
def test_blank_lines_are_skipped_and_stray_blanks_are_not(tmp_path, lines):
    source = write_files(tmp_path / "source", [*lines, *LINES[1:]])
    if lines[0] == LINES[0]:
        dataset = listops.prepare(tmp_path / "data", path=source)
        assert dataset.num_examples("train") == 4
    else:
        with pytest.raises(ValueError, match="line 1: header: expected"):
            listops.prepare(tmp_path / "data", path=source)


ARGUMENTS = b"( ( ( [MAX 2 ) 9 ) ] )"
BAD_LINES = {
    "missing column": (ARGUMENTS, "expected 2 columns, got 1"),
    "unknown token": (b"( ( ( [MEAN 2 ) 9 ) ] )\t9", "token 0: .*, got '.MEAN'"),
    "no target": (b"5\t", "Target: expected a digit, got ''"),
    "target 10": (ARGUMENTS + b"\t10", "Target: expected a digit, got '10'"),
    "no bracket": (b"( ( [MAX 2 ) 9 )\t9", "a `]` for each operator, got 1"),
    "no source": (b"\t9", r"expected 1\.\.2000 tokens .* got 0"),
    "wrong value": (ARGUMENTS + b"\t8", "Target: expected 9, .*, got 8"),
    "binary": (bytes(range(14, 256)), "expected UTF-8"),
    "too long": (b"[SM " + b"1 " * 2000 + b"]\t0", "got 2002"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_malformed_lines(tmp_path, kind):
    line, message = BAD_LINES[kind]
    source = write_files(tmp_path / "source")
    file = source / "basic_val.tsv"
    file.write_bytes(file.read_bytes() + line + b"\r\n")
    with pytest.raises(ValueError, match=message) as caught:
        listops.prepare(tmp_path / "data", path=source)
    assert str(caught.value).startswith(f"{file}, line 4: ")
    assert not list((tmp_path / "data").rglob("*.array_record*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got an empty file"),
        (b"Source\tTarget\r\n", "expected examples after the header, got none"),
        (b"Target\tSource\r\n9\t9\r\n", "line 1: header: expected"),
        (b"\x1f\x8b\x08\x00\xff\n\xfe\n", "line 1: expected UTF-8"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    source = write_files(tmp_path / "source")
    (source / "basic_test.tsv").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        listops.prepare(tmp_path / "data", path=source)
    assert "basic_test.tsv" in str(caught.value)


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        listops.prepare(tmp_path / "data", path=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"basic_train\.tsv.*with none of them"):
        listops.prepare(tmp_path / "data", path=tmp_path)
    source = write_files(tmp_path / "source")
    with pytest.raises(ValueError, match=r"got .*, a file"):
        listops.prepare(tmp_path / "data", path=source / "basic_val.tsv")
    (source / "basic_val.tsv").unlink()
    with pytest.raises(ValueError, match=r"got no basic_val\.tsv"):
        listops.prepare(tmp_path / "data", path=source)
