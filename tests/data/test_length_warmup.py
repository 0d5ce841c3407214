"""Sequence-length warm-up: how much of each sequence the first batches hold."""

import numpy as np
import pytest

from lra_jax.data import pipeline
from lra_jax.data.length_warmup import LengthWarmup


def test_stages_end_at_fractions_of_the_run():
    warmup = LengthWarmup.parse("128:0.3,512:0.45,700:1", 20)
    limits = [warmup.limit(step) for step in range(21)]
    assert limits == [128] * 6 + [512] * 3 + [700] * 11 + [None]


def test_no_warmup():
    assert LengthWarmup.parse("", 100) == LengthWarmup()
    assert LengthWarmup().limit(0) is None


def test_widths_are_those_of_the_batches():
    assert LengthWarmup().widths((64, 300)) == {64, 300}
    warmup = LengthWarmup.parse("5:0.2,100:0.5", 20)
    assert warmup.widths((64, 128, 300)) == {5, 64, 100, 128, 300}


@pytest.mark.parametrize(
    "text",
    [
        *("128", "128:", ":0.5", "a:0.5", "128:b", "128:0.2:0.3", ",", "128:0.5,"),
        *("0:0.5", "-1:0.5", "128:0", "128:-0.1", "128:1.1", "128:nan", "1.5:0.5"),
        *("128:0.5,128:0.6", "128:0.5,256:0.5", "256:0.1,128:0.2"),
    ],
)
def test_bad_text(text):
    with pytest.raises(ValueError, match="length_warmup: expected LENGTH:F") as e:
        LengthWarmup.parse(text, 100)
    assert repr(text) in str(e.value)


def test_batches_hold_beginnings(dataset):
    settings = {"batch_size": 16, "seed": 0, "num_steps": 40, "buckets": "64,128,300"}
    whole = list(pipeline.train_iterator(dataset, **settings))
    warmup = "5:0.25,100:0.5"
    cut = list(pipeline.train_iterator(dataset, **settings, length_warmup=warmup))
    for step, (full, batch) in enumerate(zip(whole, cut, strict=True)):
        limit = 5 if step < 10 else 100 if step < 20 else 300
        width = min(limit, full["tokens"].shape[1])
        np.testing.assert_array_equal(batch["tokens"], full["tokens"][:, :width])
        lengths = np.minimum(full["lengths"], limit)
        np.testing.assert_array_equal(batch["lengths"], lengths)
        np.testing.assert_array_equal(batch["labels"], full["labels"])
    assert {batch["tokens"].shape[1] for batch in cut[10:20]} <= {64, 100}


def test_resumes_in_the_stage_of_its_step(dataset):
    settings = {"batch_size": 16, "seed": 0, "num_steps": 30, "buckets": "64,128,300"}

    def start():
        return pipeline.train_iterator(dataset, **settings, length_warmup="9:0.5")

    whole, first, second = list(start()), start(), start()
    for _ in range(13):
        next(first)
    second.set_state(first.get_state())
    for expected, got in zip(whole[13:], second, strict=True):
        np.testing.assert_array_equal(expected["tokens"], got["tokens"])
