"""The data of a task: ``python -m lra_jax.data prepare|describe|sample --task=...``.

prepare   generates, downloads or reads the data once, and keeps them for training.
describe  prints their sizes, lengths, labels and fingerprint.
sample    shows some examples: as text, or for images as a contact sheet (PNG).

The flags are those of training: with a run's ``--task``, ``--attention``, ``--preset``
and ``--data.*`` flags, each command works on the data that the run will read.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lra_jax import cli, progress, signals
from lra_jax.attention import registry
from lra_jax.configs import DataConfig
from lra_jax.errors import Count, Name, Size, check_types, expected, known, writable
from lra_jax.files import expand_home
from lra_jax.tasks import Task, get_task

if TYPE_CHECKING:
    import numpy as np

    from lra_jax.data.dataset import SequenceDataset

_CHARACTERS = 600
_LABELS = 20  # If there are more classes, only the first are shown.
_HELP = (__doc__ or "").strip().replace("``", "'")


@dataclasses.dataclass(frozen=True)
class DataCommand:
    """The data."""

    task: str = "listops"
    """Task to which the data belong."""
    attention: str = "cosformer"
    """Mechanism of the run: its presets may have data settings of their own."""
    preset: str | None = None
    """Preset whose data settings are the defaults; by default the task's first."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)

    def check(self) -> None:
        """Refuses settings that cannot work, before data are made or downloaded.

        Raises:
          ValueError: with the flag, what is expected, and what it got.
        """
        check_types(self, "--")
        if ":" not in self.attention:  # A user's own has no data settings.
            registry.resolve(self.attention, "--attention")
        self.data.check()


@dataclasses.dataclass(frozen=True)
class SampleCommand(DataCommand):
    """The examples."""

    split: Literal["train", "valid", "test"] = "train"
    """Split from which examples are drawn."""
    count: Size = 16
    """Number of examples."""
    seed: Count = 0
    """Seed for choosing them."""
    out: Name | None = None
    """Images: the PNG to write; by default TASK-SPLIT.png in the current folder."""

    @property
    def file(self) -> Path:
        """The PNG to write."""
        return expand_home(self.out or f"{self.task}-{self.split}.png", "--out")

    def check(self) -> None:
        super().check()
        if self.out is not None and get_task(self.task).shape_of(self.data) is None:
            needed = f"nothing for --task={self.task}, which has no images"
            raise expected("--out", needed, repr(self.out))
        if self.file.suffix.lower() != ".png":
            raise expected("--out", "a file ending in .png", repr(self.out))


def main(args: Sequence[str] | None = None) -> None:
    """The command line; exit codes as in ``lra_jax.cli``."""
    args = cli.arguments(args)
    if not args or args[0] in ("-h", "--help"):
        print(_HELP)
        print(f"\nCommands: {', '.join(COMMANDS)}; each has a --help.")
        raise signals.Exit(0 if args else 2)
    with cli.user_errors():
        name = known("command", args[0], COMMANDS)
    kind, run = COMMANDS[name]
    preset = cli.parse_preset(args[1:])
    default = kind(
        task=preset.task,
        attention=preset.attention,
        preset=preset.preset,
        data=preset.data,
    )
    prog = f"python -m lra_jax.data {name}"
    flags = _HELP.rpartition("\n\n")[2]
    command = cli.parse(
        kind, prog, f"{run.__doc__}\n\n{flags}", args[1:], default=default
    )
    signals.advise("interrupted; incomplete data are not kept")
    with cli.user_errors():
        # The other commands write text to stdout.
        say = progress.say if name == "prepare" else progress.note
        say(f"looking for the data of {command.task} ...")
        task = get_task(command.task)
        command.check()
        run(command, task, task.prepare(command.data))


def _prepare(_: Any, task: Task, dataset: "SequenceDataset") -> None:
    """Generates, downloads or reads the data of a task once, and keeps them."""
    sizes = ", ".join(f"{dataset.num_examples(s):,} {s}" for s in dataset.splits)
    print(f"{task.name}: {sizes}")
    print(f"in {dataset.folder}")


