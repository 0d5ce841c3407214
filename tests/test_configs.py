"""Configs as data: round trips, identities, names of runs; every preset holds up."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lra_jax import attention, tasks
from lra_jax.configs import TASKS, Config, TrainConfig, get_preset
from lra_jax.training.optimizer import make_schedule

MECHANISMS = attention.names()
# The model of control takes other arrays: tests/tasks/test_control_task.py.
ALL = [
    (task, preset)
    for task in TASKS
    if task != "control"
    for preset in tasks.get_task(task).presets
]
DATA: dict[str, Any] = {"vocab_size": 256, "num_classes": 10}


# Every preset with cosFormer, of large images with linear attention, and every
# mechanism with one preset.
LARGE = ("pathfinder64", "pathx", "path256")
CASES = [(*one, "linear" if one[0] in LARGE else "cosformer") for one in ALL]
CASES += [("listops", "official", mechanism) for mechanism in MECHANISMS]
CASES = list(dict.fromkeys(CASES))
# Those whose settings the presets of a paper change.
CHANGED = [
    (task, preset, mechanism)
    for task in ("text", "retrieval", "image", "pathfinder")
    for preset, mechanisms in (
        ("official", ("softmax", "linformer", "performer", "local", "flow")),
        ("compact", ("linformer",)),
        ("modern", ("softmax", "gau", "hgrn")),
    )
    for mechanism in mechanisms
]


class OneKey:
    """A key for all arrays, in place of Flax's counters, which are slow to trace."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def check_preset(task: str, preset: str, mechanism: str) -> Config:
    config = get_preset(task, preset, mechanism)
    assert (config.task, config.preset) == (task, preset)
    assert (config.attention, config.workdir, config.seed) == (mechanism, None, 0)
    known_task = tasks.get_task(task)
    known_task.check(config)
    assert float(jnp.asarray(make_schedule(config.train)(config.train.steps))) >= 0
    assert config.train.steps % config.train.eval_every == 0
    assert config.model.max_length >= (config.data.longest or 0)
    return config


@pytest.mark.parametrize(("task", "preset", "mechanism"), CHANGED)
def test_presets_of_papers(task, preset, mechanism):
    check_preset(task, preset, mechanism)


@pytest.mark.parametrize(("task", "preset", "mechanism"), CASES)
def test_presets(task, preset, mechanism):
    config, known_task = check_preset(task, preset, mechanism), tasks.get_task(task)
    length = config.max_length
    side = known_task.image_shape or config.data.image_shape
    data = DATA | {"image_shape": side, "max_length": length}
    data["token_shape"] = ()
    if not (config.model.hybrid or config.model.stages):  # One block tells of all.
        config = config.replace(model={"num_layers": 1})
    tokens = jax.ShapeDtypeStruct((2, length), "uint8")
    if config.model.inputs == "vectors":
        tokens = jax.ShapeDtypeStruct((2, length, data["vocab_size"]), "float32")
    lengths = jax.ShapeDtypeStruct((2,), "int32")
    inputs = (tokens, lengths) * (2 if task == "retrieval" else 1)
    shape: tuple[int, ...] = (2, 10)
    if known_task.per_position:
        inputs += (jax.ShapeDtypeStruct((2, 3), "int32"),)
        shape = (2, 3, 256 if known_task.suite == "language" else 10)

    def call(*inputs):
        model = known_task.make_model(config, SimpleNamespace(**data), OneKey())
        return model(*inputs)

    logits = jax.eval_shape(call, *inputs)
    assert logits.shape == shape and logits.dtype == "float32"


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
        (("listop",), "--task: .* got 'listop'; did you mean 'listops'"),
        (("listops", "compakt"), "--preset: .* got 'compakt'; did you mean 'compact'"),
        (("listops", "zzz"), "--preset: .* modern-quick, compact, .*, got 'zzz'"),
    ],
)
def test_unknown_presets(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_preset(*arguments)
    with pytest.raises(ValueError, match=message):
        Config(**dict(zip(("task", "preset"), arguments, strict=False)))


def test_round_trip():
    train = TrainConfig(steps=7, learning_rate=0.1)
    config = Config(attention="flow", seed=3, workdir="somewhere", train=train)
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored["train"]["steps"] == 7
    assert Config.from_dict(stored) == config


def test_paths_are_taken_as_paths(tmp_path):
    data = {"dir": tmp_path / "data"}
    path: Any = tmp_path  # The annotation is that of the flag.
    config = Config(workdir=path).replace(data=data)
    assert config == Config(workdir=str(tmp_path)).replace(
        data={"dir": str(tmp_path / "data")}
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    tasks.get_task("listops").check(config)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda v: v.pop("train"), "none named 'train'"),
        (lambda v: v.update(stepz=3), ""),
        (lambda v: v["train"].update(stepz=3), ""),
        (lambda v: v.update(model=None), ""),
        (lambda v: v["model"].update(ema=2), "2"),
    ],
)
def test_a_config_of_another_version(damage, words):
    values = Config().to_dict()
    damage(values)
    with pytest.raises(ValueError, match=f"^config: expected .*, got .*{words}"):
        Config.from_dict(values)


def test_a_removed_setting_at_its_default_is_read():
    values = Config().to_dict()
    values["model"]["ema"] = 0
    values["debug_nans"] = False
    assert Config.from_dict(values) == Config()


def test_replacing_what_is_no_field():
    for changes in ({"foo": 1}, {"train": {"step": 5}}, {"train.steps": 5}):
        with pytest.raises(TypeError, match="unexpected keyword"):
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
    ("steps", "buckets", "used"),
    [
        (399, "auto", "one"),
        (400, "auto", "auto"),
        (30, "32,60", "32,60"),
        (30, "none", "none"),
    ],
)
def test_few_steps_have_one_length(steps: int, buckets: str, used: str) -> None:
    config = get_preset("listops", "compact")
    changes = {"train": {"steps": steps}, "data": {"buckets": buckets}}
    assert config.replace(**changes).buckets == used


@pytest.mark.parametrize(("task", "preset"), ALL)
def test_presets_are_long_enough_for_their_buckets(task: str, preset: str) -> None:
    config = get_preset(task, preset)
    assert config.buckets == config.data.buckets
