"""Original archives: where to find them, whether they are intact, what they contain.

An archive is either named (``--data.path``), or found in the ``downloads`` folder of
the data, or downloaded to it. Files are never unpacked under the names in the archive:
a reader asks for the members that it knows, and keeps their bytes in memory or writes
them to files that it names itself. So no member can be written outside its folder.
"""

import contextlib
import dataclasses
import errno
import gzip
import http.client
import logging
import pathlib
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from typing import IO, Any

from lra_jax import progress
from lra_jax.errors import expected
from lra_jax.files import lock, open_regular, refuse_links
from lra_jax.seals import sha256

_TIMEOUT = 15
_BLOCK = 1 << 20
# More than any reader requests at once.
_LARGEST = 64 << 20
# Text becomes about four times as long when it is unpacked.
_MOST_RATIO = 20

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Archive:
    """A released file.

    Attributes:
      name: its file name.
      url: its address.
      size: in bytes; approximate if ``sha256`` is None.
      sha256: in hexadecimal; None if it is not known.
    """

    name: str
    url: str
    size: int
    sha256: str | None = None

    def describe(self) -> str:
        """``NAME (SIZE bytes) from URL``."""
        about = "" if self.sha256 else "about "
        return f"{self.name} ({about}{self.size:,} bytes) from {self.url}"


def fetch(archive: Archive, data_dir: pathlib.Path) -> pathlib.Path:
    """Finds an archive in the downloads folder, or downloads it once and checks it.

    Returns:
      The complete file.

    Raises:
      ValueError: there is no network, or the file downloaded or found there is a
        different one. The message gives file, size, address and folder.
      OSError: the disk is full.
    """
    folder = data_dir / "downloads"
    file = folder / archive.name
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / f".{archive.name}.lock"):
            if not file.exists():
                _download(archive, file)
    size = file.stat().st_size
    if archive.sha256 is not None and size != archive.size:
        needed = f"{archive.size:,} bytes, the size of the released file"
        advice = "Delete it to download it again, or give your own as --data.path"
        raise expected(str(file), needed, f"{size:,}. {advice}")
    check(archive, file)
    return file


def check(archive: Archive, file: pathlib.Path) -> None:
    """Refuses a damaged or altered copy of the released archive.

    A file of another size is assumed to be the user's own; a warning is logged when it
    has been read to the end.

    Raises:
      ValueError: the size is that of the released file, but the sha256 is not.
    """
    if archive.sha256 is None or file.stat().st_size != archive.size:
        return
    digest = sha256(file)
    if digest != archive.sha256:
        advice = f"Delete it, and get {archive.describe()} again"
        got = f"{digest}: damaged or altered. {advice}"
        raise expected(str(file), f"sha256 {archive.sha256}", got)


def may_be_gzip(file: pathlib.Path) -> bool:
    """Whether a file is named as gzipped ones are, or begins as they do."""
    if file.suffix in (".gz", ".tgz"):
        return True
    with open_regular(file) as stream:
        return stream.read(2) == b"\x1f\x8b"


@contextlib.contextmanager
def open_members(
    archive: Archive, file: pathlib.Path
) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """Context that yields name and content of every regular file in a gzipped tar.

    Read them in order, and to the end, where gzip's checksum is.

    Raises:
      ValueError: the file is not gzipped, or the archive is truncated or damaged.
    """
    if not may_be_gzip(file):
        needed = f"{archive.describe()}, gzipped, or a folder with its files"
        raise expected(str(file), needed, "a file of another kind")
    try:
        with (
            open_regular(file) as packed,
            _Bounded(fileobj=packed) as stream,
            tarfile.open(fileobj=stream, mode="r:") as tar,
        ):
            yield _members(tar, stream)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        got = f"{file.stat().st_size:,} bytes, cut short or damaged ({error})"
        again = f"Get {archive.describe()} again"
        raise expected(str(file), "a whole archive", f"{got}. {again}") from error
    size = file.stat().st_size
    if archive.sha256 is not None and size != archive.size:
        _logger.warning(
            "%s has %s bytes, the released %s has %s: read as a file of your own",
            *(file, f"{size:,}", archive.name, f"{archive.size:,}"),
        )


class _Bounded(gzip.GzipFile):
    """A stream that is read in blocks.

    tarfile would read a long name at once, and a small archive can hold a huge one.
    """

    def read(self, size: int | None = -1) -> bytes:
        """A block; refuses one of more than `_LARGEST` bytes."""
        if size is None or not 0 <= size <= _LARGEST:
            raise tarfile.ReadError(f"a block of {size} bytes")
        return super().read(size)


