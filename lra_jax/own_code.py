"""The source of a user's attention, which a run keeps in ``code/`` in its folder.

A result belongs to the code that produced it. `keep` copies the files, and refuses to
continue a run, or to show its result, once they have changed; `preferred` lets a run
be scored from any folder, with the code that it was trained with.
"""

import ast
import contextlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lra_jax import seals
from lra_jax.attention import registry
from lra_jax.errors import expected
from lra_jax.files import write_text

FOLDER = "code"
_INSTALLED = {"site-packages", "dist-packages"}


def sources(attention: str) -> dict[str, str]:
    """The Python files of a user's attention: path and text of each.

    They are those of its module and of its imports from the same place, a folder of the
    import path. In a notebook, which is not a file, it is the object's own source.
    """
    return {name: text for name, (_, text) in _modules(attention).items()}


def _modules(attention: str) -> dict[str, tuple[str, str]]:
    """The same, with the name of the module of each file."""
    mechanism = registry.resolve(attention)
    if not mechanism.foreign:
        return {}
    named = attention.partition(":")[0] if ":" in attention else mechanism.module
    if named == "__main__":
        try:
            text = inspect.getsource(mechanism.make or mechanism.attention)
            return {"__main__.py": (named, text)}
        except (OSError, TypeError):
            return {}
    top = _file(named.partition(".")[0])
    if top is None:  # A namespace, or not Python.
        return {}
    home = top.parent if top.name == "__init__.py" else top
    installed = _INSTALLED & {*top.parts}
    within = home if installed else home.parent
    found: dict[Path, tuple[str, str]] = {}
    names = [named, mechanism.module]
    while names:
        name = names.pop()
        file = _file(name)
        if file is None or file in found or not file.is_relative_to(within):
            continue
        # Excludes a virtual environment within the user's folder, and this package.
        if not installed and (_INSTALLED & {*file.parts} or name.startswith("lra_jax")):
            continue
        text = file.read_text(encoding="utf-8")
        found[file] = name, text
        parts = name.split(".")
        names += [".".join(parts[:n]) for n in range(1, len(parts))]
        names += _imported(text, name, file.name == "__init__.py")
    return {str(file.relative_to(home.parent)): found[file] for file in sorted(found)}


_KEPT: dict[str, tuple[Any, str]] = {}
"""The spec and the text of each module that this process has kept with a run."""


def _refuse_stale(attention: str) -> None:
    """Refuses files that were edited after a run, but not imported again."""
    for file, (name, text) in _modules(attention).items():
        spec = sys.modules[name].__spec__
        known, before = _KEPT.get(name, (None, ""))
        stale = known is spec is not None
        if stale and _said({file: before}, file) != _said({file: text}, file):
            wanted = f"{file} as this process imported it"
            got = "a changed file: restart Python, or importlib.reload the module"
            raise expected("--attention", wanted, got)
        _KEPT[name] = spec, text


def changed(workdir: Path, attention: str) -> list[str]:
    """The files of a run's code that have changed since; comments do not count."""
    old = _copies(workdir)
    if old is None:
        return []
    new = sources(attention)
    return sorted(
        name for name in old.keys() | new.keys() if _said(old, name) != _said(new, name)
    )


def digest(workdir: Path) -> str:
    """A hash of the code that a run has kept, without comments; "" if it has none."""
    files = _copies(workdir) or {}
    said = {name: _said(files, name) for name in files}
    return seals.digest(said) if said else ""


def keep(workdir: Path, attention: str, writes: bool = True) -> None:
    """Copies the code to the run's folder, or compares it with the copy there.

    Args:
      workdir: the run directory.
      attention: as in its config.
      writes: False only compares, for a process whose code another one has copied.

    Raises:
      ValueError: the code has changed since the run began, or since this process
        imported it.
    """
    made = ("metrics.jsonl", "result.json")
    begun = not writes or any((workdir / name).exists() for name in made)
    differing = changed(workdir, attention)
    if begun and differing:
        wanted = f"the code that this run began with, which is in {workdir / FOLDER}"
        got = (
            f"changes in {', '.join(differing)}; to train the changed code, give "
            "another --workdir"
        )
        raise expected("--attention", wanted, got)
    _refuse_stale(attention)
    for name, text in sources(attention).items() if writes else ():
        file = workdir / FOLDER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)


@contextlib.contextmanager
def preferred(workdir: Path) -> Iterator[None]:
    """Context in which a run's copy of the code comes first in the import path.

    Warns of files that were changed since, comments aside. A module that this process
    has imported already, from elsewhere, is not imported again.
    """
    kept = workdir / FOLDER
    if not kept.is_dir():
        yield
        return
    _warn_of_changes(workdir)
    sys.path.insert(0, str(kept))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(kept))


def _warn_of_changes(workdir: Path) -> None:
    kept = workdir / FOLDER
    for name, text in sorted((_copies(workdir) or {}).items()):
        loaded = _file(_module(name))
        is_late = loaded is not None and not loaded.is_relative_to(kept.resolve())
        now = loaded if is_late else _found(name, kept)
        if now is None or name == "__main__.py":
            continue
        if _said({name: text}, name) == _said({name: now.read_text("utf-8")}, name):
            continue
        if is_late:
            reason = f"is imported already in another version than that of {workdir}"
            reason += f"; restart Python to use the copy in {kept}"
        else:
            reason = f"changed since {workdir} was trained; the copy in {kept} is used"
        warnings.warn(f"{name} {reason}", stacklevel=4)


def _module(name: str) -> str:
    """The module of a file, given relative to a folder of the import path."""
    parts = Path(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _found(name: str, kept: Path) -> Path | None:
    """The file of that name on the import path, the copy left out."""
    for place in sys.path:
        if Path(place).resolve() != kept.resolve() and Path(place, name).is_file():
            return Path(place, name)
    return None


def _copies(workdir: Path) -> dict[str, str] | None:
    """The files in a run's ``code/``: path and text of each; None if it has none."""
    kept = workdir / FOLDER
    if not kept.is_dir():
        return None
    return {
        str(file.relative_to(kept)): file.read_text(encoding="utf-8")
        for file in kept.rglob("*.py")
    }


def _said(files: dict[str, str], name: str) -> str:
    text = files.get(name, "")
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:
        return text


def _file(name: str) -> Path | None:
    """The source file of a loaded module."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _imported(text: str, module: str, is_package: bool) -> Iterator[str]:
    """The names of modules that a source imports, and of what else may be a module."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package) if node.level else name
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
