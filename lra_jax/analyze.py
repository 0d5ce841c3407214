"""Shows what attention does: ``python -m lra_jax.analyze COMMAND ...``.

Each command writes pictures, their data, and one page with everything.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from lra_jax import cli, progress, runtime, signals
from lra_jax.errors import InputError, expected, known, not_negative, renamed

PROG = "python -m lra_jax.analyze"


@dataclasses.dataclass(frozen=True)
class RankCollapse:
    """How fast tokens become equal, with and without skips and MLPs."""

    out: str = "analysis/rank-collapse"
    """Folder for the page, the pictures and their data."""
    network: str = "bert,albert,xlnet"
    """Networks at initialisation, one panel each; the first is also drawn with every
    mechanism."""
    attention: str = "softmax,linear,cosformer,flow,linformer"
    """Mechanisms to draw side by side."""
    workdir: str | None = None
    """A run directory: draw the curves of its model instead, on its own data."""
    checkpoint: Literal["best", "last"] = "best"
    """best: best on validation. last: the newest."""
    allow_code: bool = False
    """Import and call the attention function that the run's config.json names. Use this
    only for a directory that you trust."""
    weights: str | None = None
    """A BERT's model.safetensors on disk: draw its curves instead."""
    norm: bool = True
    """Use layer normalisation in the blocks."""
    length: int = 128
    """Length of the random sequences, in tokens."""
    layers: int | None = None
    """Layers of the networks; by default 12, as published."""
    examples: int = 4
    """Sequences per initialisation, or from the run's test split."""
    draws: int = 2
    """Number of initialisations of each network."""
    seed: int = 0
    """Seed of the first initialisation and its tokens."""


@dataclasses.dataclass(frozen=True)
class Paths:
    """Which paths through a network do the work, and how a circle contracts."""

    out: str = "analysis/paths"
    """Folder for the page, the pictures and their data."""
    experiment: str = "sorting,convex-hull,memorisation,circle"
    """Experiments to run."""
    attention: str = "softmax"
    """Mechanism of the networks."""
    full: bool = False
    """Use the published settings, whatever accuracy they reach. The default settings
    take minutes on 2 cores."""
    repeats: int = 5
    """Number of draws of the random paths of each length."""
    seed: int = 0
    """Seed of data, weights and paths."""


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """How much of an attention matrix lies in a few singular values."""

    out: str = "analysis/spectrum"
    """Folder for the page, the pictures and their data."""
    workdir: str | None = None
    """A run directory: its model on its own data."""
    checkpoint: Literal["best", "last"] = "best"
    """best: best on validation. last: the newest."""
    allow_code: bool = False
    """Import and call the attention function that the run's config.json names. Use this
    only for a directory that you trust."""
    network: str = "bert"
    """Without a run: the network at initialisation."""
    attention: str = "softmax,cosformer,linformer"
    """Without a run: mechanisms to draw side by side."""
    length: int = 512
    """Without a run: tokens of a sequence."""
    examples: int = 1
    """Number of sequences to average over."""
    seed: int = 0
    """Seed of the initialisation and its tokens."""


@dataclasses.dataclass(frozen=True)
class Maps:
    """Where a trained model looks on one example."""

    workdir: str
    """A run directory."""
    out: str = "analysis/maps"
    """Folder for the page, the pictures and their data."""
    checkpoint: Literal["best", "last"] = "best"
    """best: best on validation. last: the newest."""
    allow_code: bool = False
    """Import and call the attention function that the run's config.json names. Use this
    only for a directory that you trust."""
    split: str = "test"
    """Split of the example."""
    example: int | None = None
    """Which example of the split; by default the shortest."""
    layer: int = 1
    """Which layer, counted from 1."""


@dataclasses.dataclass(frozen=True)
class _Command:
    settings: type
    title: str
    run: Callable[[Any, Any], None]


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    args = cli.started(args)
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0 if args else 2)
    name = args.pop(0)
    with cli.user_errors():
        command = COMMANDS[known("command", name, COMMANDS)]
    summary = command.settings.__doc__ or ""
    settings = cli.parse(command.settings, f"{PROG} {name}", summary, args)
    with cli.user_errors():
        progress.say("starting jax ...")
        runtime.configure_jax()
        page = run(settings, shlex.join([*PROG.split(), name, *args]))
    print(f"{command.title}: {page}")


