"""Downloads: from a server of the test's own; what happens without a network."""

import contextlib
import dataclasses
import hashlib
import http.server
import threading
import types

import originals
import pytest

from lra_jax.data import archives, text


class Handler(http.server.BaseHTTPRequestHandler):
    content = b""
    requests: list[str | None]
    ranges = True
    cut: int | None = None

    def do_GET(self):
        expected = self.headers.get("Range")
        type(self).requests.append(expected)
        if self.path != "/archive":
            self.send_error(403)
            return
        start = 0
        if expected is not None and self.ranges:
            start = int(expected.removeprefix("bytes=").removesuffix("-"))
        if start >= len(self.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(self.content[start : self.cut])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    handler = type("Own", (Handler,), {"requests": []})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def released(server, tmp_path, monkeypatch):
    """A small archive that stands for the released one, and where it is served."""
    handler, url = server
    archive = originals.imdb_archive(tmp_path / "served.tar.gz")
    handler.content = archive.read_bytes()
    digest = hashlib.sha256(handler.content).hexdigest()
    known = archives.Archive("a.tar.gz", f"{url}/archive", len(handler.content), digest)
    monkeypatch.setattr(text, "ARCHIVE", known)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return handler, known


def test_downloaded_once(tmp_path, released, capsys):
    handler, known = released
    dataset = text.prepare(tmp_path / "data")
    assert dataset.num_examples("test") == 16
    file = tmp_path / "data" / "downloads" / known.name
    assert file.read_bytes() == handler.content
    assert "downloading a.tar.gz, 0.0 MB" in capsys.readouterr().err
    # Other settings read the file that is there; equal ones not even that.
    text.prepare(tmp_path / "data", max_length=5)
    file.unlink()
    again = text.prepare(tmp_path / "data")
    assert again.fingerprint == dataset.fingerprint
    assert handler.requests == [None]


def test_a_file_put_there_by_hand(tmp_path, released):
    handler, known = released
    folder = tmp_path / "data" / "downloads"
    folder.mkdir(parents=True)
    (folder / known.name).write_bytes(handler.content)
    assert text.prepare(tmp_path / "data").num_examples("test") == 16
    assert handler.requests == []
    (folder / known.name).write_bytes(handler.content[:-1])
    with pytest.raises(ValueError, match="the size of the released file, got"):
        text.prepare(tmp_path / "data", max_length=5)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_gone_on_with(tmp_path, released, ranges):
    handler, known = released
    handler.ranges = ranges
    folder = tmp_path / "data" / "downloads"
    folder.mkdir(parents=True)
    (folder / f".{known.name}.part").write_bytes(handler.content[:50])
    assert text.prepare(tmp_path / "data").num_examples("test") == 16
    assert handler.requests == ["bytes=50-"]
    assert not list(folder.glob("*.part"))


def test_a_connection_that_ends_early(tmp_path, released):
    handler, known = released
    handler.cut = 100
    with pytest.raises(ValueError, match=rf"{known.size:,} bytes, got 100 before"):
        text.prepare(tmp_path / "data")
    handler.cut = None
    assert text.prepare(tmp_path / "data").num_examples("test") == 16
    assert handler.requests == [None, "bytes=100-"]


def test_a_part_that_is_too_long_already(tmp_path, released):
    handler, known = released
    folder = tmp_path / "data" / "downloads"
    folder.mkdir(parents=True)
    (folder / f".{known.name}.part").write_bytes(handler.content + b"x")
    assert text.prepare(tmp_path / "data").num_examples("test") == 16
    assert handler.requests == [f"bytes={known.size + 1}-", None]


def test_what_comes_is_another_file(tmp_path, released):
    handler, _ = released
    handler.content = handler.content[:-1] + b"x"
    with pytest.raises(ValueError, match=r"a\.tar\.gz, .* sha256 .*, got another file"):
        text.prepare(tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*a.tar.gz"))
    assert not list((tmp_path / "data").rglob("*.part"))


@pytest.mark.parametrize("case", ["refused", "forbidden", "no such host"])
def test_no_network(tmp_path, released, monkeypatch, case):
    """Without a second try, with file, size, address and where to put it."""
    handler, known = released
    url = {
        "refused": "http://127.0.0.1:1/archive",
        "forbidden": known.url.replace("archive", "secret"),
        "no such host": "http://lra-jax.invalid/archive",
    }[case]
    monkeypatch.setattr(text, "ARCHIVE", dataclasses.replace(known, url=url))
    with pytest.raises(ValueError, match="there or downloaded from") as caught:
        text.prepare(tmp_path / "data")
    assert len(handler.requests) == (case == "forbidden")
    folder = tmp_path / "data" / "downloads"
    for part in (known.name, f"{known.size:,} bytes", url, str(folder), "--data.path"):
        assert part in str(caught.value)
    assert not list(folder.glob("*a.tar.gz")) and not list(folder.glob("*.part"))


def test_the_disk_fills_up(tmp_path, released, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archives, "_copy", full)
    with pytest.raises(OSError, match="No space left"):
        text.prepare(tmp_path / "data")

    def usage(place):
        return types.SimpleNamespace(free=3 if "downloads" in str(place) else 10**12)

    monkeypatch.setattr(archives.shutil, "disk_usage", usage)
    with pytest.raises(OSError, match=r"only 3 bytes are free for a\.tar\.gz"):
        text.prepare(tmp_path / "data")
    monkeypatch.undo()
