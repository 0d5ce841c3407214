"""The originals of a task: an archive, a folder of its files, or MEGA's files.

The Long-Range Arena's release, `lra_release`, contains folders of tasks, and a second
`lra_release`, which most code reads: where both have a task, the inner one is used.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping

from lra_jax.data import archives, checks, token_files
from lra_jax.errors import InputError, expected


@dataclasses.dataclass(frozen=True)
class Original:
    """A user's files, or the released archive.

    Attributes:
      archive: the released archive.
      path: the user's archive or folder; None = download the released archive.
      layout: files of integers, if the folder contains such files.
      name: distinguishes the files, in their current state, from all others.
      size: size of a folder's files in bytes; None for an archive.
    """

    archive: archives.Archive
    path: pathlib.Path | None
    layout: Mapping[str, token_files.SplitFiles] | None
    name: str
    size: int | None = None

    def open(self, root: pathlib.Path) -> pathlib.Path:
        """The complete archive, or the folder; downloads go to ``root``.

        Raises:
          ValueError: there is no network, or the archive is damaged.
        """
        if self.path is None:
            return archives.fetch(self.archive, root)
        if self.path.is_file():
            archives.check(self.archive, self.path)
        return self.path


def locate(
    archive: archives.Archive,
    path: str | os.PathLike | None,
    list_files: Callable[[pathlib.Path], Iterable[pathlib.Path]],
    suffixes: tuple[str, ...] = (".src",),
) -> Original:
    """Determines what a path contains.

    Args:
      archive: the released archive.
      path: an archive, a folder of its files, the folder of an archive, or one with
        ``input`` and ``label``, see `token_files`; None = the released archive, which
        is downloaded to the folder of prepared data, ``data_dir``, when it is opened.
      list_files: lists the files in a folder on which the data depend.
      suffixes: suffixes of the sequences' files in MEGA's layout.

    Raises:
      ValueError: the path does not exist, ``list_files`` finds none, or files of MEGA's
        layout are missing.
    """
    if path is None:
        return Original(archive, None, None, "released")
    root = checks.existing_path(path)
    inner = root / archive.name
    if root.is_file():
        return Original(archive, root, None, checks.digest([root]))
    layout = token_files.find(root, suffixes)
    try:
        files = token_files.list_files(layout) if layout else list(list_files(root))
    except ValueError:
        if inner.is_file():
            return Original(archive, inner, None, checks.digest([inner]))
        raise
    size = sum(file.stat().st_size for file in files)
    return Original(archive, root, layout, checks.digest(files), size)


def unknown(archive: archives.Archive, folder: str, got: str) -> InputError:
    """Returns an error to raise: a path holds none of a task's originals."""
    needed = f"{archive.name}, its folder {folder}, or a folder with input/ and label/"
    return expected("--data.path", needed, got)


def inside(path: pathlib.Path, name: str) -> pathlib.Path:
    """The folder of that name in ``path``, if there is one; otherwise ``path``."""
    return path / name if (path / name).is_dir() else path


def in_release(root: pathlib.Path, below: str | os.PathLike) -> list[pathlib.Path]:
    """Possible places of a task's folder: ``root``, or ``below`` a release, the inner
    one first."""
    outer = root / "lra_release"
    return [root, outer / "lra_release" / below, outer / below, root / below]


def split_files(
    root: pathlib.Path, below: str, names: Mapping[str, str]
) -> dict[str, pathlib.Path]:
    """The file of each split in the first folder that has any.

    Args:
      root: a task's folder, or an unpacked release.
      below: the task's folder in the release.
      names: the file of each split.

    Raises:
      ValueError: some of the files are missing.
    """
    for folder in in_release(root, below):
        files = {split: folder / name for split, name in names.items()}
        missing = [file.name for file in files.values() if not file.is_file()]
        if not missing:
            return files
        if len(missing) < len(names):
            needed = ", ".join(names.values())
            raise expected(str(folder), needed, f"no {', '.join(missing)}")
    needed = f"a folder with {', '.join(names.values())}, or with {below}/"
    got = f"{root}, {'a file' if root.is_file() else 'with none of them'}"
    raise expected("--data.path", needed, got)
