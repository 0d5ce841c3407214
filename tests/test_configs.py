"""Configs as data: round trips, identities, names of runs; every preset holds up."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lra_jax import attention, tasks
from lra_jax.configs import TASKS, Config, TrainConfig, get_preset
from lra_jax.tasks.encoder import parse_options
from lra_jax.training.optimizer import make_schedule

MECHANISMS = attention.names()
ALL = [(task, preset) for task in TASKS for preset in tasks.get_task(task).presets]
DATA = {"vocab_size": 256, "num_classes": 10}


# Every mechanism with two presets of one task; of the others those whose settings
# depend on the mechanism, and one more; of large images only linear attention.
EVERY = (("listops", "official"), ("listops", "modern"))
FEW = {
    "official": (
        *("softmax", "linear", "linformer", "performer", "local", "longformer"),
        *("bigbird", "sinkhorn", "reformer", "sparse", "fnet", "flow"),
        "cosformer",
    ),
    "compact": ("linformer",),
    "modern": ("softmax", "cosformer", "gau", "hgrn"),
    "modern-quick": ("cosformer", "hgrn"),
    "modern-large": ("cosformer", "hgrn"),
}
SUITES = ("softmax", "cosformer")
LARGE = ("cosformer",)
CASES = [
    (task, preset, mechanism)
    for task, preset in ALL
    for mechanism in (
        MECHANISMS
        if (task, preset) in EVERY
        else FEW[preset]
        if tasks.get_task(task).suite is None
        else LARGE
        if tasks.get_task(task).suite == "language"
        else SUITES
    )
    if mechanism == "linear" or task not in ("pathfinder64", "pathx", "path256")
]


class OneKey:
    """A key for all arrays, in place of Flax's counters, which are slow to trace."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


@pytest.mark.parametrize(("task", "preset", "mechanism"), CASES)
def test_presets(task, preset, mechanism):
    config = get_preset(task, preset, mechanism)
    assert (config.task, config.preset) == (task, preset)
    assert (config.attention, config.workdir, config.seed) == (mechanism, None, 0)
    known_task = tasks.get_task(task)
    known_task.check(config)
    assert float(jnp.asarray(make_schedule(config.train)(config.train.steps))) >= 0
    assert config.train.steps % config.train.eval_every == 0
    assert config.model.max_length >= (config.data.longest or 0)
    data = DATA | {"image_shape": known_task.image_shape}
    if not config.model.hybrid:  # Blocks are alike: two tell of all.
        config = config.replace(model={"num_layers": min(2, config.model.num_layers)})
    model = nnx.eval_shape(
        lambda: known_task.make_model(config, SimpleNamespace(**data), OneKey())
    )
    graph, params = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((2, config.model.max_length), "uint8")
    lengths = jax.ShapeDtypeStruct((2,), "int32")
    inputs = (tokens, lengths) * (2 if task == "retrieval" else 1)
    shape: tuple[int, ...] = (2, 10)
    if known_task.per_position:
        inputs += (jax.ShapeDtypeStruct((2, 3), "int32"),)
        shape = (2, 3, 256 if known_task.suite == "language" else 10)
    logits = jax.eval_shape(
        lambda params, *args: nnx.merge(graph, params)(*args), params, *inputs
    )
    assert logits.shape == shape and logits.dtype == "float32"


def test_every_task_has_presets_and_facts():
    for name in TASKS:
        task = tasks.get_task(name)
        assert task.name == name
        ours = {"quick", "official"}
        if task.suite is None:
            ours = {"compact", "modern", "official"}
        elif task.suite == "language":
            ours = {"tiny"}
        assert ours <= set(task.presets)
        assert all(0 < row.accuracy <= 100 and row.source for row in task.published)
        assert task.suite is None or set(task.sweeps) == set(task.presets)
        assert all(0 < floor < 100 for _, floor in task.floors)


