"""python -m lra_jax lists commands, tasks, presets and mechanisms.

python -m lra_jax COMMAND ... runs a command, like python -m lra_jax.COMMAND ... The
installed package also provides it as lra-jax. --version prints the version.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import runpy
import sys
import textwrap
from collections.abc import Sequence

import lra_jax
from lra_jax import cli, signals
from lra_jax.attention.registry import MECHANISMS
from lra_jax.configs.registry import TASKS, find_task
from lra_jax.errors import known

COMMANDS = {
    "train": "train a model and score it",
    "evaluate": "score a run again",
    "generate": "continue a text with a language model",
    "sweep": "train several mechanisms, tasks and seeds",
    "report": "put all runs of a folder on one page",
    "data": "prepare, describe and sample a task's data",
    "analyze": "rank collapse, paths, spectra and attention maps",
    "benchmark": "time, memory and share of the roofline",
    "attention": "the table of mechanisms",
}


def overview() -> str:
    """The commands, tasks and mechanisms, on one screen."""
    width = max(map(len, (*COMMANDS, *TASKS)))
    commands = (f"  {name:{width}}  {does}" for name, does in COMMANDS.items())
    presets = (
        f"  {name:{width}}  {', '.join(find_task(name).presets)}" for name in TASKS
    )
    parts = [
        "Commands (--help after each):",
        *commands,
        "",
        "Tasks (--task=) and their presets (--preset=):",
        *presets,
        "",
        "Mechanisms (--attention=), or package.module:function for your own:",
        textwrap.indent(textwrap.fill(", ".join(MECHANISMS), 77), "  "),
        "",
        "To begin: python -m lra_jax train --task=listops",
    ]
    return "\n".join(parts)


def _look_here() -> None:
    """Imports from the current folder too, as ``python -m`` does: your own attention is
    often there, and the script ``lra-jax`` looks only next to itself."""
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")


def main(args: Sequence[str] | None = None) -> None:
    """Prints the overview, or runs a command."""
    args = sys.argv[1:] if args is None else list(args)
    if not args or args[0] in ("--help", "-h"):
        print(f"{__doc__}\n{overview()}" if args else overview())
        return
    if args[0] == "--version":
        print(f"lra_jax {lra_jax.__version__}")
        return
    with cli.user_errors():
        known("command", args[0], COMMANDS)
    sys.argv[1:] = args[1:]
    _look_here()
    runpy.run_module(f"lra_jax.{args[0]}", run_name="__main__", alter_sys=True)


def run() -> None:
    """The process of the installed script, ``lra-jax``."""
    signals.watch()
    cli.run(main)


if __name__ == "__main__":
    run()
