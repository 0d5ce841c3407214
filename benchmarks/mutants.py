"""Mutants: how many small faults in the code the tests notice.

    nice python benchmarks/mutants.py --at=HEAD --out=results/mutants.json

Draws a seeded sample of small changes to the code of `SHARES` (an operator swapped, a
condition negated, a constant changed, a call or an argument dropped, nothing returned)
and runs, for each, the tests that a developer of that file would run first: its own,
those that import it, the common ones of its folder, and for attention the properties of
its mechanism; as many as `TESTS` says. A failing test kills a mutant, and so does a
process that hangs or dies.

The tools for this do not fit. cosmic-ray starts Python for every mutant, and importing
jax and flax takes longer than most of these tests. mutmut forks, but runs the whole
suite first to learn which test calls what, draws no sample, and puts wrappers around
functions, which `jax.jit` and the registry see. So this changes one expression at a
time in a clone, and forks from a process that has imported jax but not the package.

Outcomes are kept in a folder for each commit: a run that was stopped goes on.
"""

import ast
import collections
import contextlib
import copy
import importlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, flags, origin, write

SHARES = {"attention": 90, "models": 42, "tasks": 24, "training": 34}
SHARES |= {"data/batches.py": 10}
TESTS = {"attention": 40, "models": 30, "tasks": 12, "training": 15, "data": 40}
COMMON = {
    "attention": "formulas golden padding_and_gradients causal packed streams weights"
    " flax transforms wrong_options masks_and_errors",
    "models": "layer layers encoder attention_module classifier config",
    "tasks": "task published tasks language_tasks suite_tasks pathfinder_tasks",
    "training": "trainer runs",
    "data": "batches pipeline",
}
HEAVY = "pytest numpy jax jax.numpy flax.nnx optax orbax.checkpoint grain tyro"
SECONDS = 90  # of processors, before a run is ended
PAIRS = "Add Sub, Mult Div, BitAnd BitOr, And Or, Lt LtE, Gt GtE, Eq NotEq, Is IsNot"
SWAPS = {"FloorDiv": "Mod", "Mod": "FloorDiv", "In": "NotIn", "NotIn": "In"}
SWAPS |= {a: b for pair in PAIRS.split(", ") for a, b in [pair.split()]}
SWAPS |= {b: a for pair in PAIRS.split(", ") for a, b in [pair.split()]}
TEXTS = (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)
SPOKEN = re.compile(r"print|warn|log$|info|console|Error|TypeVar")
TYPES = {"annotation", "returns", "decorator_list", "type_params"}


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What may be changed: no types, imports, error texts or messages."""
    if isinstance(node, TEXTS):
        return
    if isinstance(node, ast.Call) and SPOKEN.search(ast.unparse(node.func)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in TYPES:
                yield from nodes(child)


def swap(operator: ast.AST) -> Any:
    """The other operator of a pair, or None."""
    other = SWAPS.get(type(operator).__name__)
    return other and getattr(ast, other)()


def changes(
    node: ast.AST, imported: set[str]
) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """The changes at a node: a name, the expression, and its replacement."""
    new: Any = copy.copy(node)
    match node:
        case ast.BinOp(left=ast.List() | ast.Tuple() | ast.JoinedStr()):
            pass
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if swap(op):
            new.op = swap(op)
            yield "operator", node, new
        case ast.Compare(ops=[op]):
            new.ops = [swap(op)]
            yield "comparison", node, new
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield "sign", node, operand
        case ast.If(test) | ast.IfExp(test) | ast.While(test):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(bool() as value):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            more = value + 1 if isinstance(value, int) else 2 * value or 1.0
            yield "constant", node, ast.Constant(more)
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", value, ast.Constant(None)
        case ast.Expr(ast.Call() as call):
            yield "statement", call, ast.Constant(None)
        case ast.Call(func, args, keywords):
            if keywords and keywords[-1].arg not in (None, "strict"):
                new.keywords = keywords[:-1]
                yield "argument", node, new
            if isinstance(func, ast.Attribute):
                of_module = ast.unparse(func).partition(".")[0] in imported
                inner = args[:1] if of_module else [func.value]
                yield from (("call", node, x) for x in inner)


def mutants(file: Path, root: Path) -> Iterator[dict[str, Any]]:
    """All mutants of a file, each with the bytes that it replaces."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    aliases = [x for x in ast.walk(tree) if isinstance(x, ast.alias)]
    imported = {(x.asname or x.name).partition(".")[0] for x in aliases}
    for node in nodes(tree):
        for kind, before, after in changes(node, imported):
            last, column = before.end_lineno or 0, before.end_col_offset or 0
            yield {
                "file": str(file.relative_to(root)),
                "line": before.lineno,
                "kind": kind,
                "before": ast.unparse(before),
                "after": ast.unparse(after),
                "start": starts[before.lineno - 1] + before.col_offset,
                "end": starts[last - 1] + column,
            }


