"""Reads the package's imports: draws them, and finds those that break the layers.

    python docs/architecture.py

writes docs/architecture.svg and the table in docs/architecture.md. Every import counts,
also one inside a function or under ``TYPE_CHECKING``; a module imported by a name that
is computed (`kernels.api` loads its backend that way) is not seen.
tests/test_architecture.py checks the rules with the functions of this file.
"""

import ast
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "architecture.svg"
MARKS = "<!-- imports -->", "<!-- end of imports -->"

COMMANDS = "command lines"
LAYERS: tuple[dict[str, float], ...] = (
    {COMMANDS: 0.5},
    {"analysis": 0.06, "benchmarking": 0.32, "runs": 0.72, "cli": 0.92},
    {"reports": 0.5},
    {"training": 0.5, "runtime": 0.29},
    {"tasks": 0.5},
    {"configs": 0.7},
    {"models": 0.36},
    {"own_code": 0.2, "data": 0.75},
    {"vocabularies": 0.5, "seals": 0.82},
    {"attention": 0.36},
    {"kernels": 0.36},
    {"progress": 0.2, "signals": 0.75},
    {"files": 0.5},
    {"errors": 0.5},
)
"""The parts of the house, top to bottom, each with its place from left to right.

An import goes down, never up or sideways.
"""

FLOOR = {
    "errors": "errors: one form of message, for every part",
    "files": "files: written whole, read with bounds",
    "progress": "progress: a line now and then",
    "signals": "signals: one line, at any moment",
}
"""Parts that all others may use: the picture leaves out the arrows to them."""

When = Literal["import", "call", "types"]


@dataclasses.dataclass(frozen=True)
class Import:
    """One import: ``target`` is a module of the package, or the name of another one.

    ``when`` it happens: as the module is imported, in a call of a function, or never,
    for an import under ``TYPE_CHECKING``.
    """

    source: str
    target: str
    when: When


@dataclasses.dataclass(frozen=True)
class Code:
    """One package: its modules, its command lines, and its imports.

    ``inside`` are the imports of its own modules, ``outside`` those of other packages.
    """

    modules: Mapping[str, Path]
    commands: frozenset[str]
    inside: frozenset[Import]
    outside: frozenset[Import]

    def part(self, module: str) -> str:
        """The part of the house that a module belongs to."""
        if module in self.commands:
            return COMMANDS
        return module.split(".")[1] if "." in module else "version"

    def arrows(self) -> set[tuple[str, str]]:
        """The pairs of parts of which the first imports the second."""
        parts = {module: self.part(module) for module in self.modules}
        pairs = {(parts[i.source], parts[i.target]) for i in self.inside}
        return {(a, b) for a, b in pairs if a != b and b != "version"}

    def at_import(self, module: str) -> set[str]:
        """All modules, also of other packages, that importing a module runs."""
        direct: dict[str, set[str]] = {}
        for one in self.inside | self.outside:
            if one.when == "import":
                direct.setdefault(one.source, set()).add(one.target)
        seen: set[str] = set()
        left = {module}
        while left:
            name = left.pop()
            seen.add(name)
            left |= (direct.get(name, set()) | _parents(name)) - seen
        return seen


def read(package: Path) -> Code:
    """Reads every module under a package's folder."""
    modules = {_name(path, package): path for path in package.rglob("*.py")}
    texts = {module: path.read_text() for module, path in modules.items()}
    imports = {
        Import(module, target, when)
        for module, text in texts.items()
        for target, when in _imports(ast.parse(text), modules)
    }
    commands = (name for name, text in texts.items() if _RUN in text)
    inside = frozenset(i for i in imports if i.target in modules)
    return Code(modules, frozenset(commands), inside, frozenset(imports - inside))


_RUN = 'if __name__ == "__main__":'


def circles(imports: Iterable[Import]) -> set[frozenset[str]]:
    """The largest sets of modules that each reach every other one (Tarjan, 1972)."""
    after: dict[str, list[str]] = {}
    for one in imports:
        after.setdefault(one.source, []).append(one.target)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    sets: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in after.get(module, ()):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                sets.add(frozenset(stack[at:]))
            del stack[at:]

    for module in list(after):
        if module not in order:
            visit(module)
    return sets


