"""A task is one room: it owns its settings, and a new one is a file and a line."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import helpers
import pytest

import lra_jax
from lra_jax import train
from lra_jax.configs import TASKS, Config, get_preset
from lra_jax.data import __main__ as data_command
from lra_jax.tasks import get_task

COMMON = {"dir", "path", "buckets", "packing"}
SETTINGS = {
    task: {
        field.name.replace("_", "-")
        for field in dataclasses.fields(get_task(task).data)
    }
    for task in TASKS
}
ALL = set().union(*SETTINGS.values())


def stopped(capsys, command, *args: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stop:
        command.main(list(args))
    return stop.value.code, *capsys.readouterr()


def test_a_task_has_no_setting_that_it_does_not_read():
    assert SETTINGS["image"] == COMMON
    assert SETTINGS["text"] == COMMON | {"seed", "max-length", "validation"}
    drawn = {"buckets", "packing", "seed", "num-train", "num-valid", "num-test"}
    assert SETTINGS["mad-recall"] == drawn | {"vocab-size", "length"}


@pytest.mark.parametrize("task", TASKS)
def test_help_lists_the_tasks_own_settings(task, capsys):
    commands = [(train,), (data_command, "prepare")]
    for command, *args in commands if task in ("listops", "lm") else commands[:1]:
        code, out, _ = stopped(capsys, command, *args, f"--task={task}", "--help")
        assert code == 0
        assert set(re.findall(r"--data\.([a-z-]+)", out)) == SETTINGS[task]


@pytest.mark.parametrize("task", TASKS)
def test_flags_of_other_tasks_are_refused(task, capsys):
    first, *_, last = sorted(ALL - SETTINGS[task])
    for command, name in (((train,), first), ((data_command, "prepare"), last)):
        flags = (*command[1:], f"--task={task}", f"--data.{name}=1")
        code, out, err = stopped(capsys, command[0], *flags)
        expected = f"--data.{name.replace('-', '_')}: expected a flag of --task={task}"
        helpers.assert_one_error(code, err, 2, expected, "got an unknown one; ")
        assert out == ""


def test_the_nearest_flag_is_named(capsys):
    _, _, err = stopped(capsys, train, "--task=pathx", "--data.levl=easy")
    assert "did you mean '--data.level'?" in err


@pytest.mark.parametrize("task", TASKS)
def test_configs_come_back_from_json(task):
    config = Config(task=task)
    for preset in get_task(task).presets:
        config = get_preset(task, preset).replace(data={"buckets": "7"})
        back = Config.from_dict(json.loads(json.dumps(config.to_dict())))
        assert back == config and type(back.data) is get_task(task).data
    assert type(Config(task=task).data) is get_task(task).data
    foreign = config.to_dict()
    foreign["data"]["colour"] = "red"
    with pytest.raises(ValueError, match=r"^config: expected .* got .*'colour'"):
        Config.from_dict(foreign)


DIALECT = "clip=None,competition_axis=heads,feature_map=relu+1e-6"


# Layers, heads, widths of embedding, of all heads together and of the MLP; rate,
# warm-up, steps, batch; dropout and pooling: thuml/Flowformer, folder Flowformer_LRA,
# the files flowformer_base.py and the base files that they start from.
@pytest.mark.parametrize(
    ("task", "sizes", "training", "dropout", "pooling"),
    [
        ("listops", (1, 2, 512, 512, 1024), (0.005, 1000, 5000, 32), 0.1, "cls"),
        ("text", (1, 4, 256, 256, 1024), (0.005, 8000, 20_000, 32), 0.1, "cls"),
        ("retrieval", (4, 4, 128, 128, 512), (0.05, 8000, 5000, 32), 0.1, "first"),
        ("image", (1, 4, 128, 64, 128), (5e-4, 175, 35_000, 256), 0.3, "cls"),
        ("pathfinder", (1, 8, 256, 128, 256), (1e-4, 312, 62_400, 512), 0.2, "mean"),
    ],
)
def test_the_published_flowformer(task, sizes, training, dropout, pooling):
    config = get_preset(task, "official", "flow")
    assert _sizes(config) == sizes and _training(config) == training
    assert config.model.attention_options == DIALECT
    assert (config.model.dropout, config.model.pooling) == (dropout, pooling)
    (row,) = get_task(task).published_beside(config)
    assert row.model == "Flowformer" and "Flowformer repository" in row.source


# OpenNLPLab/lra, configs/experiment/trans-cosformer-lra-*.yaml, with the 8 heads and
# the MLP of twice the width of configs/model/transformer_cosformer.yaml. LRA's own are
# the warm-up of ListOps, the batches of retrieval and image, and the steps of image.
@pytest.mark.parametrize(
    ("task", "sizes", "training", "decay", "dropout"),
    [
        ("listops", (6, 8, 128, 128, 256), (0.01, 1000, 80_000, 50), 0.01, 0.0),
        ("text", (5, 8, 64, 64, 128), (5e-4, 80, 50_000, 16), 0.0, 0.0),
        ("retrieval", (4, 8, 128, 128, 256), (1e-3, 800, 50_000, 32), 0.0, 0.0),
        ("image", (6, 8, 512, 512, 1024), (0.004, 1000, 200_000, 50), 0.05, 0.2),
        ("pathfinder", (6, 8, 256, 256, 512), (5e-4, 2500, 500_000, 64), 0.0, 0.1),
    ],
)
def test_cosformer_by_its_own_group(task, sizes, training, decay, dropout):
    config = get_preset(task, "official", "cosformer")
    assert _sizes(config) == sizes and _training(config) == training
    assert (config.train.weight_decay, config.model.dropout) == (decay, dropout)
    assert config.train.schedule == "cosine"
    assert config.model.attention_options == "eps=0.0001"
    (row,) = get_task(task).published_beside(config)
    assert row.model == "cosFormer" and "S4's code base" in row.source
    if task == "text":
        assert config.data.longest == config.model.max_length == 4096


def _sizes(config):
    model = config.model
    return (
        *(model.num_layers, model.num_heads, model.embed_dim, model.qkv_dim),
        model.mlp_dim,
    )


def _training(config):
    training = config.train
    return (
        *(training.learning_rate, training.warmup, training.steps),
        training.batch_size,
    )


TOY = '''"""Parity: whether a string of bits holds an odd number of ones."""

import dataclasses

from lra_jax.configs import Config, ModelConfig, StoredData, TrainConfig
from lra_jax.tasks import Task


@dataclasses.dataclass(frozen=True)
class ParityData(StoredData):
    """Which strings."""

    bits: int = 6
    """Bits of a string."""


def compact(attention: str) -> Config:
    """A run of seconds."""
    return Config(
        task="bits",
        attention=attention,
        train=TrainConfig(steps=4, warmup=1, eval_every=2, log_every=2, batch_size=8),
        model=ModelConfig(num_layers=1, embed_dim=8, qkv_dim=8, max_length=6),
        data=ParityData(),
    )


def prepare(data_dir, *, bits, path):
    """Every string of so many bits, in each split."""
    import numpy as np

    from lra_jax.data import builder

    class Parity(builder.SequenceBuilder):
        """Strings of bits."""

        name = "toy_parity"
        VOCAB_SIZE = 3
        NUM_CLASSES = 2

    def examples(root):
        numbers = np.arange(2**bits, dtype=">u2").view(np.uint8).reshape(-1, 2)
        rows = np.unpackbits(numbers, axis=1)[:, -bits:]
        labels = (rows.sum(1) % 2).tolist()
        count = len(labels)
        splits = ("train", "valid", "test")
        return {s: (count, zip(rows, labels, strict=True)) for s in splits}

    config = builder.SequenceConfig(
        name=f"bits{bits}", max_length=bits, expected_bytes=4096, examples=examples
    )
    return builder.prepare(Parity, config, data_dir)


TASK = Task(
    name="bits",
    data=ParityData,
    presets={"compact": compact},
    reader="lra_jax.tasks.bits:prepare",
    floors=(("chance", 50.0),),
    is_official=lambda data, dataset: data.bits == 6,
)
'''
LINE = '    "bits": "lra_jax.tasks.bits:TASK",\n'


@pytest.fixture(scope="module")
def with_a_toy(tmp_path_factory):
    """A copy of the package with one more task: a file and a line."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "lra_jax"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(lra_jax.__file__).parent, package, ignore=ignored)
    (package / "tasks" / "bits.py").write_text(TOY)
    registry = package / "configs" / "registry.py"
    first = "TASKS = {\n"
    text = registry.read_text()
    assert text.count(first) == 1
    registry.write_text(text.replace(first, first + LINE))
    return folder


def in_copy(folder: Path, module: str, *args: str):
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); "
        f"sys.argv = [{module!r}, *{list(args)!r}]; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return helpers.run("-c", code)


def test_a_new_task_has_its_help(with_a_toy):
    end = in_copy(with_a_toy, "lra_jax.train", "--task=bits", "--help")
    assert end.returncode == 0, end.stderr
    assert "bits: compact" in end.stdout
    assert set(re.findall(r"--data\.([a-z-]+)", end.stdout)) == COMMON | {"bits"}
    wrong = in_copy(with_a_toy, "lra_jax.train", "--task=bits", "--data.level=easy")
    helpers.assert_one_error(wrong.returncode, wrong.stderr, 2, "--task=bits")


@pytest.mark.slow
def test_a_new_task_is_trained(with_a_toy, tmp_path):
    flags = ["--task=bits", f"--data.dir={tmp_path}", f"--workdir={tmp_path / 'run'}"]
    end = in_copy(with_a_toy, "lra_jax.train", *flags, "--attention=linear")
    assert end.returncode == 0, end.stderr
    assert "baseline: chance" in end.stdout and "published" not in end.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["task"], result["test_examples"]) == ("bits", 64)