def _members(
    tar: tarfile.TarFile, stream: gzip.GzipFile
) -> Iterator[tuple[str, IO[bytes]]]:
    kept: Any = tar
    for member in tar:
        kept.members.clear()  # tarfile would keep all of them.
        content = tar.extractfile(member) if member.isreg() else None
        if content is not None:
            yield member.name.removeprefix("./"), content
    while stream.read(_BLOCK):
        pass


def extract(
    archive: Archive, file: pathlib.Path, members: dict[str, str], folder: pathlib.Path
) -> None:
    """Unpacks some members into a folder, which appears once all of them are there.

    Args:
      archive: what the file is, for messages.
      file: the archive.
      members: from the end of a member's name to the name of its file in ``folder``.
      folder: must not exist yet.

    Raises:
      ValueError: the archive is damaged, or lacks a member.
      OSError: the disk is full.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    missing = dict(members)
    try:
        with open_members(archive, file) as contents:
            for name, content in contents:
                ends = [end for end in missing if name.endswith(end)]
                if ends:
                    with (unfinished / missing.pop(ends[0])).open("wb") as target:
                        _unpack(content, target, unpacked_limit(file))
        if missing:
            ends = f"members that end in {', '.join(missing)}"
            raise expected(str(file), ends, "none")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def unpacked_limit(file: pathlib.Path) -> int:
    """The most bytes that a member may have: many more than text of that size has."""
    return max(_LARGEST, _MOST_RATIO * file.stat().st_size)


def _unpack(content: IO[bytes], target: IO[bytes], most: int) -> None:
    while block := content.read(_BLOCK):
        if target.tell() + len(block) > most:
            raise tarfile.ReadError(f"a member of more than {most:,} bytes")
        target.write(block)


def _download(archive: Archive, file: pathlib.Path) -> None:
    part = file.with_name(f".{file.name}.part")
    have = part.stat().st_size if part.exists() else 0
    with _explain_failure(archive, file):
        response = _request(archive.url, have)
    with response:
        have = have if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
        length = response.headers.get("Content-Length")
        total = archive.size if length is None else have + int(length)
        free = shutil.disk_usage(file.parent).free
        if free < total - have:
            reason = f"only {free:,} bytes are free for {archive.describe()}"
            raise OSError(errno.ENOSPC, reason)
        with open(part, "ab" if have else "wb", opener=refuse_links) as target:
            _copy(archive, file, response, target, total - have)
    size = part.stat().st_size
    if length is not None and size < total:
        got = f"{size:,} before the connection ended; the same command resumes there"
        raise expected(archive.url, f"{total:,} bytes", got)
    if archive.sha256 is not None and sha256(part) != archive.sha256:
        part.unlink()
        needed = f"{archive.name}, {archive.size:,} bytes with sha256 {archive.sha256}"
        got = f"another file of {size:,} bytes. {_advice(archive, file)}"
        raise expected(archive.url, needed, got)
    part.rename(file)


def _request(url: str, have: int) -> http.client.HTTPResponse:
    """Requests what follows the first ``have`` bytes, or failing that, everything."""
    headers = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()
    return urllib.request.urlopen(url, timeout=_TIMEOUT)


def _copy(
    archive: Archive,
    file: pathlib.Path,
    response: http.client.HTTPResponse,
    target: IO[bytes],
    size: int,
) -> None:
    """Copies to the end; after a broken connection the next call resumes the file."""

    def read() -> bytes:
        with _explain_failure(archive, file):
            return response.read(_BLOCK)

    progress.aside(f"downloading {archive.name}, {size / 1e6:.1f} MB")
    items, total = f"MB of {archive.name}", -(-size // _BLOCK)
    for block in progress.track(iter(read, b""), items, total, progress.aside):
        target.write(block)


@contextlib.contextmanager
def _explain_failure(archive: Archive, file: pathlib.Path) -> Iterator[None]:
    """Adds advice on what to do when the network fails."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        needed = f"{archive.name}, there or downloaded from {archive.url}"
        got = f"{reason}. {_advice(archive, file)}"
        raise expected(str(file), needed, got) from error


def _advice(archive: Archive, file: pathlib.Path) -> str:
    place = f"put it into {file.parent}, or name it with --data.path"
    return f"Get {archive.describe()}, and {place}"
