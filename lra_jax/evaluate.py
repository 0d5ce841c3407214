"""Scores a saved run: ``python -m lra_jax.evaluate --workdir=runs/...``."""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lra_jax import cli, files, progress, runtime, signals
from lra_jax.errors import expected, known, rename, writable
from lra_jax.files import expand_home


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """The run to score, and where its data are."""

    workdir: str
    """Run directory."""
    split: str = "test"
    """Split to score: test, valid or train, or a part of the test that the task scores
    separately, such as a length."""
    checkpoint: Literal["best", "last"] = "best"
    """best: best on validation. last: the newest."""
    predictions: str | None = None
    """Write the prediction for each example to this file, as one line of JSON; not for
    lm, mlm and control, whose rows have no labels."""
    save: str | None = None
    """Write the model for lra_jax.models.load to this file, NAME.safetensors, and its
    settings to NAME.json."""
    allow_code: bool = False
    """Import and call your own parts, such as an attention package.module:function,
    that the run's config.json names, from the run's code/. Use this only for a
    directory that you trust."""


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    args = cli.begin(args)
    prog = "python -m lra_jax.evaluate"
    config = cli.parse(EvaluateConfig, prog, "Scores a saved run.", args)
    with cli.user_errors():
        progress.say(f"loading {config.workdir} ...")
        runtime.configure_jax()
        result = run(config, quiet=False)
    others = ("accuracy", "loss", "step", "examples")
    scores = "".join(f"  {x} {y:.4f}" for x, y in result.items() if x not in others)
    accuracy = f"accuracy {result['accuracy']:.2f} %  " if "accuracy" in result else ""
    print(
        f"{config.split} {accuracy}loss {result['loss']:.4f}{scores}  "
        f"({result['examples']} examples, {config.checkpoint} checkpoint, "
        f"step {result['step']})"
    )


def _check_predictions(config: EvaluateConfig, file: str) -> None:
    """Refuses to replace a file of the run, or the model, which is saved first."""
    from lra_jax.training.workdir import refuse_own_file

    refuse_own_file(Path(config.workdir), Path(file), "--predictions")
    if config.save is not None:
        model = expand_home(config.save, "--save").resolve()
        files = model, model.with_suffix(".json")
        if expand_home(file, "--predictions").resolve() in files:
            needed = f"another file than those of --save={config.save}"
            raise expected("--predictions", needed, file)


def run(config: EvaluateConfig, quiet: bool = True) -> dict[str, Any]:
    """Scores a checkpoint of a run.

    Args:
      config: the run, and the files to write.
      quiet: print nothing; otherwise report progress if it takes long.

    Returns:
      accuracy in percent, loss, step of the checkpoint and number of examples; for
      language models also bits_per_byte and perplexity; for numbers squared_error and
      r2 in place of the accuracy; for several labels f1 and label_accuracy; for control
      return and raw_return.

    Raises:
      ValueError: it is not a run directory, has no checkpoint, its data have changed or
        have no such split, or a file cannot be written or has the wrong suffix.
    """
    from lra_jax.models.saved import check_free
    from lra_jax.training.console import RunConsole
    from lra_jax.training.restore import export, open_run, predictions
    from lra_jax.training.workdir import refuse_own_file

    if config.predictions == "":
        raise expected("--predictions", "a file", "''")
    if config.save is not None:
        try:
            check_free(config.save)
        except ValueError as error:
            raise rename(error, "--save") from error
    if config.save is not None and config.checkpoint == "last":
        # The run's own model is that of the best checkpoint.
        refuse_own_file(Path(config.workdir), Path(config.save), "--save")
    trainer = open_run(config.workdir, config.allow_code)
    dataset = trainer.dataset
    known("--split", config.split, (*dataset.splits, *dataset.parts))
    if config.predictions is not None:
        if not dataset.labels(config.split).size:
            rows = f"--task={trainer.task.name}, whose rows have no labels"
            raise expected("--predictions", f"no file for {rows}", config.predictions)
        _check_predictions(config, config.predictions)
    for name in ("predictions", "save"):
        file = getattr(config, name)
        if file is not None:
            with writable(f"--{name}", "a file", file):
                files.make_room(Path(file).expanduser())
    with contextlib.closing(trainer.checkpoints) as checkpoints:
        params, step = checkpoints.load_params(config.checkpoint, trainer.state)
        if config.save is not None:
            export(config.save, trainer, params, step)
        console = RunConsole(step, quiet=quiet)
        if config.predictions is not None:
            answers = predictions(trainer, params, config.split, console)
            text = "".join(f"{json.dumps(line)}\n" for line in answers)
            files.write_text(expand_home(config.predictions, "--predictions"), text)
        means = trainer.evaluate(params, config.split, console=console)
    accuracy = means.pop("accuracy")
    shown = {"accuracy": 100 * accuracy} if dataset.metric == "accuracy" else {}
    about = {"step": step, "examples": dataset.num_examples(config.split)}
    return {**shown, "loss": means.pop("loss"), **about, **means}


if __name__ == "__main__":
    cli.run(main)
