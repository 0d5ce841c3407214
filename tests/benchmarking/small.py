"""Small cases, measured at once."""

from pathlib import Path

from lra_jax.benchmarking.cases import Case, ModelShape
from lra_jax.benchmarking.roofline import Roofline
from lra_jax.benchmarking.runner import Runner
from lra_jax.benchmarking.settings import BenchmarkConfig

ROOFLINE = Roofline(1e12, {"float32": 1e12, "bfloat16": 1e12})
SMALL = ModelShape(1, 8, 2, 8, vocab_size=7)
SIZES = {"heads": 2, "head_dim": 4, "attention": "linear", "lengths": "8"}


def case(attention: str, work: str = "forward", length: int = 16, **changes) -> Case:
    """A case with two heads of 4."""
    sizes = {"batch_size": 2, "heads": 2, "head_dim": 4, "model": SMALL}
    return Case(attention, work, length, **sizes | changes)


def run(cases: list[Case], roofline: Roofline = ROOFLINE, **settings) -> Runner:
    """Measures cases with two samples each."""
    config = BenchmarkConfig(quick="repeats" not in settings, **settings)
    runner = Runner(config, roofline)
    runner.run(cases)
    return runner


def config(folder: Path | str, **changes) -> BenchmarkConfig:
    """Settings of the accelerator's view."""
    return BenchmarkConfig(view="accelerator", out=str(folder), **SIZES | changes)