def test_official_settings_of_listops():
    config = get_preset("listops", "official", "linformer")
    assert config.model.attention_options == ("features=16,sharing=key_value")
    assert get_preset("listops", "official", "softmax").model.attention_options == ""
    rates = [float(make_schedule(config.train)(step)) for step in (0, 500, 1000, 4000)]
    # 0.05 * min(1, step / 1000) / sqrt(max(step, 1000))
    assert rates == pytest.approx([0, 7.90569e-4, 1.581139e-3, 7.90569e-4], rel=1e-4)


def test_units_that_replace_the_mlp_get_no_settings_of_it():
    for preset in ("flowformer", "cosformer"):
        config = get_preset("lm", preset, "gau")
        assert (config.model.activation, config.model.mlp_dropout) == ("gelu", None)
        tasks.get_task("lm").check(config)
        assert get_preset("lm", preset, "flow").model.activation == "relu"


def test_the_models_of_cosformers_own_group():
    """Those of its files, trans-cosformer-lra-*.yaml, and of S4's code around them."""
    models = {
        task: get_preset(task, "official", "cosformer").model
        for task in ("listops", "text", "retrieval", "image", "pathfinder")
    }
    kinds = {task: (m.norm, m.post_norm, m.pooling) for task, m in models.items()}
    assert kinds == {
        "listops": ("layer", False, "mean"),
        "text": ("batch", False, "mean"),
        "retrieval": ("layer", True, "mean"),
        "image": ("batch", False, "mean"),
        "pathfinder": ("layer", False, "last"),
    }
    for task, model in models.items():
        assert (model.input_dropout, model.mlp_dropout) == (0.1, 0.0)
        assert (model.positions, model.padding) == ("sinusoidal", "lengths")
        is_image = task in ("image", "pathfinder")
        assert model.inputs == ("linear" if is_image else "embedding")
    of_lra = get_preset("text", "official", "linear").model
    assert (of_lra.norm, of_lra.mlp_dropout, of_lra.qkv_bias) == ("layer", None, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("listop",),
            "--task: expected one of listops, .* got 'listop'; did you mean 'listops'",
        ),
        (
            ("listops", "compakt"),
            "--preset: expected one of .*, got 'compakt'; did you mean 'compact'",
        ),
        (
            ("listops", "zzz"),
            r"--preset: expected one of modern-quick, compact, official.*, got 'zzz'",
        ),
    ],
)
def test_unknown_presets(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_preset(*arguments)


def test_round_trip():
    config = Config(
        attention="flow",
        seed=3,
        workdir="somewhere",
        train=TrainConfig(steps=7, learning_rate=0.1),
    )
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored["train"]["steps"] == 7
    assert Config.from_dict(stored) == config


def test_paths_are_taken_as_paths(tmp_path):
    data = {"dir": tmp_path / "data"}
    given: Any = tmp_path  # The annotation is that of the flag.
    config = Config(workdir=given).replace(data=data)
    assert config == Config(workdir=str(tmp_path)).replace(
        data={"dir": str(tmp_path / "data")}
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    tasks.get_task("listops").check(config)


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v.pop("train"),
        lambda v: v.update(stepz=3),
        lambda v: v["train"].update(stepz=3),
        lambda v: v.update(model=None),
    ],
)
def test_a_config_of_another_version(damage):
    values = Config().to_dict()
    damage(values)
    with pytest.raises(
        ValueError, match=r"^config: expected the fields of this version's Config, got "
    ):
        Config.from_dict(values)


