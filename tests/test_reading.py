"""Files that somebody else wrote: no reader hangs, fills the memory or fails without
the file's name."""

import importlib
import json
import os
import struct
import zipfile
import zlib
from pathlib import Path

import helpers
import pytest

from lra_jax import files
from lra_jax.data import (
    archives,
    checks,
    listops_files,
    pathfinder_files,
    retrieval,
    token_files,
)
from lra_jax.data.language import corpora, labelled, wikitext
from lra_jax.models import arrays, pretrained, saved
from lra_jax.reports.runs import read_runs
from lra_jax.training import metrics, result, workdir

DEEP = "[" * 10_000 + "]" * 10_000
# Less deep than json itself can follow.
LESS_DEEP = "[" * 500 + "]" * 500

# By kind of file: its name, and the reader, which takes the file.
READERS = {
    "text": ("text/a.txt", lambda file: corpora.of_path(str(file.parent))),
    "WikiText": ("wiki.train.tokens", lambda file: wikitext.read(str(file.parent))),
    "WikiText's archive": ("a.zip", lambda file: wikitext.read(str(file))),
    "table": ("a.tsv", lambda file: labelled.prepare(path=str(file))),
    "ListOps": ("a.tsv", lambda file: list(listops_files.read(file, 2_000))),
    "lines": ("a.src", checks.line_count),
    "integers": ("a.src", lambda file: list(token_files._rows(file, 256, 4_000))),
    "pairs": ("a.tsv", lambda file: list(retrieval._read(file, 4_000))),
    "archive": ("a.tar", archives.may_be_gzip),
    "metadata": ("metadata/0.npy", lambda file: list(pathfinder_files._rows(file))),
    "image": ("a.png", lambda file: pathfinder_files._pixels(file, 32)),
    "metrics": ("metrics.jsonl", lambda file: metrics.read_metrics(file.parent)),
    "config": ("config.json", lambda file: workdir.read_config(file.parent)),
    "result": ("result.json", lambda file: result.read_result(file.parent)),
    "run": ("config.json", lambda file: read_runs(file.parent)),
    "model": (
        "a.json",
        lambda f: saved.read_description(f.with_suffix(".safetensors")),
    ),
    "weights": ("a.safetensors", arrays.read_arrays),
    "pretrained": ("config.json", pretrained.read_config),
}
JSON = [x for x in READERS if x in ("metrics", "config", "result", "run", "model")]
JSON += ["pretrained"]
LINES = ["ListOps", "lines", "integers", "pairs"]
AT_ONCE = [x for x in READERS if x not in (*LINES, "archive", "weights")]


@pytest.fixture
def place(tmp_path, request):
    """The reader's file, not there yet."""
    file = tmp_path / READERS[request.param][0]
    file.parent.mkdir(exist_ok=True)
    if request.param == "model":
        file.with_suffix(".safetensors").touch()
    return file


def refuse(name: str, file: Path, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message) as error:
        READERS[name][1](file)
    assert file.name in str(error.value) and "\n" not in str(error.value)


