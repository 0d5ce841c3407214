"""WikiText, from its original archive or the folder in it; nothing is downloaded.

Merity et al. 2017, arXiv:1609.07843. The archive ``wikitext-103-v1.zip`` (or
``wikitext-2-v1.zip``) holds ``wiki.train.tokens``, ``wiki.valid.tokens`` and
``wiki.test.tokens``, in which words are separated by blanks; in the raw archives they
end in ``.raw``. A document is an article, which begins with its title, `` = Title = ``.
"""

import itertools
import re
import zipfile
import zlib
from collections.abc import Container
from pathlib import Path

from lra_jax.data import archives, checks
from lra_jax.data.dataset import SPLITS
from lra_jax.data.language import corpora
from lra_jax.data.language.corpora import Corpus
from lra_jax.errors import expected
from lra_jax.files import open_regular, read_bytes

_FORMS = [
    {split: f"wiki.{split}.{form}" for split in SPLITS} for form in ("tokens", "raw")
]
# A blank line, followed by a title of the first level.
_TITLE = re.compile(rb"^ \r?\n(?= = [^=\n]+ = \r?\n)", re.MULTILINE)


def read(path: str) -> Corpus | None:
    """The articles of WikiText; None if a path holds something else.

    Args:
      path: the archive, its folder, or a folder with nothing else but one of them.

    Raises:
      ValueError: the path does not exist, a file is missing, the archive is damaged, or
        a folder holds WikiText beside other things, whose texts would be mixed.
    """
    root = checks.existing_path(path)
    if root.is_dir():
        root = _place(root)
    if root.is_dir():
        files = _files({file.name for file in root.iterdir()})
        if files is None:
            return None
        texts = {split: read_bytes(root / name) for split, name in files.items()}
    elif root.suffix == ".zip":
        texts = _unpack(root)
    else:
        return None
    articles = {split: _articles(text) for split, text in texts.items()}
    return Corpus(root.stem, articles)


def _place(root: Path) -> Path:
    """The folder or the archive of WikiText below a folder that holds nothing else, or
    that folder.

    Archives beside the folder, and hidden files, do not count.
    """
    places, packed, others = [], [], []
    for folder, names in corpora.folders(root):
        if any(one in folder.parents for one in places):
            continue
        if _files(names) is not None:
            places.append(folder)
            continue
        for name in names:
            (packed if name.endswith(".zip") else others).append(folder / name)
    if not places:
        return packed[0] if len(packed) == 1 and not others else root
    if len(places) > 1 or others:
        beside = [*map(str, places[1:]), *(file.name for file in others)]
        got = f"{root}, which also has {', '.join(sorted(beside)[:3])}"
        raise expected(
            "--data.path", f"one folder of texts, such as {min(places)}", got
        )
    return places[0]


def _files(names: Container[str]) -> dict[str, str] | None:
    """The file of each split, in the first form of which a file exists."""
    return next((x for x in _FORMS if any(y in names for y in x.values())), None)


def _articles(text: bytes) -> list[bytes]:
    """A text cut before each title; joined, the parts give the text again."""
    cuts = [0, *(m.start() for m in _TITLE.finditer(text)), len(text)]
    parts = (text[a:b] for a, b in itertools.pairwise(cuts))
    return [part for part in parts if part]


def _unpack(archive: Path) -> dict[str, bytes]:
    try:
        with open_regular(archive) as stream, zipfile.ZipFile(stream) as content:
            names = {Path(name).name: name for name in content.namelist()}
            files = _files(names) or _FORMS[0]
            missing = [name for name in files.values() if name not in names]
            if missing:
                got = f"{archive}, without {missing[0]}"
                raise expected("--data.path", "an archive of WikiText", got)
            most = archives.unpacked_limit(archive)
            return {
                split: _member(content, names[name], most)
                for split, name in files.items()
            }
    # RuntimeError: it needs a password, or a method of compression is not known.
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        got = f"{archive}: {error}"
        raise expected("--data.path", "an archive of WikiText", got) from error


def _member(content: zipfile.ZipFile, name: str, most: int) -> bytes:
    with content.open(name) as stream:
        text = stream.read(most + 1)
    if len(text) > most:
        raise zipfile.BadZipFile(f"{name} has more than {most:,} bytes")
    return text