def test_a_missing_part_is_named():
    values = Config().to_dict()
    del values["train"]
    with pytest.raises(ValueError, match=r"got none named 'train'$"):
        Config.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"foo": 1}, "config: expected one of task, .*, got 'foo'"),
        ({"train": {"step": 5}}, "train: expected .*'step'; did you mean 'steps'"),
        ({"data": {"foo": 5}}, "data: expected one of .*, got 'foo'"),
        ({"train.steps": 5}, 'config: expected train={"steps": ...}, got'),
    ],
)
def test_replacing_what_is_no_field(changes, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        Config().replace(**changes)


def test_replace():
    config = Config()
    changed = config.replace(seed=1, train={"steps": 10}, model=config.model)
    assert (changed.seed, changed.train.steps) == (1, 10)
    assert changed.train == dataclasses.replace(config.train, steps=10)
    assert config == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # pyright: ignore


@pytest.mark.parametrize("task", TASKS)
def test_parts_that_are_not_given_are_those_of_the_preset(task):
    assert Config(task=task) == get_preset(task)
    last = list(tasks.get_task(task).presets)[-1]
    config = get_preset(task, last, "flow")
    assert Config(task=task, preset=last, attention="flow") == config
    train = TrainConfig(steps=7)
    mine = Config(task=task, preset=last, attention="flow", train=train)
    assert mine == config.replace(train=train)


def test_a_config_of_an_unknown_preset():
    with pytest.raises(ValueError, match=r"^--preset: .* did you mean 'compact'\?$"):
        Config(preset="compakt")


def test_identity():
    config = Config(preset="compact")
    identity = config.identity()
    assert identity["train.steps"] == 5000 and identity["attention"] == "cosformer"
    moved = config.replace(workdir="x", data={"dir": "y", "processes": 3})
    assert moved.identity() == identity
    for changed in (
        config.replace(seed=1),
        config.replace(train={"batch_size": 16}),
        config.replace(data={"path": "files"}),
    ):
        assert changed.identity() != identity


def test_names_of_runs():
    preset = Config(preset="compact")
    assert preset.run_name(preset) == "listops-cosformer-compact-seed0"
    assert preset.replace(seed=4).run_name(preset) == "listops-cosformer-compact-seed4"
    foreign = preset.replace(attention="my.module:function")
    assert foreign.run_name(preset) == "listops-my.module.function-compact-seed0"
    names = {
        preset.replace(**changes).run_name(preset)
        for changes in (
            {"train": {"steps": 10}},
            {"train": {"steps": 11}},
            {"model": {"max_length": 10}},
            {"data": {"seed": 1}},
        )
    }
    assert len(names) == 4
    moved = preset.replace(workdir="x", train={"steps": 10}, data={"dir": "y"})
    assert moved.run_name(preset) in names
    # A name that lasts: resuming by the same command depends on it.
    assert moved.run_name(preset) == "listops-cosformer-compact-seed0-71556854"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"warmup": -1}},
            "--train.warmup: expected 0 or a positive int, got -1",
        ),
        ({"train": {"dtype": "float99"}}, "--train.dtype: expected .* got 'float99'"),
        (
            {"model": {"dropout": 1.0}},
            r"--model.dropout: expected a number in \[0, 1\), got 1",
        ),
        ({"model": {"num_layers": -2}}, "--model.num_layers: .* got -2"),
        (
            {"model": {"max_length": 1999}},
            "--model.max_length: expected at least 2000, .* got 1999",
        ),
        (
            {"model": {"pooling": "cls", "is_causal": True}},
            "cls_token: expected False with is_causal",
        ),
        (
            {"data": {"path": "files", "num_train": 1_000}},
            "--data.num_train: expected no value with --data.path, .* got 1000",
        ),
        (
            {"data": {"path": "files", "seed": 1}},
            "--data.seed: expected no value with --data.path, .* got 1",
        ),
        (
            {"data": {"path": "files", "max_depth": 5}},
            "--data.max_depth: expected no value with --data.path, .* got 5",
        ),
        (
            {"model": {"attention_options": "implementation=triton"}},
            "'pallas' or 'native', got 'triton'",
        ),
        (
            {
                "attention": "flow",
                "model": {"attention_options": "implementation=pallas"},
            },
            "implementation: .* got 'pallas' on 'cpu'",
        ),
        (
            {
                "attention": "linformer",
                "model": {"attention_options": "sharing=layerwise,features=8/4"},
            },
            "features: expected one value for all blocks",
        ),
        ({"data": {"seed": -1}}, "--data.seed: .* got -1"),
        (
            {"model": {"padding": "none"}},
            "--model.padding: expected one of .*, got 'none'",
        ),
        (
            {"data": get_preset("text").data},
            "--data: expected ListOpsData for --task=listops, got TextData",
        ),
        ({"train": 3}, "^--train: expected a TrainConfig, got an int"),
        (
            {"model": {"positions": "rotary", "num_heads": 64}},
            "rotary: expected an even head width H, got 1",
        ),
    ],
)
def test_settings_that_cannot_work(changes, message):
    task, config = tasks.get_task("listops"), get_preset().replace(**changes)
    with pytest.raises(ValueError, match=message):
        task.check(config)
        task.check_on_devices(config)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "text",
            {"data": {"max_length": 4001}},
            "--model.max_length: .* 4001, .* got 4000",
        ),
        (
            "retrieval",
            {"data": {"max_length": 4001}},
            "--model.max_length: .* 4001, .* got 4000",
        ),
        (
            "parity",
            {"data": {"test_max": 300}},
            "max_length: .* 300, .* got 128",
        ),
        ("s5", {"data": {"max_length": 50}}, "--model.max_length: .* 50, .* got 40"),
        (
            "mad-recall",
            {"data": {"length": 300}},
            "max_length: .* 300, .* got 128",
        ),
        ("retrieval", {"data": {"max_length": 0}}, "--data.max_length: .* got 0"),
        ("text", {"data": {"validation": "tets"}}, "--data.validation: .* got 'tets'"),
    ],
)
def test_settings_that_do_not_suit_a_task(task, changes, message):
    with pytest.raises(ValueError, match=message):
        tasks.get_task(task).check(get_preset(task).replace(**changes))


