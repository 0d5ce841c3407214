"""Trains and scores a model: ``python -m lra_jax.train --task=listops``.

The same from Python::

    from lra_jax import train
    from lra_jax.configs import get_preset

    results = train.run(get_preset("listops", attention="cosformer"))
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import contextlib
import dataclasses
import shlex
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from lra_jax import cli, progress, runs, runtime, signals
from lra_jax.configs import Config, DataConfig, ModelConfig, PretrainConfig, TrainConfig
from lra_jax.errors import a_thing, expected, on_one_line

_PROG = "python -m lra_jax.train"
_DESCRIPTION = "Trains a model and scores it; missing data are prepared first."

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "PretrainConfig",
    "TrainConfig",
    "main",
    "run",
]


@dataclasses.dataclass(frozen=True)
class TrainCommand(runs.Seeds):
    """A run, and what to do with it."""

    dry_run: bool = False
    """Describe the run and what it will cost, without running it."""


def main(args: Sequence[str] | None = None) -> None:
    """The command line; see ``lra_jax.cli`` for the exit codes."""
    args = cli.begin(args)
    command = cli.parse_config(_PROG, _DESCRIPTION, args, TrainCommand)
    with cli.user_errors():
        command.check_types()
        if command.dry_run and command.seeds > 1:
            raise expected("--dry_run", "one run", f"--seeds={command.seeds}")
        if command.seeds > 1:
            runs.run_all(runs.make_plan(command))
            return
        typed = shlex.join([*_PROG.split(), *args])
        again = shlex.join([cli.interpreter(), *_PROG.split()[1:], *args])
        signals.advise(f"interrupted; to resume: {again}")
        _main(command.run, typed, again, command.dry_run)


def _main(config: Config, command: str, again: str, dry: bool) -> None:
    """Runs the command; ``again`` is the command that resumes it."""
    held = contextlib.ExitStack()
    progress.say("starting jax ...")
    runtime.configure_jax(config.distributed)
    from lra_jax.training import Interrupted, NonFiniteLoss
    from lra_jax.training.session import Session

    with _together(again):
        session = held.enter_context(Session(config, command=command, dry=dry))
    try:
        with held, _together(again):
            if dry:
                session.dry_run()
            else:
                session.run()
                _draw(session)
    except Interrupted as stop:
        line = f"saved step {stop.step} in {session.workdir}; to resume: {again}"
        if stop.signum == signal.SIGPIPE:
            cli.fail(f"the output was closed; {line}", 128 + stop.signum)
        print(line)
        raise signals.Exit(128 + stop.signum) from None
    except (NonFiniteLoss, OSError) as error:
        cli.fail(str(error), 1)


@contextlib.contextmanager
def _together(command: str) -> Iterator[None]:
    """Context that ends this process, with a message, when another one is gone.

    After any other error it ends within ten seconds: if the error is not that of all
    processes, an orderly exit would wait for the others, which wait for this one.
    """
    from lra_jax.training import Interrupted, NonFiniteLoss, hosts

    try:
        yield
    except (Interrupted, NonFiniteLoss):  # They end all processes.
        raise
    except Exception as error:
        lost = hosts.lost_process(error)
        if lost is not None:
            hosts.leave(f"{lost}; to resume, start all processes again: {command}")
        hosts.leave_soon()
        raise


def _draw(session: Any) -> None:
    """Draws the curves of a finished run in its directory, if missing or outdated.

    Without a picture, as with an unknown MPLBACKEND, the run is as good.
    """
    from lra_jax.training import hosts

    config, file = session.config, session.workdir / "curves.png"
    if not hosts.is_writer():
        return
    ended = (session.workdir / "result.json").stat().st_mtime
    if not file.exists() or file.stat().st_mtime < ended:
        title = f"{config.mixers} on {config.task}, preset {config.preset}"
        try:
            from lra_jax.reports import curves

            drawn = curves.draw_run(session.workdir, title, session.dataset.metric)
        except Exception as error:
            session.console.line(f"no curves: {on_one_line(error)}")
        else:
            session.console.line(f"curves in {file}" if drawn else "no curves")


def run(config: Config, quiet: bool = False) -> dict[str, Any]:
    """Trains, or resumes, the run that a config describes, and scores it.

    Args:
      config: the run. Without a ``workdir`` it is stored under ``runs/`` in the current
        folder, named after the settings.
      quiet: print nothing.

    Returns:
      The contents of ``result.json``: accuracies in percent (test accuracy of the best
      and the last checkpoint, best validation accuracy), steps per second, parameters,
      versions, device and seconds.

    Raises:
      ValueError: invalid settings, before anything is compiled.
      lra_jax.training.Interrupted: SIGINT or SIGTERM; the same call resumes.
      lra_jax.training.NonFiniteLoss: the loss became infinite or NaN.
    """
    if not isinstance(config, Config):
        raise expected("config", "a Config", a_thing(config))
    from lra_jax.training.session import Session

    with Session(config, quiet) as session:
        result = session.run()
        _draw(session)
        return result.to_dict()


if __name__ == "__main__":
    cli.run(main)