def _describe(command: DataCommand, task: Task, dataset: "SequenceDataset") -> None:
    """Prints the sizes, lengths, labels and fingerprint of a task's data."""
    import numpy as np

    _prepare(command, task, dataset)
    print(f"fingerprint {dataset.fingerprint}")
    shape = dataset.image_shape
    kind = f"images of {shape[0]} x {shape[1]}" if shape else "sequences"
    size = dataset.vocab_size
    tokens = f"ids below {size}"
    if dataset.token_shape:
        is_real = dataset.token_dtype.kind == "f"
        tokens = f"vectors of {size}" if is_real else f"colours below {size}"
    has_numbers = dataset.has_numbers or not dataset.num_classes
    targets = "numbers" if has_numbers else f"{dataset.num_classes} classes"
    print(
        f"{' and '.join(dataset.sequences)}: {kind} of at most {dataset.max_length}, "
        f"{tokens}; {targets}"
    )
    for split in dataset.splits:
        lengths, labels = dataset.lengths(split), dataset.labels(split)
        sizes = f"lengths {lengths.min()} to {lengths.max()}, mean {lengths.mean():.0f}"
        if dataset.has_numbers:
            mean, deviation = dataset.scale
            numbers = labels.astype(np.float64) * deviation + mean
            spread = f"mean {numbers.mean():.4g}, deviation {numbers.std():.4g}"
            print(f"{split}: {sizes}; numbers: {spread}")
            continue
        if dataset.several:
            labels = np.nonzero(labels)[1]
        labels = labels[labels >= 0]  # Rows with fewer targets are padded with -1.
        if not labels.size:  # Every token of a text is a target.
            rows = "1 row" if len(lengths) == 1 else f"{len(lengths):,} rows"
            print(f"{split}: {rows} of {lengths.max()}")
            continue
        counts = np.bincount(labels, minlength=dataset.num_classes)
        words = dataset.classes or range(len(counts))
        shown = [f"{words[i]}: {n:,}" for i, n in enumerate(counts.tolist()) if n]
        more = f" and {len(shown) - _LABELS} more" if len(shown) > _LABELS else ""
        print(
            f"{split}: {sizes}, median {np.median(lengths):.0f}; majority "
            f"{100 * counts.max() / counts.sum():.2f} %; labels "
            f"{', '.join(shown[:_LABELS])}{more}"
        )


def _sample(command: SampleCommand, task: Task, dataset: "SequenceDataset") -> None:
    """Shows some examples of a task: as text, or for images as a contact sheet."""
    import numpy as np

    total = dataset.num_examples(command.split)
    if command.count > total:
        needed = f"1 to {total}, the examples of {command.split}"
        raise expected("--count", needed, command.count)
    drawn = np.random.default_rng(command.seed).choice(total, command.count, False)
    indices = np.sort(drawn).tolist()
    examples = dataset.source(command.split).__getitems__(indices)
    if dataset.image_shape is None:
        for index, example in zip(indices, examples, strict=True):
            print(dataset.answer(command.split, index))
            _print_example(example, task, dataset)
    else:
        labels = dataset.labels(command.split)[indices].tolist()
        names = [str(dataset.classes[x] if dataset.classes else x) for x in labels]
        shape = *dataset.image_shape, *dataset.token_shape
        images = np.stack([example["tokens"].reshape(shape) for example in examples])
        _write_sheet(command.file, images, names)


def _print_example(example: dict, task: Task, dataset: "SequenceDataset") -> None:
    for name in dataset.sequences:
        tokens = example[name]
        if "segment_ids" in example:  # A row of a text; the rest of it is padding.
            tokens = tokens[example["segment_ids"] > 0]
        text = (dataset.decode or task.decode)(tokens)
        cut = "..." if len(text) > _CHARACTERS else ""
        print(f"{name} ({len(example[name])}): {text[:_CHARACTERS]}{cut}")
    print()


def _write_sheet(file: Path, images: "np.ndarray", names: list[str]) -> None:
    from lra_jax.data.sheets import contact_sheet, write_png
    from lra_jax.files import make_room

    with writable("--out", "a file", file):
        make_room(file)
    write_png(file, contact_sheet(images, names))
    print(f"{len(images)} images, each under its label, in {file}")


COMMANDS: dict[str, tuple[type, Callable[..., None]]] = {
    "prepare": (DataCommand, _prepare),
    "describe": (DataCommand, _describe),
    "sample": (SampleCommand, _sample),
}

if __name__ == "__main__":
    cli.run(main)