def by_name(names):
    both = [(name, name) for name in names]
    return pytest.mark.parametrize(("name", "place"), both, indirect=["place"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@by_name(READERS)
def test_a_pipe_is_refused_at_once(name, place):
    os.mkfifo(place)
    refuse(name, place, "not a regular file")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no devices")
@by_name(READERS)
def test_a_device_without_an_end_is_refused_at_once(name, place):
    place.symlink_to("/dev/zero")
    refuse(name, place, "not a regular file")


@by_name(AT_ONCE)
def test_a_file_larger_than_memory_is_refused_before_it_is_read(name, place):
    with place.open("wb") as file:
        file.truncate(1 << 40)  # It takes no space on the disk.
    refuse(name, place, "bytes|not a zip")


@pytest.mark.parametrize(
    ("name", "place", "content"),
    [
        ("ListOps", "ListOps", "Source\tTarget\r\n( ( [MAX 2 ) ] )\t2\r\n"),
        ("metadata", "metadata", "imgs/0 sample_0.png 0 1\n"),
        ("pairs", "pairs", "1.0\tP\tQ\tone\ttwo\n"),
        ("integers", "integers", "1 2 3\n"),
    ],
    indirect=["place"],
)
def test_the_mark_that_some_editors_write_first_is_left_out(name, place, content):
    read, contents = READERS[name][1], []
    for encoding in ("utf-8", "utf-8-sig"):
        place.write_text(content, encoding=encoding, newline="")
        contents.append(str(read(place)))
    assert contents[0] == contents[1] != "[]"


@by_name(LINES)
def test_a_line_without_an_end_is_refused(name, place):
    with place.open("wb") as file:
        file.truncate(1 << 40)
    refuse(name, place, "line 1: expected fewer than 16,777,216 bytes, got more")


@pytest.mark.parametrize("content", [DEEP, LESS_DEEP, '{"a": ' * 200 + "1" + "}" * 200])
@by_name(JSON)
def test_json_that_is_nested_deeply_is_refused(name, place, content):
    place.write_text(content + "\n")
    refuse(name, place, "expected metrics" if name == "metrics" else "deep")


@by_name(JSON)
def test_json_with_half_a_character_is_refused(name, place):
    place.write_text('{"task": "\\ud800", "step": 1, "split": "train"}\n')
    refuse(name, place, "expected metrics" if name == "metrics" else "surrogates")


def test_json_of_a_usual_depth_is_read(tmp_path):
    values = {"a": [{"b": [1, None, "["]}, "}" * 300]}
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert files.read_json(tmp_path / "a.json") == values


def npy(header: str) -> bytes:
    header = header.ljust(128 * -(-len(header) // 128) - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<U9', 'fortran_order': False, 'shape': (1000000000000, 4), }",
        "{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000000, 4), }",
        "{'descr': '<U9', 'fortran_order': False, 'shape': (1000000000000, 0), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1, 4), }",
        "{'descr': " + "(" * 4_000 + ")" * 4_000 + "}",
        "-" * 9_000 + "1",
    ],
    ids=["many rows", "no letters", "no columns", "numbers", "pickle", "deep", "signs"],
)
@by_name(["metadata"])
def test_a_hostile_npy_header_is_refused(name, place, header):
    place.write_bytes(npy(header))
    refuse(name, place, "expected a table of metadata")


def png(pixels: bytes, interlaced: int = 0) -> bytes:
    """A grey PNG of 32 x 32 with this content, whatever its length."""
    header = struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, interlaced)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@by_name(["image"])
def test_an_image_whose_pixels_end_early_is_refused(name, place):
    """Pillow would fill the other rows with zeros."""
    rows = (b"\0" + bytes([7] * 32)) * 32
    place.write_bytes(png(rows))
    assert (READERS[name][1](place) == 7).all()
    for content in (png(rows[: 33 * 10]), png(rows[:-1]), png(rows, interlaced=1)):
        place.write_bytes(content)
        refuse(name, place, "whole PNG, got fewer pixels")


@by_name(["image"])
def test_an_image_with_a_huge_text_is_refused(name, place):
    rows = (b"\0" + bytes(32)) * 32
    text = zlib.compress(bytes(8 << 20))
    content = b"zTXtkey\0\0" + text
    chunk = struct.pack(">I", len(content) - 4) + content
    chunk += struct.pack(">I", zlib.crc32(content))
    place.write_bytes(png(rows)[:33] + chunk + png(rows)[33:])
    refuse(name, place, "whole PNG, got Decompressed data too large")


@by_name(["image"])
def test_an_interlaced_image_and_what_follows_its_end_are_read(name, place):
    passes = [(4, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32)]
    rows = b"".join((b"\0" + bytes([7] * wide)) * high for high, wide in passes)
    place.write_bytes(png(rows, interlaced=1) + b"more")
    assert (READERS[name][1](place) == 7).all()


def test_a_small_archive_of_wikitext_cannot_fill_the_memory(tmp_path):
    file = tmp_path / "wikitext.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wiki.{split}.tokens", bytes((64 << 20) + 1))
    with pytest.raises(ValueError, match=r"wiki.train.tokens has more than 67,108,864"):
        wikitext.read(str(file))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["pos", "neg", "pos,even", "neg"], "line 4: expected one label, got 'pos"),
        (["a; b", "b;c", "a; b", "d"], "line 2: expected one label, got 'a; b'"),
        (["x|y", "y|z", "x|y", "y|z"], "line 2: expected one label"),
        (["Shoes, bags", "Books", "Shoes, bags", "Books"], None),
    ],
)
def test_several_labels_of_one_text_are_no_class(tmp_path, labels, message):
    file = tmp_path / "a.tsv"
    rows = [f"text {index}\t{label}" for index, label in enumerate(labels * 4)]
    file.write_text("\n".join(["text\tlabel", *rows]))
    if message is None:
        assert labelled.prepare(path=str(file)).classes == ["Books", "Shoes, bags"]
        return
    with pytest.raises(ValueError, match=message):
        labelled.prepare(path=str(file))


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("train", ["--data.path={}", "--task=lm"]),
        ("report", ["{}"]),
        ("evaluate", ["--workdir={}"]),
    ],
)
def test_commands_name_the_unknown_home_folder(program, flags, capsys):
    main = importlib.import_module(f"lra_jax.{program}").main
    with pytest.raises(SystemExit) as stop:
        main([flag.format("~nobody-x/y") for flag in flags])
    error = capsys.readouterr().err
    helpers.assert_one_error(stop.value.code, error, 2, "'~nobody-x/y': no such user")