def test_published_rows_and_their_averages():
    """The averages that the papers print, and only rows with a source."""
    from lra_jax.tasks.published import ROWS

    rows = {(row.model, row.source.split(",")[0]): row for row in ROWS}
    transformer = rows["Transformer", "LRA paper"]
    assert transformer.avg5 == pytest.approx(54.39, abs=0.006)
    assert rows["Performer", "LRA paper"].avg5 == pytest.approx(51.41, abs=0.006)
    assert rows["MEGA", "MEGA paper"].avg6 == pytest.approx(88.21, abs=0.006)
    fnet = next(row for row in ROWS if row.model == "FNet")
    assert fnet.avg6 == pytest.approx(54.42, abs=0.006)
    assert all(row.source for row in ROWS)
    assert rows["Flowformer", "figure of the thuml/Flowformer repository"].avg6 is None
    assert "Transformer" in {row.model for row in tasks.get_task("text").published}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("clip=5", {"clip": 5}),
        (" clip = None , name=some ", {"clip": None, "name": "some"}),
        ("rate=0.1,flag=True,", {"rate": 0.1, "flag": True}),
        ("k=8/4,name=a / None", {"k": (8, 4), "name": ("a", None)}),
    ],
)
def test_options(text, options):
    assert parse_options(text) == options


def test_flags_of_the_helpers(tmp_path):
    """The command lines that tests give are the configs that they mean."""
    from lra_jax.cli import parse_config

    config = helpers.tiny(tmp_path, tmp_path / "run", attention="flow", seed=5)
    assert parse_config("prog", "text", helpers.flags(config)) == config


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, None), (2, r"^config: expected model\.ema=0, .*, got 2$")],
)
def test_a_config_with_a_removed_setting(value: int, words: str | None):
    stored = Config().to_dict()
    stored["model"]["ema"] = value
    if words is None:
        assert Config.from_dict(stored) == Config()
        return
    with pytest.raises(ValueError, match=words):
        Config.from_dict(stored)
