"""The lines that a run prints at its start and at its end."""

import dataclasses
import statistics

import jax

from lra_jax.configs import Config, get_preset
from lra_jax.configs.base import LEAST_STEPS_OF_BUCKETS
from lra_jax.data.stages import Curriculum, LengthWarmup
from lra_jax.tasks import Task
from lra_jax.training.console import RunConsole, format_seconds
from lra_jax.training.machine import describe_devices
from lra_jax.training.result import Result, standard_error
from lra_jax.training.trainer import Trainer

Row = tuple[str, str, str]


def facts(trainer: Trainer) -> dict[str, str]:
    """The task, data, model, training and devices of a run, in words."""
    config, dataset = trainer.config, trainer.dataset
    sizes = (f"{dataset.num_examples(s):,} {s}" for s in dataset.splits)
    packed = config.data.packing
    lengths = ", ".join(map(str, trainer.buckets[-1 if packed else 0 :]))
    return {
        "task": f"{config.task}, {', '.join(sizes)}",
        "data": f"{dataset.name}, fingerprint {dataset.fingerprint}",
        "model": (
            f"{config.mixers}, preset {config.preset}, "
            f"{trainer.num_parameters:,} parameters, {config.train.dtype}"
        ),
        "training": (
            f"{config.train.steps} steps of {config.train.batch_size}, "
            f"{_parts_of_training(config)}"
            f"{'packed into rows of' if packed else 'padded to'} {lengths}"
            f"{_single_bucket(config)}"
            f"{_shortened_warmup(config)}"
        ),
        "devices": f"{describe_devices()}, {_mesh(trainer)} in the mesh",
        "run": str(trainer.workdir),
    }


def _parts_of_training(config: Config) -> str:
    """Pretraining, and the stages that show short or shortened examples."""
    train, first = config.train, config.pretrain.steps
    words = f"{first} of them pretraining, " if first else ""
    kinds = {"short examples first": Curriculum, "beginnings first": LengthWarmup}
    for name, kind in kinds.items():
        setting = getattr(train, kind.name)
        stages = kind.parse(setting, train.steps).stages
        if stages:
            where = ", all in pretraining" if stages[-1][1] <= first else ""
            words += f"{name} ({setting}{where}), "
    return words


def _single_bucket(config: Config) -> str:
    """Says so if all batches have one length because the run is short."""
    if config.buckets == config.data.buckets or config.data.packing:
        return ""
    return (
        f" (one length: in less than {LEAST_STEPS_OF_BUCKETS} steps, compiling several "
        "takes longer than training; --data.buckets sets them)"
    )


def _shortened_warmup(config: Config) -> str:
    """Says so if the preset's warm-up is too long for the run."""
    preset = get_preset(config.task, config.preset, config.attention).train
    if not dataclasses.replace(config.train, warmup=preset.warmup).too_warm:
        return ""
    return f"; warm-up of {config.train.warmup} instead of {preset.warmup}"


def _mesh(trainer: Trainer) -> str:
    data, seq = trainer.mesh.shape["data"], trainer.mesh.shape["seq"]
    text = str(data) if seq == 1 else f"{data} x {seq} (sequence)"
    processes = jax.process_count()
    return text if processes == 1 else f"{text}, {processes} processes,"


def show_result(
    console: RunConsole, task: Task, config: Config, result: Result
) -> None:
    """Prints test accuracies, with baselines and comparable published results, or the
    task's other scores."""
    if not result.scores:
        console.table("test accuracy, percent", _accuracies(task, config, result))
    else:
        _show_scores(console, result)
    waited = ""
    if result.data_wait is not None:
        waited = f"; {100 * result.data_wait:.1f} % of the time waiting for data"
    console.line(
        f"{format_seconds(result.seconds)} in total, "
        f"{result.steps_per_second:.2f} steps/s in training "
        f"({result.steps_per_second_kind}{waited}), "
        f"{result.parameters:,} parameters"
    )


def _show_scores(console: RunConsole, result: Result) -> None:
    steps = {"best": result.best_step, "last": result.steps}
    for key, value in result.scores.items():
        name, _, which = key.rpartition("_")
        remark = f"best checkpoint, {which}"
        if which in steps:
            remark = f"{which} checkpoint, step {steps[which]}"
        console.line(f"test {name.replace('_', ' ')} {value:.4f}  ({remark})")


def _accuracies(task: Task, config: Config, result: Result) -> list[Row]:
    error = standard_error(result.test_accuracy_best, result.test_examples)
    # The labels of an example may depend on each other.
    counted = ", each counted once" if task.per_position else ""
    seen = result.validation == "test"
    warning = "; chosen on the test split itself" if seen else ""
    remark = (
        f"step {result.best_step}, +-{error:.2f} (standard error over "
        f"{result.test_examples} examples{counted}), "
        f"best validation {result.best_by}{warning}"
    )
    best, last = result.test_accuracy_best, result.test_accuracy_last
    rows = [
        (f"{config.mixers}, best checkpoint", f"{best:.2f}", remark),
        (f"{config.mixers}, last checkpoint", f"{last:.2f}", f"step {result.steps}"),
        *_chance_and_parts(task, result),
    ]
    if result.official_data:
        floors, published = task.floors, task.published_beside(config)
        rows += [(f"baseline: {name}", f"{value:.2f}", "") for name, value in floors]
        rows += [
            (f"published: {row.model}", f"{row.accuracy:.2f}", row.source)
            for row in published
        ]
    return rows


def _chance_and_parts(task: Task, result: Result) -> list[Row]:
    """Rows of some tasks only: accuracy above chance, and by length."""
    parts, rows = result.test_accuracy_by_length, []
    if result.chance is not None and result.test_scaled_accuracy is not None:
        which = "mean over the parts" if task.by_parts and parts else "best checkpoint"
        scaled = f"{100 * result.test_scaled_accuracy:.1f} %"
        remark = f"the {which} is {scaled} of the way from it to 100"
        rows.append(("chance", f"{result.chance:.2f}", remark))
    rows += [
        (f"part {name}", f"{accuracy:.2f}", "best checkpoint")
        for name, accuracy in parts.items()
    ]
    if len(parts) > 1:
        mean = statistics.fmean(parts.values())
        rows.append(("mean over the parts", f"{mean:.2f}", ""))
    return rows
