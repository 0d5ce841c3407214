"""python -m lra_jax.attention prints the registered mechanisms as a table.

--markdown prints it in the form used in docs/mechanisms.md.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import json
from collections.abc import Sequence
from pathlib import Path

from lra_jax import cli
from lra_jax.attention.registry import MECHANISMS
from lra_jax.errors import expected

HEAD = ("name", "causal", "cross", "stream", "packed", "time", "measured")
HEAD += ("paper", "summary")

# Written by benchmarks/cost_exponent.py: the measured exponent of the time between 2K
# and 16K positions, for each mechanism.
EXPONENTS = Path(__file__).with_name("exponents.json")


def rows() -> list[tuple[str, ...]]:
    """The registry as table cells, one row per mechanism."""
    measured = json.loads(EXPONENTS.read_text()) if EXPONENTS.exists() else {}
    return [
        (
            mechanism.name,
            *(
                "yes" if able else "no"
                for able in (
                    mechanism.causal,
                    mechanism.cross,
                    mechanism.stream,
                )
            ),
            "yes" if mechanism.packed else "in turn",
            mechanism.cost,
            f"T^{measured[mechanism.name]}" if mechanism.name in measured else "-",
            mechanism.source,
            mechanism.summary,
        )
        for mechanism in MECHANISMS.values()
    ]


def table() -> str:
    """Aligned columns, for a terminal."""
    cells = [HEAD, *rows()]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown() -> str:
    """The same as a Markdown table."""
    cells = [HEAD, ("---",) * len(HEAD)]
    cells += [(f"`{name}`", *others) for name, *others in rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table."""
    args = cli.arguments(args)
    if {"--help", "-h"} & {*args}:
        print(__doc__)
        return
    if args not in ([], ["--markdown"]):
        needed = "no flag, --markdown or --help"
        got = repr(" ".join(args))
        with cli.user_errors():
            raise expected("python -m lra_jax.attention", needed, got)
    print(markdown() if args else table())


if __name__ == "__main__":
    cli.run(main)
