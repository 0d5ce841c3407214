"""``python -m lra_jax.attention`` prints the registered mechanisms as a table."""

from lra_jax.attention.registry import MECHANISMS


def table() -> str:
    """The registry as lines of text, one mechanism a line."""
    head = ("name", "causal", "cross", "padding", "stream", "time", "paper", "what")
    rows: list[tuple[str, ...]] = [head]
    for mechanism in MECHANISMS.values():
        abilities = (
            mechanism.causal,
            mechanism.cross,
            mechanism.padding,
            mechanism.stream,
        )
        rows.append(
            (
                mechanism.name,
                *("yes" if able else "no" for able in abilities),
                mechanism.cost,
                mechanism.source,
                mechanism.summary,
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    print(table())
