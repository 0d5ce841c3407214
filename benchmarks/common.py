"""Shared by the scripts: their flags and results, and the order of cases."""

import argparse
import importlib.metadata
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def flags(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The flags of a script: ``--out``, and one for each keyword.

    A default tells what a flag takes: False makes a switch, a list holds the choices,
    the usual one first, a tuple stands for several values between commas, None for text
    that may be absent.
    """
    parser = argparse.ArgumentParser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        match default:
            case bool():
                parser.add_argument(flag, action="store_true")
            case list():
                parser.add_argument(flag, choices=default, default=default[0])
            case tuple():
                parser.add_argument(flag, type=_several(default[0]), default=default)
            case _:
                kind = str if default is None else type(default)
                parser.add_argument(flag, type=kind, default=default)
    return parser


def _several(example: Any) -> Any:
    return lambda text: tuple(type(example)(part) for part in text.split(","))


def rotate(cases: list[Any], number: int) -> list[Any]:
    """Begins each round with a different case, as each affects the one after it."""
    first = number % len(cases)
    return cases[first:] + cases[:first]


def milliseconds(seconds: Sequence[float], digits: int = 1) -> dict[str, float]:
    """The fastest and the median of some runs."""
    times = {"fastest_ms": min(seconds), "median_ms": statistics.median(seconds)}
    return {name: round(1e3 * time, digits) for name, time in times.items()}


def origin(*packages: str, device: bool = True) -> dict[str, Any]:
    """The command, commit, machine and versions, as every result names them.

    Args:
      *packages: those whose versions matter besides the ones of a training run.
      device: False leaves the machine out, where a script only compiles.
    """
    # Imported after a measurement, if the script itself does not need jax.
    from lra_jax.training.machine import commit, describe_devices, versions

    more = {name: importlib.metadata.version(name) for name in packages}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        **({"device": describe_devices()} if device else {}),
        "versions": versions() | more,
    }


def write(file: Path | None, report: dict[str, Any]) -> None:
    """Writes a result, if a file is named."""
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n")


def read(name: str) -> Any:
    """A result, by the name of its file in results/."""
    return json.loads((ROOT / "results" / name).read_text())
