"""Data, networks, training and roll-outs of the path experiments."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.analysis import circle, path_experiments, path_tasks
from lra_jax.analysis.circle import run_circle
from lra_jax.analysis.path_experiments import (
    PUBLISHED,
    QUICK,
    run_experiment,
    run_seeds,
)
from lra_jax.analysis.path_network import PathNetwork, PathSettings, draw_paths

TINY = PathSettings(16, 2, 2, 10, vocab_size=10, longest=8, dropout=0.0)


def test_sorting_and_memorisation_data():
    task = path_tasks.sorting(50, 0)
    assert task.inputs.shape == (50, 8) and set(np.unique(task.inputs)) == set(
        range(10)
    )
    for row, labels in zip(task.inputs, task.labels, strict=True):
        assert sorted(row) == list(labels)
    task = path_tasks.memorisation(40, 0, longest=16, vocab_size=100)
    lengths = (task.labels >= 0).sum(1)
    assert lengths.min() >= 4 and lengths.max() <= 16 and len(set(lengths)) > 3
    assert not task.inputs[task.labels < 0].any()
    assert 0.4 < (task.labels == 1).sum() / lengths.sum() < 0.6
    np.testing.assert_array_equal(
        path_tasks.sorting(3, 1).inputs, path_tasks.sorting(3, 1).inputs
    )


def test_a_vertex_sees_the_others_within_half_a_turn():
    task = path_tasks.convex_hull(100, 0)
    for points, labels in zip(task.inputs, task.labels, strict=True):
        for index, point in enumerate(points):
            ways = np.delete(points, index, 0) - point
            angles = np.sort(np.arctan2(ways[:, 1], ways[:, 0]))
            widest = np.diff(angles, append=angles[0] + 2 * np.pi).max()
            assert labels[index] == (widest > np.pi)
    assert 0.5 < task.majority < 0.65  # the paper prints 0.54


def test_circle_data():
    points = path_tasks.circle(8)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 0.3, rtol=1e-6)
    np.testing.assert_allclose(points[0], -points[4], atol=1e-7)
    np.testing.assert_allclose(points[2], [0, 0.3], atol=1e-7)


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True))


def test_a_path_is_one_head_of_each_of_its_layers():
    model = PathNetwork(TINY, rngs=nnx.Rngs(0))
    inputs = jnp.asarray(path_tasks.sorting(2, 0).inputs)
    start = np.asarray(model.embed_inputs(inputs))
    paths = np.array([[1, -1], [-1, 0], [0, 1], [-1, -1]], np.int32)
    total = np.zeros_like(start)
    for path in paths:
        x = start
        for block, head in zip(model.blocks, path, strict=True):
            if head < 0:
                continue
            attention: Any = block.attention
            part = slice(8 * head, 8 * head + 8)
            query, key, value = (
                (x @ np.asarray(getattr(attention, name).kernel[...]))[..., part]
                for name in ("query", "key", "value")
            )
            weights = np.exp(query @ key.swapaxes(1, 2) / np.sqrt(8))
            weights /= weights.sum(-1, keepdims=True)
            x = normed(weights @ value @ np.asarray(attention.out.kernel[...])[part])
        total += x
    expected = normed(total) @ np.asarray(model.head.kernel[...])
    before = np.asarray(model(inputs))
    actual = model.along(inputs, jnp.asarray(paths))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    np.testing.assert_array_equal(before, model(inputs))  # the kernels are as before


def test_paths_of_a_length():
    rng = np.random.default_rng(0)
    for length in range(5):
        paths = draw_paths(length, 200, 4, 3, rng)
        assert ((paths >= 0).sum(1) == length).all() and paths.max(initial=-1) < 3
        if length == 2:
            assert len(np.unique(paths, axis=0)) > 40  # of 6 * 9


@pytest.mark.parametrize("name", ["sorting", "memorisation"])
def test_an_experiment_learns_its_task(name):
    settings = dataclasses.replace(
        TINY, num_outputs=10 if name == "sorting" else 2, vocab_size=10
    )
    experiment = dataclasses.replace(
        QUICK[name],
        settings=dataclasses.replace(settings, width=32),
        num_train=300 if name == "sorting" else 4,
        num_eval=50 if name == "sorting" else 0,
        epochs=40 if name == "sorting" else 150,
        batch_size=30 if name == "sorting" else 4,
        learning_rate=3e-3,
        longest=8,
    )
    result = run_experiment(name, experiment, repeats=2)
    assert result.losses[-1] < result.losses[0]
    assert result.whole > result.majority + 0.1
    assert result.by_length[5].shape == result.by_length[20].shape == (3, 2)
    # Without attention nothing is known of the other tokens.
    assert result.by_length[5][0].std() == 0


def test_seeds_of_an_experiment_are_put_together_and_kept(tmp_path, monkeypatch):
    experiment = dataclasses.replace(
        QUICK["sorting"], settings=TINY, num_train=30, num_eval=10, epochs=1
    )
    runs = []

    def run(*args, seed, **settings):
        assert seed == 3 + len(runs)
        runs.append(run_experiment(*args, seed=seed, **settings))
        return runs[-1]

    monkeypatch.setattr(path_experiments, "run_experiment", run)
    both = run_seeds("sorting", experiment, (3, 4), folder=tmp_path, repeats=2)
    assert both.whole == pytest.approx((runs[0].whole + runs[1].whole) / 2)
    draws = np.hstack([run.by_length[20] for run in runs])
    np.testing.assert_array_equal(both.by_length[20], draws)
    monkeypatch.setattr(path_experiments, "run_experiment", None)
    again = run_seeds("sorting", experiment, (3, 4), folder=tmp_path, repeats=2)
    np.testing.assert_array_equal(again.by_length[20], draws)
    np.testing.assert_array_equal(again.losses, both.losses)
    with pytest.raises(TypeError):  # Others have to be trained.
        run_seeds("sorting", experiment, (3,), folder=tmp_path, repeats=3)


def test_the_circle_shows_every_seed(monkeypatch):
    monkeypatch.setattr(circle, "_EPOCHS", 2)
    monkeypatch.setattr(circle, "_LEARNING_RATES", {"circle": 1e-5})
    monkeypatch.setattr(
        circle, "_VARIANTS", {"attention": {"skip": False, "mlp": False}}
    )
    chart: Any
    table: Any
    chart, table = circle.circles_section("softmax", (0, 1)).parts
    far = chart.data["attention"]["distance"]
    assert far.shape == (2, 300)
    merged = (far[:, -1] < 1e-3).sum()
    assert f" {merged} of 2 |" in table.markdown()
    low, middle, high = np.quantile(far[:, 100], (0, 0.5, 1))
    assert f"{middle:.3g} ({low:.3g} to {high:.3g})" in table.markdown()


def test_published_settings():
    sorting, hull = PUBLISHED["sorting"], PUBLISHED["convex-hull"]
    assert (sorting.learning_rate, sorting.epochs, sorting.num_train) == (
        1e-5,
        65,
        1000,
    )
    assert (hull.settings.width, hull.settings.num_heads) == (84, 3)
    assert set(QUICK) == set(PUBLISHED)


def test_with_this_seed_attention_runs_together_on_the_circle():
    run = run_circle(skip=False, mlp=False)
    assert run.trajectory.shape == (300, 2, 2) and len(run.losses) == 70
    np.testing.assert_allclose(run.trajectory[0, 0], [0.3, 0], atol=1e-7)
    assert run.spread[0] > 0.59 and run.spread[-1] < 1e-3
    last = run.trajectory[-2:]
    assert np.abs(last[0] - last[1]).max() < 1e-3  # a point, not a curve
    skipping = run_circle(skip=True, mlp=False)
    assert skipping.spread[-1] > 0.1
