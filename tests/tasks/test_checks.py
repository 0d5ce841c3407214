"""Settings, and attention, that a run could not train: refused before its data."""

import re

import helpers
import pytest

from lra_jax import errors
from lra_jax.configs import get_preset
from lra_jax.tasks import get_task


def mixes_mask_and_values(query, key, value, mask):
    return value + mask @ value


@pytest.mark.parametrize(
    ("attention", "options", "words"),
    [
        # The random state of a dropout layer, which the trainer would not keep.
        ("helpers:Dropped", "", r"dropout.rngs.\w+: expected an nnx.Param .*, got Rng"),
        # An option without a decimal point makes a parameter without a gradient.
        ("helpers:Scaled", "scale=2", "module.scale: expected .*, got Param of int32"),
        (mixes_mask_and_values, "", r"called with query .2, 60, 2, 8.*mask .2, 1"),
    ],
)
def test_what_a_run_cannot_train_fails_before_the_data(
    attention, options, words, tmp_path
):
    model = {"attention_options": options}
    config = helpers.tiny(tmp_path, attention=attention, model=model)
    with pytest.raises((ValueError, TypeError)) as raised:
        get_task("listops").check_on_devices(config)
    assert re.search(words, errors.on_one_line(raised.value))


SPLIT = {"train": {"seq_devices": 2}, "data": {"packing": True}}
CLASS = {"model": {"pooling": "cls"}}
TRITON = {"attention_options": "implementation=triton"}


LAYERWISE = {"attention_options": "sharing=layerwise,features=8/4"}


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "listops",
            {"task": "text"},
            "--data: expected TextData for --task=text, got Li",
        ),
        ("listops", {"train": {"dtype": "float99"}}, "--train.dtype: .* 'float99'"),
        ("listops", {"model": {"pooling": "cls", "is_causal": True}}, "pooling: "),
        ("listops", {"model": TRITON}, "implementation: .* got 'triton'"),
        ("listops", {"attention": "linformer", "model": LAYERWISE}, "features: .* all"),
        ("listops", SPLIT, "--train.seq_devices: expected 1 with --data.packing"),
        ("retrieval", {"data": {"packing": True}}, "--data.packing: expected False"),
        ("listops", CLASS | {"data": {"packing": True}}, "--model.pooling: .*packing"),
        (
            "listops",
            CLASS | {"train": {"seq_devices": 2}},
            "--model.pooling: .*seq_dev",
        ),
        ("text", {"data": {"max_length": 4001}}, "--model.max_length: .* 4001"),
        ("parity", {"data": {"test_max": 300}}, "max_length: .* 300, .* got 128"),
        ("s5", {"data": {"max_length": 50}}, "--model.max_length: .* 50, .* got 40"),
    ],
)
def test_settings_that_cannot_work(task, changes, message):
    config = get_preset(task).replace(**changes)
    with pytest.raises(ValueError, match=message):
        get_task(config.task).check(config)
        get_task(config.task).check_on_devices(config)