def against_the_layers(
    code: Code, layers: Sequence[Iterable[str]] = LAYERS
) -> set[tuple[str, str]]:
    """The imports, as pairs of modules, that do not go down.

    Raises:
      KeyError: for a module whose part is in no layer.
    """
    level = {name: n for n, layer in enumerate(layers) for name in layer}
    level["version"] = len(layers)
    parts = {module: code.part(module) for module in code.modules}
    return {
        (i.source, i.target)
        for i in code.inside
        if parts[i.source] != parts[i.target]
        and level[parts[i.source]] >= level[parts[i.target]]
    }


def table(code: Code) -> str:
    """The markdown table of the parts and their imports."""
    arrows = code.arrows()
    lines = ["| part | imports |", "|---|---|"]
    order = [name for layer in LAYERS for name in layer]
    for name in order:
        targets = [f"`{other}`" for other in order if (name, other) in arrows]
        shown = name if name == COMMANDS else f"`{name}`"
        lines.append(f"| {shown} | {', '.join(targets) or 'nothing'} |")
    return "\n".join(lines)


def steps(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that no chain of other arrows makes redundant."""

    def reach(start: str) -> Iterator[str]:
        for a, b in arrows:
            if a == start:
                yield b
                yield from reach(b)

    longer = {(a, far) for a, b in arrows for far in reach(b)}
    return arrows - longer


def draw(code: Code, path: Path) -> None:
    """Draws the parts and the arrows of `steps`; all of them would hide the order."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    parts = {code.part(module) for module in code.modules}
    place = {
        name: (x, -row)
        for row, layer in enumerate(LAYERS)
        for name, x in layer.items()
        if name in parts
    }
    down = {(a, b) for a, b in code.arrows() if place[a][1] > place[b][1]}
    style: Any = {"svg.hashsalt": "lra_jax", "font.size": 10, "svg.fonttype": "path"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8.5, 11))
        axes.set(xlim=(0, 1), ylim=(0.4 - len(LAYERS), 0.6))
        axes.axis("off")
        boxes = {
            name: axes.text(
                x, y, _label(name, code), ha="center", va="center", bbox=_BOX
            )
            for name, (x, y) in place.items()
        }
        figure.canvas.draw()  # The boxes have their sizes now, at which arrows end.
        for a, b in sorted(steps({(a, b) for a, b in down if b not in FLOOR})):
            ends = {
                "patchA": boxes[a].get_bbox_patch(),
                "patchB": boxes[b].get_bbox_patch(),
            }
            axes.annotate("", place[b], place[a], arrowprops=_ARROW | ends)
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)


_BOX = {"boxstyle": "round,pad=0.5", "fc": "white", "ec": "black", "lw": 1.2}
_ARROW = {"arrowstyle": "-|>", "fc": "black", "lw": 1.2, "shrinkA": 0, "shrinkB": 0}


def _label(name: str, code: Code) -> str:
    """A part's name, and its folders or files beneath it."""
    if name == COMMANDS:
        short = sorted(m.removeprefix("lra_jax.") for m in code.commands)
        return f"{name}\n" + "  ".join(m.removesuffix(".__main__") for m in short)
    if name in FLOOR:
        return FLOOR[name]
    inner = sorted(
        {
            module.split(".")[2]
            for module, path in code.modules.items()
            if module.startswith(f"lra_jax.{name}.") and path.name == "__init__.py"
        }
    )
    return f"{name}\n{'  '.join(inner)}" if inner else name


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parents(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def _imports(
    tree: ast.AST, modules: Mapping[str, Path], when: When = "import"
) -> Iterator[tuple[str, When]]:
    """The imports in a syntax tree, each with the time at which it happens."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, when
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in modules else str(node.module)), when
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(ast.Module(node.body, []), modules, "types")
            yield from _imports(ast.Module(node.orelse, []), modules, when)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(node, modules, "types" if when == "types" else "call")
        else:
            yield from _imports(node, modules, when)


def written(page: str, content: Callable[[], str]) -> str:
    """A page with what is between its marks made anew."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{content()}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    """The command line."""
    code = read(ROOT / "lra_jax")
    for source, target in sorted(against_the_layers(code)):
        print(f"upward: {source} -> {target}")
    for circle in circles(code.inside):
        print(f"circle: {', '.join(sorted(circle))}")
    PAGE.write_text(written(PAGE.read_text(), lambda: table(code)))
    draw(code, PICTURE)


if __name__ == "__main__":
    main()
