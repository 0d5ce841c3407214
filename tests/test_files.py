"""Files that are whole or absent, and locks between processes."""

import os
import subprocess
import sys

import pytest

from lra_jax.files import lock, make_room, replacing, write_text


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "a.txt"
    write_text(file, "before\n")
    with pytest.raises(KeyError), replacing(file) as partial:
        partial.write_text("half")
        raise KeyError
    assert file.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_names_the_file_not_its_partial_one(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        write_text(tmp_path / "none" / "a.txt", "text")
    assert error.value.filename == str(tmp_path / "none" / "a.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"'[^']*folder'$"):
        write_text(tmp_path / "folder", "text")


def test_room_for_a_file_leaves_it_as_it_is(tmp_path):
    file = tmp_path / "new" / "a.txt"
    make_room(file)
    assert list(file.parent.iterdir()) == []
    file.write_text("before")
    make_room(file)
    assert file.read_text() == "before" and list(file.parent.iterdir()) == [file]
    for path in (file.parent, file / "b.txt"):
        with pytest.raises(OSError, match=r"directory|exists"):
            make_room(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    """As root, --predictions=/dev/stdout would otherwise remove it for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        for write in (make_room, lambda path: write_text(path, "text")):
            with pytest.raises(OSError, match="not a regular file"):
                write(path)
    assert pipe.is_fifo() and link.is_symlink()


def test_nothing_is_written_through_a_symbolic_link(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    for name in ("a.txt", "a.txt.partial", ".lock"):
        (tmp_path / name).symlink_to(theirs)
    write_text(tmp_path / "a.txt", "mine")
    assert (tmp_path / "a.txt").read_text() == "mine"
    with pytest.raises(OSError, match="symbolic links"), lock(tmp_path / ".lock"):
        pass
    assert theirs.read_text() == "precious"


def test_a_lock_leaves_the_content_alone(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    with lock(file), pytest.raises(TimeoutError), lock(file, wait=False):
        pass
    with lock(file, wait=False):
        pass
    assert file.read_text() == "precious"


def test_text_is_utf8_in_any_locale(tmp_path):
    code = (
        "import pathlib, sys; from lra_jax.files import write_text\n"
        "write_text(pathlib.Path(sys.argv[1]), 'Schr\\xf6der\\n')"
    )
    command = [sys.executable, "-X", "utf8=0", "-c", code, tmp_path / "x"]
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "x").read_bytes() == "Schröder\n".encode()