def run(settings: Any, typed: str = "") -> Path:
    """Runs one analysis; returns its page.

    Args:
      settings: one of the dataclasses of this module.
      typed: the command line, for the record.

    Raises:
      ValueError: the settings cannot work.
    """
    (command,) = [c for c in COMMANDS.values() if c.settings is type(settings)]
    from lra_jax.reports import charts
    from lra_jax.reports.page import Page
    from lra_jax.training.machine import commit, describe_devices, versions

    made_by = {
        "command": typed,
        "settings": dataclasses.asdict(settings),
        "commit": commit(),
        "device": describe_devices(),
        "versions": versions(),
    }
    if not settings.out:
        raise expected("--out", "a folder", repr(settings.out))
    page = Page(command.title, settings.out, made_by)
    try:
        not_negative("--seed", getattr(settings, "seed", 0))
        with charts.style():
            command.run(settings, page)
    except BaseException as error:
        page.discard()
        if not isinstance(error, InputError) or error.name not in _FLAGS:
            raise
        raise renamed(error, _FLAGS[error.name]) from error
    page.heading("Made by")
    page.items([f"{name}: {_flat(value)}" for name, value in made_by.items()])
    return page.write("index")


# The flags of the settings, by the names that the analyses use.
_FLAGS = {
    name: f"--{name}"
    for name in ("attention", "length", "draws", "repeats", "layer", "example", "split")
}
_FLAGS |= {"num_layers": "--layers", "batch_size": "--examples"}


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return str(value)


def _rank_collapse(settings: RankCollapse, page: Any) -> None:
    from lra_jax.analysis import bound_report
    from lra_jax.analysis import collapse_report as parts
    from lra_jax.analysis.variants import VARIANTS
    from lra_jax.attention.inputs import check_size

    if settings.weights is not None and settings.workdir is not None:
        raise expected("--weights", "nothing with --workdir", repr(settings.weights))
    if settings.length < 2:
        wanted = "at least 2, since a single token has no residual"
        raise expected("--length", wanted, settings.length)
    for name in ("layers", "examples", "draws"):
        if getattr(settings, name) is not None:
            check_size(f"--{name}", getattr(settings, name))
    variants = VARIANTS if settings.norm else parts.without_norm()
    # With weights, length and seed still matter: the sequences are random.
    if settings.weights is not None:
        _refuse(settings, "with --weights", "network", "attention", "layers", "draws")
    if settings.workdir is None:
        _refuse(settings, "without --workdir", "checkpoint", "allow_code")
    else:
        unread = ("network", "attention", "length", "layers", "draws", "seed")
        _refuse(settings, "with --workdir", *unread)
        saved, batch = _load(settings)
        parts.add_checkpoint(page, saved, batch, variants)
        bound_report.add_model_bound(page, saved.model, lambda: saved.run(batch))
        return
    if settings.weights is not None:
        parts.add_weights(page, settings, variants)
        return
    names = _names("network", settings.network)
    mechanisms = _names("attention", settings.attention)
    parts.check(names, mechanisms)
    curves = (len(names) + len(mechanisms)) * settings.draws
    sizes = {
        "draws": settings.draws,
        "batch_size": settings.examples,
        "length": settings.length,
        "num_layers": settings.layers,
        "seed": settings.seed,
        "clock": progress.Clock("curves", curves * len(variants)),
    }
    parts.add_networks(page, names, variants, **sizes)
    parts.add_mechanisms(page, names[0], mechanisms, variants, **sizes)
    if bound_report.NETWORK in names:
        bound_report.add_bound(
            page,
            length=settings.length,
            num_layers=settings.layers,
            seed=settings.seed,
        )


def _paths(settings: Paths, page: Any) -> None:
    from lra_jax.analysis import paths_report as parts
    from lra_jax.analysis.path_experiments import PUBLISHED, QUICK, run_experiment

    names = _names("experiment", settings.experiment)
    parts.check(names, settings.attention, settings.repeats)
    experiments = PUBLISHED if settings.full else QUICK
    parts.add_lengths(page)
    results = {}
    trained = [name for name in names if name != "circle"]
    for name in trained:
        progress.say(f"{name} ({len(results) + 1} of {len(trained)} training runs) ...")
        results[name] = run_experiment(
            name,
            experiments[name],
            mechanism=settings.attention,
            repeats=settings.repeats,
            seed=settings.seed,
        )
    if results:
        parts.add_results(page, results, experiments, quick=not settings.full)
    if "circle" in names:
        progress.say("circle ...")
        parts.add_circles(page, settings.attention, settings.seed)


