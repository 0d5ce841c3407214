"""One run of the benchmark: measures, prints, writes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lra_jax.benchmarking import tables
from lra_jax.benchmarking.fused import best_implementation
from lra_jax.benchmarking.picture import draw
from lra_jax.benchmarking.roofline import Roofline, measure_roofline
from lra_jax.benchmarking.runner import Row, Runner
from lra_jax.benchmarking.settings import BenchmarkConfig, make_cases
from lra_jax.benchmarking.works import find
from lra_jax.files import write_json
from lra_jax.training.machine import commit, describe_devices, versions


class Report:
    """The measurements, with the command and the machine that made them.

    Args:
      config: what to measure.
      command: what the user typed.

    Attributes:
      interrupted: whether Ctrl-C ended the run early.

    Raises:
      ValueError: a flag out of range, or an unknown name.
    """

    def __init__(self, config: BenchmarkConfig, command: str):
        self.config = config
        self.command = command
        self.cases = make_cases(config, jax.default_backend() == "cpu")
        for subject in dict.fromkeys(case.attention for case in self.cases):
            find(subject)
        self.dtypes = list(dict.fromkeys(case.dtype for case in self.cases))
        self.rows: list[Row] = []
        self.roofline: Roofline | None = None
        self.interrupted = False

    def measure(
        self,
        say: Callable[[str], None] = lambda text: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """Measures the machine, then every case: calls `say` with a line for each,
        and `keep` when `values` includes it."""
        try:
            self.roofline = measure_roofline(self.dtypes, self.config.quick)
        except KeyboardInterrupt:
            self.interrupted = True
            return
        say(_machine(self.roofline))

        def on_row(row: Row) -> None:
            say(_progress(row))
            keep()

        runner = Runner(self.config, self.roofline, on_row)
        self.rows = runner.rows
        runner.run(self.cases)
        self.interrupted = runner.interrupted

    @property
    def measured(self) -> bool:
        """Whether any case could be measured."""
        return any(row["status"] == "measured" for row in self.rows)

    def text(self) -> str:
        """All tables, as Markdown."""
        return tables.make_page(self.config.view, self.rows).markdown()

    def values(self) -> dict[str, Any]:
        """The contents of the JSON."""
        roofline = {} if self.roofline is None else dataclasses.asdict(self.roofline)
        return {
            "command": self.command,
            "commit": commit(),
            "device": describe_devices(),
            "versions": versions(),
            "complete": len(self.rows) == len(self.cases),
            "settings": dataclasses.asdict(self.config) | {"out": None},
            "softmax_fused": {x: best_implementation(x) for x in self.dtypes},
            "roofline": roofline,
            "rows": self.rows,
            "exponents": tables.exponents(self.rows),
            "published": tables.PUBLISHED.get(self.config.view, []),
        }

    def write(self, figures: Path, picture: Path | None) -> None:
        """Writes the JSON and, if asked for, the picture."""
        values = self.values()
        write_json(figures, values)
        if picture is not None:
            draw(values).save(picture)


def _machine(roofline: Roofline) -> str:
    rates = (
        f"{dtype} products {rate / 1e9:,.{0 if rate > 1e10 else 2}f} Gflop/s"
        for dtype, rate in roofline.flops_per_second.items()
    )
    copied = f"copies {roofline.bytes_per_second / 1e9:,.1f} GB/s"
    return f"{describe_devices()}: {copied}, {', '.join(rates)}"


def _progress(row: Row) -> str:
    start = f"{row['attention']}  {row['work']}  {row['dtype']}  {row['length']:,}"
    if row["status"] != "measured":
        return f"{start}  {row['status']}: {row['reason']}"
    took, memory = map(tables.significant, (row["median_ms"], tables.gigabytes(row)))
    return f"{start}  {took} ms  {memory} GB"
