"""Shared by the scripts: the order of cases, how a result was made, tables in pages."""

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any

PASSES = {"forward": False, "forward+backward": True}
"""The passes that are timed, and whether with gradients."""


def turned(cases: list[Any], number: int) -> list[Any]:
    """Begins each round with a different case, as each affects the one after it."""
    first = number % len(cases)
    return cases[first:] + cases[:first]


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


def write(file: str | Path, report: dict[str, Any]) -> None:
    """Writes a result."""
    Path(file).write_text(json.dumps(report, indent=2) + "\n")


def between(page: str, start: str, text: str, end: str) -> str:
    """Returns the page with the text between two marks replaced."""
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{text}\n{end}{after}"
