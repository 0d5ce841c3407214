"""Trains and scores a model: ``python -m lra_jax.train --task=listops``.

The same from Python::

    from lra_jax import train
    from lra_jax.configs import get_preset

    results = train.run(get_preset("listops", attention="cosformer"))
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import collections
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from lra_jax import cli, progress, runs, runtime, signals
from lra_jax.configs import Config, DataConfig, ModelConfig, PretrainConfig, TrainConfig
from lra_jax.errors import SWITCHES, a_thing, check_text, expected

_DESCRIPTION = (
    "Trains a model and scores it. --seeds=N trains N, with seeds --seed, --seed + 1, "
    "..., each in its own directory (in --workdir, if that is given). --dry-run "
    "describes a run and what it will cost, without running it; data not there yet are "
    "prepared first."
)

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "PretrainConfig",
    "TrainConfig",
    "main",
    "run",
]


def main(args: Sequence[str] | None = None) -> None:
    """The command line; see ``lra_jax.cli`` for the exit codes."""
    args = cli.started(args)
    prog = "python -m lra_jax.train"
    with cli.user_errors():
        count, rest = runs.take_flag(args, "seeds")
        seeds = runs.parse_seeds(count)
    dry, rest = _take_dry_run(rest, seeds)
    if seeds > 1 and not {"--help", "-h"} & set(rest):
        _run_seeds(prog, rest, seeds)
        return
    config = cli.parse_config(prog, _DESCRIPTION, rest)
    command = shlex.join([*prog.split(), *rest])
    again = shlex.join([cli.interpreter(), *prog.split()[1:], *rest])
    signals.advise(f"interrupted; to resume: {again}")
    try:
        _main(config, command, again, dry)
    except KeyboardInterrupt:
        cli.fail(f"interrupted; to resume: {again}", 128 + signal.SIGINT)


def _take_dry_run(args: Sequence[str], seeds: int) -> tuple[bool, list[str]]:
    """Whether to only describe the run, and the other arguments."""
    dry, rest = False, []
    pending = collections.deque(args)
    with cli.user_errors():
        while pending:
            argument = pending.popleft()
            if argument.partition("=")[0].replace("_", "-") != "--dry-run":
                rest.append(argument)
                continue
            text = cli.flag_value("--dry-run", bool, argument, pending)
            check_text("--dry-run", bool, text)
            dry = SWITCHES[text]
        if dry and seeds > 1:
            raise expected("--dry-run", "one run", f"--seeds={seeds}")
    return dry, rest


def _run_seeds(prog: str, args: Sequence[str], seeds: int) -> None:
    with cli.user_errors():
        plan = runs.make_plan(
            lambda flags: cli.parse_config(prog, _DESCRIPTION, flags), args, seeds
        )
    try:
        runs.run_all(plan)
    except runs.Stopped as stop:
        raise SystemExit(stop.code) from None


def _main(config: Config, command: str, again: str, dry: bool) -> None:
    """Runs the command; ``again`` is the command that resumes it."""
    with cli.user_errors():
        progress.say("starting jax ...")
        runtime.configure_jax(config.distributed)
        from lra_jax.training import Interrupted, NonFiniteLoss
        from lra_jax.training.session import Session

        with _together(again):
            session = Session(config, command=command, dry=dry)
    try:
        with session, _together(again):
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
        raise SystemExit(128 + stop.signum) from None
    except BrokenPipeError:
        raise
    except (NonFiniteLoss, OSError) as error:
        cli.fail(str(error), 1)
    except Exception as error:
        cli.fail_unexpectedly(error)


@contextlib.contextmanager
def _together(command: str) -> Iterator[None]:
    """Context that ends this process, with a message, when another one is gone.

    After any other error it ends within ten seconds: if the error is not that of all
    processes, an orderly exit would wait for the others, which wait for this one.
    """
    from lra_jax.training import Interrupted, NonFiniteLoss, hosts

    try:
        yield
    except (Interrupted, NonFiniteLoss):  # Of all processes.
        raise
    except Exception as error:
        lost = hosts.lost_process(error)
        if lost is not None:
            _leave(f"{lost}; to resume, start all processes again: {command}")
        hosts.leave_soon()
        raise


def _draw(session: Any) -> None:
    """Draws the curves of a finished run in its directory, if missing or outdated."""
    from lra_jax.reports import curves
    from lra_jax.training import hosts

    config, file = session.config, session.workdir / "curves.png"
    if not hosts.is_writer():
        return
    ended = (session.workdir / "result.json").stat().st_mtime
    if not file.exists() or file.stat().st_mtime < ended:
        title = f"{config.mixers} on {config.task}, preset {config.preset}"
        if curves.draw_run(session.workdir, title) is not None:
            session.console.line(f"curves in {file}")


def _leave(message: str) -> NoReturn:
    """Ends the process at once: an orderly exit would wait for the lost process."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(1)


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
    signals.run(main)
