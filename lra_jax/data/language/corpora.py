"""Documents of a corpus, by split.

The default is the source of Python's own standard library, which every machine has. It
differs between versions of Python, so results name the version, and the fingerprint.
"""

import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from lra_jax.data import checks
from lra_jax.errors import expected

SPLITS = ("train", "valid", "test")
# Of validation and of test, each.
_SHARE = 0.03
# Tests, files that an installation adds or makes, and the text of the manual.
_NO_SOURCE = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages"),
    *("__pycache__", "lib-dynload", "pydoc_data"),
}
_GENERATED = ("_sysconfigdata", "_sysconfig_vars")


class Corpus(NamedTuple):
    """Attributes: `name`, for people; `documents`, by split, in bytes."""

    name: str
    documents: Mapping[str, Sequence[bytes]]


def standard_library() -> Corpus:
    """The source files of the running Python, without its tests.

    Raises:
      ValueError: they are not there, as in a frozen application.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in _listed(root, "*.py", leave_out=_NO_SOURCE)
        if not file.name.startswith(_GENERATED)
    ]
    if not files:
        got = f"none in {root}: name other texts"
        raise expected("--data.path", "the sources of the standard library", got)
    name = f"standard library of Python {platform.python_version()}"
    return _by_file(name, root, files)


def of_path(path: str, pattern: str = "*") -> Corpus:
    """The texts of a file, or of a folder.

    A folder is split by file, in an order that depends on the files' names alone; fewer
    than three files are each cut into three parts.

    Args:
      path: a file, or a folder, of which hidden files and folders are left out.
      pattern: of the names of a folder's files.

    Raises:
      ValueError: there is no such file, or one is empty, unreadable or no text.
    """
    root = checks.existing(path)
    if root.is_file():
        return _by_file(root.name, root.parent, [root])
    files = _listed(root, pattern)
    if not files:
        raise expected("--data.path", f"files {pattern!r}", f"none in {root}")
    return _by_file(root.name, root, files)


def _listed(root: Path, pattern: str, leave_out: Iterable[str] = ()) -> list[Path]:
    """The files below a folder, hidden ones left out, in the order of their names."""
    found = []
    for folder, inside, names in os.walk(root):
        inside[:] = [
            name
            for name in inside
            if name not in leave_out and not name.startswith((".", "config-"))
        ]
        for name in names:
            if not name.startswith(".") and PurePath(name).match(pattern):
                found.append(Path(folder, name))
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _by_file(name: str, root: Path, files: Sequence[Path]) -> Corpus:
    texts = {file.relative_to(root).as_posix(): _read(file) for file in files}
    # An empty file, such as an __init__.py, has nothing to predict.
    texts = {place: text for place, text in texts.items() if text}
    if not texts:
        raise expected("--data.path", "text", "empty files")
    if len(texts) < len(SPLITS):
        parts = [_in_three(text) for text in texts.values()]
        documents = zip(*parts, strict=True)
        return Corpus(name, dict(zip(SPLITS, map(list, documents), strict=True)))
    return Corpus(f"{name}, {len(texts)} files", _divided(texts))


def _divided(texts: Mapping[str, bytes]) -> dict[str, list[bytes]]:
    """Whole documents: first those of validation, then of test, by their names' hash.

    Each gets documents until it has its share, and at least one.
    """
    total = sum(map(len, texts.values()))
    places = sorted(texts, key=lambda place: hashlib.sha256(place.encode()).digest())
    chosen: dict[str, str] = {}
    for left, split in ((2, "valid"), (1, "test")):
        size = 0
        while not size or (size < _SHARE * total and len(chosen) < len(texts) - left):
            place = places[len(chosen)]
            chosen[place] = split
            size += len(texts[place])
    found: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for place, text in texts.items():
        found[chosen.get(place, "train")].append(text)
    return found


def _in_three(text: bytes) -> tuple[bytes, bytes, bytes]:
    """The first part, then the shares of validation and test, cut after a line.

    The last one that ends in the share before a cut; where none does, within a line.
    """
    places = [round(len(text) * (1 - share * _SHARE)) for share in (3, 2, 1)]
    cuts = [
        text.rfind(b"\n", low, high) + 1 or high
        for low, high in itertools.pairwise(places)
    ]
    first, second = cuts
    return text[:first], text[first:second], text[second:]


def _read(file: Path) -> bytes:
    try:
        text = file.read_bytes()
    except OSError as error:
        got = f"{file}: {error.strerror}"
        raise expected("--data.path", "files that can be read", got) from error
    if b"\0" in text:
        got = f"{file}, which has a byte 0; choose files by --data.pattern"
        raise expected("--data.path", "text", got)
    return text