def sample(root: Path, seed: int) -> list[dict[str, Any]]:
    """The same mutants for the same code and seed, in a mixed order."""
    chosen = []
    for area, number in SHARES.items():
        place = root / "lra_jax" / area
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        every = [m | {"area": area} for file in files for m in mutants(file, root)]
        chosen += random.Random(f"{seed} {area}").sample(every, number)
    random.Random(seed).shuffle(chosen)
    return chosen


def imports(text: str, module: str) -> bool:
    """Whether a file imports a module."""
    folder, _, name = module.rpartition(".")
    some = rf"from {folder} import (\([^)]*|[^\n]*)\b{name}\b"
    return bool(re.search(rf"{module}\b|{some}", text))


def tests(root: Path, file: str) -> tuple[list[str], list[str]]:
    """The tests for a file, the closest first, and the modules that it concerns."""
    module = file.removesuffix(".py").replace("/", ".")
    area, folder = file.split("/")[1], root / Path("tests", *Path(file).parts[1:-1])
    area_tests = sorted((root / "tests" / area).rglob("test_*.py"))
    chosen = [folder / f"test_{Path(file).stem}.py"]
    if area == "attention" and not chosen[0].exists():
        chosen += sorted(folder.glob("test_*.py"))
    chosen += [x for x in area_tests if imports(x.read_text(), module)]
    for name in COMMON[area].split():
        chosen += (root / "tests" / area).rglob(f"test_{name}.py")
    order = dict.fromkeys(str(x.relative_to(root)) for x in chosen if x.exists())
    attention = (root / "lra_jax/attention").rglob("*.py")
    using = sorted(x.stem for x in attention if imports(x.read_text(), module))
    return list(order), [Path(file).stem, *using]


class Watch:
    """Part of pytest: keeps the first tests, and of properties one mechanism's."""

    def __init__(self, modules: list[str], skipped: set[str], most: int) -> None:
        self.modules, self.skipped, self.most = modules, skipped, most
        self.failed: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        self.failed += [report.nodeid] * report.failed

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        words = {item.nodeid: set(re.split(r"[][-]", item.nodeid)) for item in items}
        there = set().union(*words.values())
        # Code that many mechanisms share is tested with two of them.
        users = [x for x in (*self.modules[1:], "cosformer", "softmax") if x in there]
        names = {*self.modules[:1]} & there or set(users[:2])
        names = names if self.modules else there
        items[:] = [
            item
            for item in items
            if item.nodeid not in self.skipped
            and ("/properties/" not in item.nodeid or words[item.nodeid] & names)
        ]
        if all(item.nodeid.startswith("tests/attention/") for item in items):
            # A test of each file in turn: there may be too many in the first.
            places = collections.Counter[str]()
            turns = {}
            for item in items:
                places[item.path.name] += 1
                turns[item.nodeid] = places[item.path.name]
            items.sort(key=lambda item: turns[item.nodeid])
        del items[self.most :]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed += [report.nodeid] * report.failed


