"""The source of a user's own parts, which a run keeps in ``code/`` in its folder.

A result belongs to the code that produced it. `keep` copies the files, and refuses to
continue a run, or to show its result, once they have changed; with `prefer_copies` a
run is scored, from any folder, by the code that it was trained with.
"""

import ast
import contextlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lra_jax import seals
from lra_jax.attention import outside, registry
from lra_jax.errors import expected
from lra_jax.files import replacing

FOLDER = "code"
_INSTALLED = {"site-packages", "dist-packages"}


def sources(parts: Mapping[str, str]) -> dict[str, bytes]:
    """The Python files of a user's own parts: the path and content of each.

    These are the modules that the parts name, and whatever those import from the same
    folder of the import path. In a notebook, which is not a file, it is only the source
    of the object. Contents are bytes, because a file may name its own encoding.
    ``parts`` are `Config.own_parts`, ``package.module:thing`` by flag.
    """
    return {name: source for name, (_, source) in _modules(parts).items()}


def _modules(parts: Mapping[str, str]) -> dict[str, tuple[str, bytes]]:
    """The same, with the name of each file's module."""
    files: dict[str, tuple[str, bytes]] = {}
    for flag, path in parts.items():
        for name, (module, source) in _modules_of(flag, path).items():
            before = files.get(name, (module, source))[1]
            if name == "__main__.py" and source not in before:  # Several cells.
                source = before + b"\n\n" + source
            files[name] = module, source
    return files


def _modules_of(flag: str, path: str) -> dict[str, tuple[str, bytes]]:
    """The modules of one part."""
    named = path.partition(":")[0]
    if flag == "--attention":
        mechanism = registry.resolve(path)
        if not mechanism.foreign:
            return {}
        part, origin = mechanism.make or mechanism.attention, mechanism.module
    else:
        part = outside.load(path, flag)
        origin = getattr(part, "__module__", named)
    if named == "__main__":
        try:
            text = inspect.getsource(part)
            return {"__main__.py": (named, text.encode())}
        except (OSError, TypeError):
            return {}
    top = _file(named.partition(".")[0])
    if top is None:  # A namespace, or not Python.
        return {}
    home = top.parent if top.name == "__init__.py" else top
    installed = _INSTALLED & {*top.parts}
    within = home if installed else home.parent
    modules: dict[Path, tuple[str, bytes]] = {}
    names = [named, origin]
    while names:
        name = names.pop()
        file = _file(name)
        if file is None or file in modules or not file.is_relative_to(within):
            continue
        # Excludes a virtual environment within the user's folder, and this package.
        if not installed and (_INSTALLED & {*file.parts} or name.startswith("lra_jax")):
            continue
        source = file.read_bytes()
        modules[file] = name, source
        parts = name.split(".")
        names += [".".join(parts[:n]) for n in range(1, len(parts))]
        names += _imported_modules(source, name, file.name == "__init__.py")
    return {
        str(file.relative_to(home.parent)): modules[file] for file in sorted(modules)
    }


_KEPT: dict[str, tuple[Any, bytes]] = {}
"""The spec and the source of each module that this process has kept with a run."""


def _refuse_stale(parts: Mapping[str, str]) -> None:
    """Refuses files that were edited after a run, but not imported again."""
    for file, (name, source) in _modules(parts).items():
        spec = sys.modules[name].__spec__
        known, before = _KEPT.get(name, (None, b""))
        same_module = known is spec is not None
        if same_module and _without_comments(before) != _without_comments(source):
            needed = f"{file} as this process imported it"
            got = "a changed file: restart Python, or importlib.reload the module"
            raise expected(", ".join(parts), needed, got)
        _KEPT[name] = spec, source


def changed_files(workdir: Path, parts: Mapping[str, str]) -> list[str]:
    """The files of a run's code that have changed since; comments do not count."""
    if not (workdir / FOLDER).is_dir():
        return []
    old, new = _copies(workdir), sources(parts)
    return sorted(
        name
        for name in old.keys() | new.keys()
        if _without_comments(old.get(name)) != _without_comments(new.get(name))
    )


def digest(workdir: Path) -> str:
    """A hash of the code that a run has kept, without comments; "" if it has none."""
    files = {n: _without_comments(source) for n, source in _copies(workdir).items()}
    return seals.digest(files) if files else ""


def keep(workdir: Path, parts: Mapping[str, str], writes: bool = True) -> None:
    """Copies the code to the run's folder; refuses code that has changed since the run
    began, or since this process imported it.

    ``parts`` are `Config.own_parts`. A process that does not write only compares its
    code with what another one has copied.
    """
    results = ("metrics.jsonl", "result.json")
    has_begun = not writes or any((workdir / name).exists() for name in results)
    differing = changed_files(workdir, parts)
    if has_begun and differing:
        needed = f"the code that this run began with, which is in {workdir / FOLDER}"
        got = f"changes in {', '.join(differing)}; to train the changed code, give "
        got += "another --workdir"
        raise expected(", ".join(parts), needed, got)
    _refuse_stale(parts)
    for name, source in sources(parts).items() if writes else ():
        file = workdir / FOLDER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_bytes(source)


@contextlib.contextmanager
def prefer_copies(workdir: Path) -> Iterator[None]:
    """Context in which a run's copy of the code comes first in the import path.

    Warns of modules that this process has imported from elsewhere, in another version.
    """
    kept = workdir / FOLDER
    if not kept.is_dir():
        yield
        return
    _warn_of_modules_loaded_before(workdir)
    sys.path.insert(0, str(kept))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(kept))


def _warn_of_modules_loaded_before(workdir: Path) -> None:
    """Python does not import them again, so the run's copies of them are not used."""
    kept = workdir / FOLDER
    for name, source in sorted(_copies(workdir).items()):
        parts = Path(name).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        loaded = _file(module)
        if loaded is None or name == "__main__.py":
            continue
        is_copy = loaded.is_relative_to(kept.resolve())
        if not is_copy and _without_comments(source) != _without_comments(
            loaded.read_bytes()
        ):
            warnings.warn(
                f"{name} is imported already in another version than that of "
                f"{workdir}; restart Python to use the copy in {kept}",
                stacklevel=4,
            )


def _copies(workdir: Path) -> dict[str, bytes]:
    """The files in a run's ``code/``: path and content of each."""
    kept = workdir / FOLDER
    return {str(x.relative_to(kept)): x.read_bytes() for x in kept.rglob("*.py")}


def _without_comments(source: bytes | None) -> str:
    """A source as Python understands it; "" if there is none."""
    try:
        return ast.unparse(ast.parse(source or b""))
    except SyntaxError:
        return repr(source)


def _file(name: str) -> Path | None:
    """The source file of a loaded module."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _imported_modules(source: bytes, module: str, is_package: bool) -> Iterator[str]:
    """The names of modules that a source imports, and of what else may be a module."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package) if node.level else name
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
