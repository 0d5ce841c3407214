"""Which examples, and how much of each, the first batches hold."""

import numpy as np
import pytest

from lra_jax.data import pipeline
from lra_jax.data.batches import BatchPlan
from lra_jax.data.stages import (
    Curriculum,
    LengthWarmup,
    StagedPlan,
    choose_groups,
    tokens_before,
)

LENGTHS = np.array([3, 9, 4, 8, 2, 9, 5, 7])
SETTINGS = {"buckets": (4, 9), "batch_size": 2, "seed": 0}


def plan_of(curriculum, num_steps, lengths=LENGTHS):
    stages = curriculum.choose(lengths, SETTINGS["batch_size"], num_steps)
    return StagedPlan(stages, lengths, **SETTINGS)


def test_stages_hold_short_examples_whole_then_all():
    plan = plan_of(Curriculum.parse("5:0.5", 12), 12)
    assert len(plan) == 12
    early = np.concatenate([plan[step].ids for step in range(6)])
    late = np.concatenate([plan[step].ids for step in range(6, 12)])
    assert (LENGTHS[early] <= 5).all()
    assert set(early.tolist()) == {0, 2, 4, 6}
    assert set(late.tolist()) == set(range(8))
    for step in range(12):
        assert LENGTHS[plan[step].ids].max() <= plan[step].length
    with pytest.raises(IndexError):
        plan[12]


def test_without_stages_the_order_is_that_of_a_plan():
    plan = plan_of(Curriculum(), 6)
    plain = BatchPlan(LENGTHS, **SETTINGS, num_steps=6)
    for step in range(6):
        np.testing.assert_array_equal(plan[step].ids, plain[step].ids)


def test_a_stage_to_the_end_of_the_run():
    plan = plan_of(Curriculum.parse("5:1", 4), 4)
    assert all((LENGTHS[plan[step].ids] <= 5).all() for step in range(4))


def test_groups_come_one_after_another():
    stages = choose_groups((0.2, 0.5), 6, 10)
    plan = StagedPlan(stages, LENGTHS[:6], buckets=(9,), batch_size=2, seed=0)
    assert len(plan) == 10
    examples_by_step = [set(plan[step].ids.tolist()) for step in range(10)]
    assert examples_by_step == [{0, 1}] * 2 + [{2, 3}] * 3 + [{4, 5}] * 5


def test_a_stage_needs_a_batch_of_examples():
    with pytest.raises(ValueError, match="curriculum: expected lengths that cover"):
        plan_of(Curriculum.parse("2:0.5", 4), 4)


def test_fewer_examples_than_a_batch_come_again_and_again():
    plan = plan_of(Curriculum(), 3, LENGTHS[:1])
    assert [plan[step].ids.tolist() for step in range(3)] == [[0, 0]] * 3


def test_tokens_of_each_step_of_both_kinds_of_stages():
    cut, whole = LengthWarmup.parse("3:0.25", 8), Curriculum.parse("5:0.5", 8)
    before = [tokens_before(LENGTHS, step, cut=cut, whole=whole) for step in range(9)]
    short = LENGTHS[LENGTHS <= 5]
    expected = [np.minimum(short, 3).mean()] * 2 + [short.mean()] * 2
    expected += [LENGTHS.mean()] * 4
    np.testing.assert_allclose(np.diff(before), expected)


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
        *("128", ":0.5", "128:b", "128:0.2:0.3", "128:0.5,", "0:0.5", "128:0"),
        *("128:1.1", "128:nan", "1.5:0.5", "128:0.5,128:0.6", "128:0.5,256:0.5"),
    ],
)
@pytest.mark.parametrize("kind", [LengthWarmup, Curriculum])
def test_bad_text(kind, text):
    with pytest.raises(ValueError, match=f"{kind.name}: expected LENGTH:F") as error:
        kind.parse(text, 100)
    assert repr(text) in str(error.value)


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


@pytest.mark.parametrize(
    "stages", [{"curriculum": "60:0.5"}, {"length_warmup": "9:0.5"}]
)
def test_a_resumed_iterator_goes_on_in_the_same_stage(dataset, stages):
    settings = {"batch_size": 4, "seed": 3, "num_steps": 20, **stages}
    whole, first, second = (
        pipeline.train_iterator(dataset, **settings) for _ in range(3)
    )
    batches = [next(whole) for _ in range(20)]
    limit = 60 if "curriculum" in stages else 9
    assert max(batch["lengths"].max() for batch in batches[:10]) <= limit
    for _ in range(7):
        next(first)
    second.set_state(first.get_state())
    for batch in batches[7:]:
        np.testing.assert_array_equal(next(second)["tokens"], batch["tokens"])