def run(root: Path, paths: list[str], watch: Watch, *flags: str) -> dict[str, Any]:
    """Runs tests in a child, which reports what failed unless it dies."""
    outcome = root.parent / "outcome.json"
    outcome.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()
        log = os.open(root.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        if watch.modules:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        usual = ["-q", "-n0", "-pno:cacheprovider", f"--basetemp={root.parent}/tmp"]
        pytest = importlib.import_module("pytest")
        code = pytest.main([*usual, *flags, *paths], plugins=[watch])
        failed = watch.failed or ["pytest"] * (code not in (0, 2))
        report = {"failed": failed, "seconds": round(sum(os.times()[:4]), 1)}
        outcome.write_text(json.dumps(report))
        os._exit(0)
    end = time.monotonic() + 10 * SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < end:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if outcome.exists():
        return json.loads(outcome.read_text())
    return {"failed": ["the process"], "seconds": SECONDS}


def judge(root: Path, mutant: dict[str, Any], skipped: set[str]) -> dict[str, Any]:
    """Runs the tests on a mutant; the file is as before afterwards, with its date."""
    file = root / mutant["file"]
    source, date = file.read_bytes(), file.stat().st_mtime_ns
    start, end = mutant["start"], mutant["end"]
    file.write_bytes(source[:start] + f"({mutant['after']})".encode() + source[end:])
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    paths, modules = tests(root, mutant["file"])
    most = TESTS[mutant["area"].partition("/")[0]]
    try:
        return mutant | run(root, paths, Watch(modules, skipped, most), "-x")
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(date, date))
        sys.dont_write_bytecode = False
        del os.environ["PYTHONDONTWRITEBYTECODE"]


def outcomes(root: Path, seed: int) -> list[dict[str, Any]]:
    """What became of each mutant, by tests that pass on the code as it is."""
    kept, skipped = root.parent / "outcomes.jsonl", set()
    lines = kept.read_text().splitlines() if kept.exists() else []
    done = {row["number"]: row for row in map(json.loads, lines)}
    while True:
        for number, mutant in enumerate(sample(root, seed)):
            if number not in done or skipped & {*done[number]["failed"]}:
                done[number] = judge(root, mutant | {"number": number}, skipped)
                with kept.open("a") as log:
                    log.write(json.dumps(done[number]) + "\n")
        failing = {test for row in done.values() for test in row["failed"]}
        killers = sorted(x for x in failing if "::" in x)
        wrong = {*run(root, killers, Watch([], skipped, len(killers)))["failed"]}
        if not wrong - skipped:
            return [done[number] for number in sorted(done)]
        skipped |= wrong


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers by area, and the mutants that no test noticed."""
    areas = {}
    for area in [*SHARES, "all"]:
        some = [row["failed"] for row in rows if area in (row["area"], "all")]
        killed = sum(map(bool, some))
        areas[area] = {
            "mutants": len(some),
            "killed": killed,
            "killed by a hang or crash": some.count(["the process"]),
            "share": round(killed / len(some), 3),
        }
    shown = ("file", "line", "kind", "before", "after")
    left = [{k: row[k] for k in shown} for row in rows if not row["failed"]]
    return {"areas": areas, "survivors": sorted(left, key=lambda x: tuple(x.values()))}


def main() -> None:
    """The command line."""
    args = flags(__doc__, at="HEAD", seed=0).parse_args()
    out, here = args.out and args.out.absolute(), str(ROOT)
    ask = ["git", "-C", here, "rev-parse", args.at]
    commit = subprocess.check_output(ask, text=True).strip()
    root = Path.home() / f".cache/lra_jax/mutants/{commit[:12]}-{args.seed}/code"
    if not root.exists():
        subprocess.run(["git", "clone", "-qsn", here, str(root)], check=True)
        subprocess.run(["git", "checkout", "-qf", commit], cwd=root, check=True)
    os.chdir(root)
    os.environ["PYTHONPATH"] = sys.path[0] = str(root)
    for name in HEAVY.split():
        importlib.import_module(name)
    rows = outcomes(root, args.seed)
    write(out, origin() | {"commit": commit, "seed": args.seed} | summary(rows))


if __name__ == "__main__":
    main()
