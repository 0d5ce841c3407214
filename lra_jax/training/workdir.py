"""The run directory: which run it belongs to, and whether that run can be resumed.

config.json      the resolved config, and the fingerprint of the data; first_steps if
                 the run was extended; first_path if its data were moved; started_from,
                 the digest of a model that fine-tuning started from
metrics.jsonl    one line for each report
checkpoints/     latest and best
code/            the source of the user's own parts
profile/         a trace of ten steps, with --profile
curves.png       at the end
events/          TensorBoard, if tensorboardX is installed
wandb/           Weights & Biases, with --wandb
model.*          at the end: the best checkpoint, for lra_jax.models.load
result.json      at the end
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lra_jax import seals
from lra_jax.configs import Config
from lra_jax.configs.base import LEAST_STEPS_OF_BUCKETS, with_effect
from lra_jax.errors import check_path, expected
from lra_jax.files import lock, read_json, write_json

_MADE_FIRST = ("config.json", ".lock", "code", "events", "profile", "wandb")
_MADE_LATER = (
    *("checkpoints", "metrics.jsonl", "result.json"),
    *("model.safetensors", "model.json", "curves.png"),
)


def check_workdir(workdir: Path, config: Config) -> None:
    """Refuses what `open_workdir` would refuse with any data, before these are made."""
    check_path("--workdir", workdir)
    above = next(path for path in (workdir, *workdir.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        got = f"{workdir}, which cannot be written"
        raise expected("--workdir", "a folder", got)
    if (workdir / "config.json").exists():
        _is_longer(config, read_config(workdir)[0], workdir)


def open_workdir(
    workdir: Path, config: Config, fingerprint: str, started_from: str = ""
) -> None:
    """Claims an empty directory, or checks that it holds this same run.

    A run may also be extended if no step depends on their total number. A finished run
    is left unchanged until `lengthen`, when the longer one has finished too. The same
    data may have been moved to another ``--data.path``. ``started_from`` is the digest
    of the model that a run starts from; empty = none.
    """
    path = workdir / "config.json"
    if not path.exists():
        left = [name for name in _MADE_LATER if (workdir / name).exists()]
        if left:
            got = f"none, but {', '.join(left)}; choose another --workdir"
            raise expected(str(path), "the config of the run", got)
        values = config.to_dict() | {"data_fingerprint": fingerprint}
        if started_from:
            values["started_from"] = started_from
        write_json(path, values)
        return
    theirs, before = read_config(workdir)
    longer = _is_longer(config, theirs, workdir)
    if before != fingerprint:
        raise other_data(workdir, before, fingerprint)
    theirs_from = read_json(path).get("started_from", "")
    if theirs_from != started_from:
        requirement = f"a run that started from the model of digest {started_from}"
        got = f"{workdir} from one of digest {theirs_from}; choose another --workdir"
        raise expected("--workdir", requirement, got)
    if longer and not (workdir / "result.json").exists():
        lengthen(workdir, config.train.steps)
    if _path(config) != _path(theirs):
        _change(path, "data", "path", _path(config))


def _path(config: Config) -> str | None:
    """The ``--data.path`` of a run."""
    return getattr(config.data, "path", None)


def _is_longer(config: Config, theirs: Config, workdir: Path) -> bool:
    """Whether a config extends a directory's run; refuses another run's."""
    old, new = theirs.identity(), config.identity()
    if _path(theirs) is not None and _path(config) is not None:
        old["data.path"] = new["data.path"]  # The data's fingerprint decides.
    differing = {n: old.get(n) for n in new if old.get(n) != new[n]}
    longer = [*differing] == ["train.steps"] and not _why_not_longer(theirs, config)
    if differing and not longer:
        requirement = "the directory of this run, or an empty one"
        named = [f"{n}={value!r} (now {new[n]!r})" for n, value in differing.items()]
        got = f"{workdir} of another config: {', '.join(named)}"
        if "train.steps" in differing:
            got += f"; {_why_not_longer(theirs, config) or 'choose another --workdir'}"
        raise expected("--workdir", requirement, got)
    return longer


def _why_not_longer(theirs: Config, config: Config) -> str:
    """Why a run cannot go on to the steps of another config, and what to do."""
    if theirs.train.steps >= config.train.steps:
        return "a run can be made longer, not shorter: choose another --workdir"
    train = theirs.train
    bound = [f"--train.{n}={getattr(train, n)}" for n in train.bound_to_steps]
    bound += theirs.data.shown if theirs.data.groups else ()
    if theirs.buckets != config.buckets:
        bound.append(f"--data.buckets={theirs.data.buckets}")
    if not bound:
        return ""
    return (
        f"with {' and '.join(bound)} a longer run is a different one: "
        "choose another --workdir. Without --train.length_warmup, --train.curriculum "
        "and easier data, runs with --train.schedule=constant or lra can be extended; "
        f"with --data.buckets=auto, not from less than {LEAST_STEPS_OF_BUCKETS} steps "
        "to more"
    )


def lengthen(workdir: Path, steps: int) -> None:
    """Records in a run's config that it now has this many steps."""
    _change(workdir / "config.json", "train", "steps", steps)


def _change(file: Path, part: str, name: str, value: Any) -> None:
    """Changes a setting in a run's config.json.

    ``first_NAME`` keeps the original value, because seals are made with it.
    """
    values = read_json(file)
    if values[part][name] != value:
        values.setdefault(f"first_{name}", values[part][name])
        values[part][name] = value
        write_json(file, values)


def other_data(workdir: Path, then: str, now: str) -> ValueError:
    """The error to raise for a run whose data have changed."""
    requirement = f"a run on these data, of fingerprint {now}"
    return expected("--workdir", requirement, f"{workdir} on other data, {then}")


def read_config(workdir: Path, allow_code: bool = False) -> tuple[Config, str]:
    """The config and the data fingerprint of a run directory.

    With ``allow_code``, a user's own task that the config names is imported.
    """
    path = workdir / "config.json"
    if not path.exists():
        got = f"{workdir} without a config.json"
        raise expected("--workdir", "a run directory", got)
    values = read_json(path, "the config of a run")
    try:
        return Config.from_dict(values, allow_code), values["data_fingerprint"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if getattr(error, "name", "") == "--allow-code":
            raise
        got = f"{type(error).__name__}: {error}"
        raise expected(str(path), "the config of a run", got) from error


def identify(workdir: Path) -> str:
    """A digest of a run's settings and data, from its config.json.

    It leaves out paths, so that a run or its data can be moved, and any extension of
    the run. Empty if there is no ``config.json``.
    """
    path = workdir / "config.json"
    if not path.exists():
        return ""
    values = with_effect(read_json(path))
    firsts = {"first_steps": "train.steps", "first_path": "data.path"}
    for first, name in firsts.items():
        if first in values:
            values[name] = values.pop(first)
    return seals.digest(values)


def refuse_own_file(workdir: Path, file: Path, flag: str) -> None:
    """Refuses a flag's file that would replace one of the run's own."""
    workdir, place = workdir.expanduser().resolve(), file.expanduser().resolve()
    if place.is_relative_to(workdir):
        top = place.relative_to(workdir).parts[:1]
        if top and top[0] in (*_MADE_FIRST, *_MADE_LATER):
            requirement = f"a file other than {top[0]}, which is the run's own"
            raise expected(flag, requirement, file)


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Makes the directory and locks it, so that no two processes train in it."""
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(workdir / ".lock", wait=False))
        except TimeoutError as error:
            got = f"{workdir}, which is in use by another process"
            raise expected(
                "--workdir", "a directory for this run alone", got
            ) from error
        yield
