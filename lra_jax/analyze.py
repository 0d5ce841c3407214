"""Shows what attention does: ``python -m lra_jax.analyze COMMAND ...``.

Each command writes pictures, their data, and one page with everything.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from lra_jax import cli, progress, runtime, signals
from lra_jax.errors import (
    Count,
    InputError,
    Name,
    Range,
    Size,
    check_types,
    expected,
    known,
    rename,
)

PROG = "python -m lra_jax.analyze"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    out: Name | None = None
    """Folder for the page, the pictures and their data; by default analysis/COMMAND."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfRun(_Settings):
    checkpoint: Literal["best", "last"] = "best"
    """best: best on validation. last: the newest."""
    allow_code: bool = False
    """Import and call your own code that the run's config.json names. Use this only for
    a directory that you trust."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCollapse(_OfRun):
    """How fast tokens become equal, with and without skips and MLPs."""

    network: str = "bert,albert,xlnet"
    """Networks at initialisation, one panel each; the first is also drawn with every
    mechanism."""
    attention: str = "softmax,linear,cosformer,flow,linformer"
    """Mechanisms to draw side by side; with --masks or --widths also `all`."""
    masks: bool = False
    """Only the collapse by depth of attention alone under full, causal and local masks,
    with and without layer normalisation."""
    widths: bool = False
    """Only the gap between the first two singular values by length, and sinks."""
    workdir: str | None = None
    """A run directory: draw the curves of its model instead, on its own data."""
    weights: str | None = None
    """The folder of a BERT, RoBERTa or GPT-2, with model.safetensors and config.json:
    draw the curves of these weights instead."""
    norm: bool = True
    """Use layer normalisation in the blocks."""
    length: Annotated[
        int, Range("at least 2, since a single token has no residual", 2)
    ] = 128
    """Length of the random sequences, in tokens."""
    layers: Size | None = None
    """Layers of the networks; by default 12, as published."""
    examples: Size = 4
    """Sequences per initialisation, or from the run's test split."""
    draws: Size = 2
    """Number of initialisations of each network."""
    seed: Count = 0
    """Seed of the first initialisation and its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paths(_Settings):
    """Which paths through a network do the work, and how a circle contracts."""

    experiment: str = "sorting,convex-hull,memorisation,circle"
    """Experiments to run."""
    attention: str = "softmax"
    """Mechanism of the networks."""
    full: bool = False
    """Use the published settings, whatever accuracy they reach. The default settings
    take minutes on 2 cores."""
    repeats: Size = 5
    """Number of draws of the random paths of each length."""
    seed: Count = 0
    """First seed of data, weights and paths."""
    seeds: Size = 1
    """Number of seeds. OUT/seeds keeps the result of each trained network, for the next
    run with the same settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spectrum(_OfRun):
    """How much of an attention matrix lies in a few singular values."""

    workdir: str | None = None
    """A run directory: its model on its own data."""
    network: str = "bert"
    """Without a run: the network at initialisation."""
    attention: str = "softmax,cosformer,linformer"
    """Without a run: mechanisms to draw side by side."""
    length: Size = 512
    """Without a run: tokens of a sequence."""
    examples: Size = 1
    """Number of sequences to average over."""
    draws: Size = 1
    """Without a run: number of initialisations of each network."""
    seed: Count = 0
    """Seed of the first initialisation and its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maps(_OfRun):
    """Where a trained model looks on one example."""

    workdir: str
    """A run directory; for runs on images also several, separated by commas, to draw
    side by side."""
    split: str = "test"
    """Split of the example."""
    example: Count | None = None
    """Index of the example to draw; by default the shortest."""
    layer: Size = 1
    """Layer to draw, counted from 1."""


@dataclasses.dataclass(frozen=True)
class _Command:
    settings: type
    title: str
    sections: Callable[[Any], Iterator[Any]]


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    args = cli.begin(args)
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        raise signals.Exit(0 if args else 2)
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
    by_settings = {c.settings: (name, c) for name, c in COMMANDS.items()}
    name, command = by_settings[type(settings)]
    from lra_jax.reports.page import Items, Page, Section
    from lra_jax.training.machine import commit, describe_devices, versions

    made_by = {
        "command": typed,
        "settings": dataclasses.asdict(settings),
        "commit": commit(),
        "device": describe_devices(),
        "versions": versions(),
    }
    check_types(settings, "--")
    page = Page(command.title, settings.out or f"analysis/{name}", made_by)
    try:
        for section in command.sections(settings):
            page.add(section)
    except BaseException as error:
        page.discard()
        if not isinstance(error, InputError) or error.name not in _FLAGS:
            raise
        raise rename(error, _FLAGS[error.name]) from error
    facts = [f"{name}: {_flat(value)}" for name, value in made_by.items()]
    page.add(Section("Made by", [Items(facts)]))
    return page.write("index")


# The flags of the settings, by the names that the analyses use.
_FLAGS = {n: f"--{n}" for n in ("attention", "length", "layer", "example", "split")}


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return str(value)


def _rank_collapse(settings: RankCollapse) -> Iterator[Any]:
    from lra_jax.analysis import bounded_collapse, collapse
    from lra_jax.analysis.networks import SHAPES, VARIANTS
    from lra_jax.attention import registry

    if settings.weights is not None and settings.workdir is not None:
        raise expected("--weights", "nothing with --workdir", repr(settings.weights))
    if settings.masks or settings.widths:
        if settings.workdir is not None or settings.weights is not None:
            raise expected("--masks, --widths", "no --workdir or --weights", "one")
        yield from _masks(settings)
        return
    variants = {n: v._replace(norm=settings.norm) for n, v in VARIANTS.items()}
    sizes: dict[str, Any] = {"length": settings.length, "seed": settings.seed}
    if settings.workdir is not None:
        saved, batch = _load(settings)
        yield collapse.model_section(saved, batch, variants)
        return
    sizes["batch_size"] = settings.examples
    if settings.weights is not None:
        yield collapse.weights_section(settings.weights, variants, **sizes)
        return
    names = cli.split_names("--network", settings.network)
    mechanisms = cli.split_names("--attention", settings.attention)
    for name in names:
        known("--network", name, SHAPES)
    for name in mechanisms:
        registry.resolve(name)
    sizes |= {"num_layers": settings.layers, "draws": settings.draws}
    yield from collapse.initial_sections(names, mechanisms, variants, **sizes)
    if bounded_collapse.NETWORK in names:
        yield bounded_collapse.initial_section(
            range(settings.seed, settings.seed + settings.draws),
            length=settings.length,
            num_layers=settings.layers,
        )


def _masks(settings: RankCollapse) -> Iterator[Any]:
    from lra_jax.analysis import masks
    from lra_jax.attention import registry

    names = cli.split_names("--attention", settings.attention)
    names = [*registry.MECHANISMS] if names == ["all"] else names
    seeds = range(settings.seed, settings.seed + settings.draws)
    if settings.masks:
        yield masks.masks_section(names, settings.length, seeds)
    if settings.widths:
        yield masks.widths_section(names, seeds)


def _paths(settings: Paths) -> Iterator[Any]:
    from lra_jax.analysis import circle
    from lra_jax.analysis import path_experiments as paths
    from lra_jax.analysis.path_network import check_mechanism

    names = cli.split_names("--experiment", settings.experiment)
    for name in names:
        known("--experiment", name, (*paths.PUBLISHED, "circle"))
    check_mechanism(settings.attention)
    yield paths.lengths_section()
    experiments = paths.PUBLISHED if settings.full else paths.QUICK
    trained = [name for name in names if name != "circle"]
    seeds = range(settings.seed, settings.seed + settings.seeds)
    results = {
        name: paths.run_seeds(
            name,
            experiments[name],
            seeds,
            folder=Path(settings.out or "analysis/paths").expanduser() / "seeds",
            mechanism=settings.attention,
            repeats=settings.repeats,
        )
        for name in progress.announce(trained, "training runs")
    }
    if results:
        yield paths.results_section(results, experiments, is_quick=not settings.full)
    if "circle" in names:
        progress.say("circle ...")
        yield circle.circles_section(settings.attention, seeds)


def _spectrum(settings: Spectrum) -> Iterator[Any]:
    from lra_jax.analysis import spectra
    from lra_jax.analysis.networks import SHAPES
    from lra_jax.attention import registry

    if settings.workdir is not None:
        saved, batch = _load(settings)
        config = saved.config
        models = {
            f"{config.mixers} on {config.task}": spectra.run_spectra(saved, batch)
        }
        plural = "example" if settings.examples == 1 else "examples"
        about = f"A trained model, step {saved.step}, {settings.examples} {plural}."
    else:
        names = cli.split_names("--attention", settings.attention)
        known("--network", settings.network, SHAPES)
        for name in names:
            registry.resolve(name)
        models = {
            name: spectra.initial_spectra(
                settings.network,
                name,
                settings.examples,
                settings.length,
                range(settings.seed, settings.seed + settings.draws),
            )
            for name in progress.announce(names, f"mechanisms of {settings.network}")
        }
        about = (
            f"The network {settings.network} at initialisation on {settings.examples} "
            f"sequences of {settings.length} random tokens, "
            f"draws: {settings.draws}, one standard deviation over them shaded."
        )
    yield spectra.spectrum_section(models, about)
    yield spectra.projection_section(models, about)


def _maps(settings: Maps) -> Iterator[Any]:
    from lra_jax.analysis.maps import (
        example_maps,
        maps_section,
        shortest,
        side_by_side,
    )
    from lra_jax.training.restore import load_run

    runs, example = [], settings.example
    for workdir in cli.split_names("--workdir", settings.workdir):
        progress.say(f"loading {workdir} ...")
        saved = load_run(workdir, settings.checkpoint, settings.allow_code)
        if example is None:
            known("--split", settings.split, saved.dataset.splits)
            example = shortest(saved.dataset.lengths(settings.split))
        batch = saved.examples([example], settings.split)
        progress.say("running the model on the example ...")
        runs.append((example_maps(saved, batch, settings.layer), saved))
    place = f"layer {settings.layer}, example {example} of the {settings.split} split"
    maps, saved = runs[0]
    config = saved.config
    if len(runs) > 1:
        yield side_by_side(runs, f"Attention on {config.task}: {place}")
        return
    title = f"{config.mixers} on {config.task}, step {saved.step}: {place}"
    yield maps_section(maps, saved, title)


def _load(settings: Any) -> tuple[Any, Any]:
    """The run that ``--workdir`` names, and the first examples of its test split."""
    from lra_jax.training.restore import load_run

    progress.say(f"loading {settings.workdir} ...")
    saved = load_run(settings.workdir, settings.checkpoint, settings.allow_code)
    total = saved.dataset.num_examples("test")
    if settings.examples > total:
        most = f"1 to {total}, the examples of the test split"
        raise expected("--examples", most, settings.examples)
    return saved, saved.examples(range(settings.examples))


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
    cli.run(main)