def _spectrum(settings: Spectrum, page: Any) -> None:
    from lra_jax.analysis import spectrum_report as parts

    if settings.workdir is None:
        _refuse(settings, "without --workdir", "checkpoint", "allow_code")
    else:
        _refuse(settings, "with --workdir", "network", "attention", "length", "seed")
    if settings.workdir is not None:
        saved, batch = _load(settings)
        config = saved.config
        name = f"{config.mixers} on {config.task}"
        found = {name: parts.run_spectra(saved, batch)}
        plural = "example" if settings.examples == 1 else "examples"
        about = f"A trained model, step {saved.step}, {settings.examples} {plural}."
    else:
        names = _names("attention", settings.attention)
        parts.check(settings.network, names, settings.examples)
        found = {}
        for name in names:
            count = f"{len(found) + 1} of {len(names)} mechanisms"
            progress.say(f"{settings.network} with {name} ({count}) ...")
            found[name] = parts.initial_spectra(
                settings.network,
                name,
                settings.examples,
                settings.length,
                settings.seed,
            )
        about = (
            f"The network {settings.network} at initialisation on {settings.examples} "
            f"sequences of {settings.length} random tokens."
        )
    parts.add_spectra(page, found, about)
    parts.add_projections(page, found, about)


def _maps(settings: Maps, page: Any) -> None:
    from lra_jax.analysis.capture import check_layer
    from lra_jax.analysis.maps import example_maps, shortest
    from lra_jax.analysis.maps_report import add_maps
    from lra_jax.attention.inputs import check_size
    from lra_jax.training.restore import load_run

    check_size("--layer", settings.layer)
    progress.say(f"loading {settings.workdir} ...")
    saved = load_run(settings.workdir, settings.checkpoint, settings.allow_code)
    check_layer(saved.model, settings.layer)
    example = settings.example
    if example is None:
        known("--split", settings.split, saved.dataset.splits)
        example = shortest(saved.dataset.lengths(settings.split))
    batch = saved.examples([example], settings.split)
    progress.say("running the model on the example ...")
    maps = example_maps(saved, batch, settings.layer)
    config = saved.config
    title = (
        f"{config.mixers} on {config.task}, step {saved.step}: layer "
        f"{settings.layer}, example {example} of the {settings.split} split"
    )
    add_maps(page, maps, saved, title)


def _refuse(settings: Any, where: str, *names: str) -> None:
    """Refuses flags that nothing reads, because of where the model comes from."""
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name]:
            raise expected(f"--{name}", f"nothing {where}", f"{value!r}")


def _load(settings: Any) -> tuple[Any, Any]:
    """The run that ``--workdir`` names, and the first examples of its test split."""
    from lra_jax.attention.inputs import check_size
    from lra_jax.training.restore import load_run

    check_size("--examples", settings.examples)
    progress.say(f"loading {settings.workdir} ...")
    saved = load_run(settings.workdir, settings.checkpoint, settings.allow_code)
    total = saved.dataset.num_examples("test")
    if settings.examples > total:
        wanted = f"1 to {total}, the examples of the test split"
        raise expected("--examples", wanted, settings.examples)
    return saved, saved.examples(range(settings.examples))


def _names(flag: str, text: str) -> list[str]:
    """The names of a list; ``ValueError`` if there are none, or one is repeated."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise expected(f"--{flag}", "names separated by commas", "none")
    if len(set(names)) < len(names):
        wanted = "different names separated by commas"
        raise expected(f"--{flag}", wanted, repr(text))
    return names


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name.ljust(width)}  {(c.settings.__doc__ or '').splitlines()[0]}"
        for name, c in COMMANDS.items()
    ]
    return "\n".join(
        [
            f"usage: {PROG} COMMAND [--out=...] [...]",
            "",
            "Shows what attention does. Each command writes pictures, their data and",
            f"one page; {PROG} COMMAND --help lists its flags.",
            "",
            *lines,
        ]
    )


COMMANDS = {
    "rank-collapse": _Command(RankCollapse, "Rank collapse", _rank_collapse),
    "paths": _Command(Paths, "Paths", _paths),
    "spectrum": _Command(Spectrum, "Spectrum", _spectrum),
    "maps": _Command(Maps, "Attention maps", _maps),
}


if __name__ == "__main__":
    signals.run(main)
