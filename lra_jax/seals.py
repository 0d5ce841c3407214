"""Seals: checksums to verify that the files of a folder are unchanged.

A seal is a file in the folder, with the SHA-256 of every other: 0.06 s per 100 MB.
"""

import concurrent.futures
import hashlib
import json
from pathlib import Path
from typing import Any

from lra_jax.files import open_regular, read_json, write_json

NAME = "seal.json"


def write(folder: Path, **about: Any) -> None:
    """Seals a folder in its current state, with some JSON values ``about`` it."""
    values = {"files": _digests(folder), **about}
    write_json(folder / NAME, {**values, "seal": digest(values)})


def read(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Compares a folder with its seal.

    Files added later are ignored.

    Returns:
      The seal's values about the folder, None if there is no seal; and, in words,
      the first file that has changed, or nothing.
    """
    try:
        values = read_json(folder / NAME)
        if values.pop("seal") != digest(values):
            raise ValueError(NAME)
        files = values.pop("files")
    except FileNotFoundError:
        return None, ""
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return {}, f"a damaged {NAME}"
    try:
        digests = _digests(folder)
    except OSError as error:
        return values, f"an unreadable {Path(error.filename or folder).name}"
    for name, needed in files.items():
        if digests.get(name) != needed:
            return values, f"{'another' if name in digests else 'no'} {name}"
    return values, ""


def digest(values: Any) -> str:
    """A hash of JSON values, whatever the order of their names."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, except the seal."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != NAME)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = list(pool.map(sha256, files))
    names = (file.relative_to(folder).as_posix() for file in files)
    return dict(zip(names, digests, strict=True))


def sha256(file: Path) -> str:
    """The SHA-256 of a file."""
    with open_regular(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
