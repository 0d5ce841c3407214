"""Schedules against values computed by hand; clipping; AdamW."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

from lra_jax.configs import PretrainConfig, TrainConfig
from lra_jax.errors import check_types
from lra_jax.models import SequenceClassifier
from lra_jax.training.optimizer import (
    label_parameters,
    make_optimizer,
    make_schedule,
)


def rate(step: int, **settings) -> float:
    config = TrainConfig(
        **{"learning_rate": 0.5, "steps": 100, "warmup": 20} | settings
    )
    return float(make_schedule(config)(step))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Of warm-up 20, steps 100 and peak 0.5.
        ("cosine", {0: 0, 10: 0.25, 20: 0.5, 60: 0.25, 80: 0.0732233, 100: 0}),
        ("linear", {0: 0, 10: 0.25, 20: 0.5, 60: 0.25, 99: 0.00625, 100: 0}),
        ("constant", {0: 0, 10: 0.25, 20: 0.5, 99: 0.5}),
        ("trapezoid", {0: 0, 10: 0.25, 20: 0.5, 80: 0.5, 90: 0.25, 99: 0.025, 100: 0}),
        # 0.5 * min(1, s / 20) / sqrt(max(s, 20))
        ("lra", {0: 0, 10: 0.0559017, 20: 0.1118034, 80: 0.0559017}),
        # 0.5 * min(1, s / 20) * (1 + cos(pi max(0, s - 20) / 100)) / 2
        ("lra_cosine", {0: 0, 10: 0.25, 20: 0.5, 70: 0.25, 99: 0.0524612}),
    ],
)
def test_schedules(schedule, expected):
    got = {step: rate(step, schedule=schedule) for step in expected}
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "schedule", ["cosine", "linear", "constant", "lra_cosine", "trapezoid"]
)
def test_without_warm_up(schedule):
    assert rate(0, schedule=schedule, warmup=0) == pytest.approx(0.5)


def test_lra_without_warm_up():
    rates = [rate(step, schedule="lra", warmup=0) for step in (0, 1, 4)]
    assert rates == pytest.approx([0.5, 0.5, 0.25])


def test_scales_of_norms_are_vectors():
    """Those of heads too, which have two axes."""
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8}
    model = SequenceClassifier(5, 2, gate=True, **sizes, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    config = TrainConfig(weight_decay=0.1, decay_vectors=False, warmup=0)
    rule = make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        changes: Any = rule.update(zeros, rule.init(params), params)[0]
    layer = changes["encoder"]["blocks"][0]["attention"]
    assert layer["out_norm"]["gain"].shape == (2, 4)
    assert not layer["out_norm"]["gain"][...].any()
    assert layer["query"]["kernel"][...].any()


@pytest.mark.parametrize(
    ("train", "pretraining", "words"),
    [
        ({"schedule": "cosine", "warmup": 100}, 0, "train.steps=100, got 100"),
        ({"schedule": "linear", "warmup": 101}, 0, "train.steps=100, got 101"),
        ({"schedule": "trapezoid", "warmup": 80}, 0, "80, four fifths .*=100, got 80"),
        ({"warmup": 40}, 20, "--pretrain.steps=20, got 40"),
        ({"warmup": 40}, 70, "--train.steps less --pretrain.steps=30, got 40"),
    ],
)
def test_warm_up_as_long_as_the_run_or_a_part_of_it(train, pretraining, words):
    config = TrainConfig(steps=100, **train)
    with pytest.raises(ValueError, match=f"train.warmup: expected less than .*{words}"):
        make_schedule(config, PretrainConfig(steps=pretraining))


def test_warm_up_beyond_the_run_is_meant_where_nothing_ends():
    assert rate(50, schedule="lra", warmup=100) == pytest.approx(0.5 * 0.5 / 10)


def update(gradient, **settings):
    config = {"schedule": "constant", "warmup": 0, "learning_rate": 0.1} | settings
    optimizer = make_optimizer(TrainConfig(**config))
    params = {"w": jnp.array([2.0, -1.0])}
    state = optimizer.init(params)
    updates: Any
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update({"w": jnp.array(gradient)}, state, params)
    return np.asarray(updates["w"])


def test_clipping_by_the_global_norm():
    # Of AdamW's first step g / (|g| + eps) only eps tells the size of the gradient.
    large = {"adam_eps": 1.0}
    np.testing.assert_allclose(
        update([30.0, 40.0], clip_norm=1.0, **large),
        update([0.6, 0.8], clip_norm=0.0, **large),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        update([0.3, 0.4], clip_norm=1.0, **large),
        update([0.3, 0.4], clip_norm=0.0, **large),
    )
    unclipped = update([30.0, 40.0], clip_norm=0.0, **large)
    np.testing.assert_allclose(unclipped, [-3.0 / 31, -4.0 / 41], rtol=1e-5)


def test_weight_decay_is_decoupled():
    gradient = [3.0, 4.0]
    decayed = update(gradient, weight_decay=0.5)
    plain = update(gradient)
    np.testing.assert_allclose(decayed - plain, [-0.1 * 0.5 * 2, 0.1 * 0.5], rtol=1e-5)


def test_weight_decay_of_matrices_alone():
    params = {"w": jnp.full((2, 1), 2.0), "b": jnp.full((2,), 2.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    config = TrainConfig(schedule="constant", warmup=0, learning_rate=0.1)
    config = dataclasses.replace(config, weight_decay=0.5)
    for everything, bias in ((True, -0.1), (False, 0.0)):
        chosen = dataclasses.replace(config, decay_vectors=everything)
        optimizer = make_optimizer(chosen)
        updates: Any
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)
        np.testing.assert_allclose(updates["b"], bias, rtol=1e-5)


def test_three_steps_of_adamw_by_hand():
    """In float64; both moments, their corrections, eps and the decay count."""
    config = TrainConfig(
        **{"schedule": "constant", "learning_rate": 0.1, "warmup": 0, "clip_norm": 0.0},
        **{"adam_b1": 0.7, "adam_b2": 0.95, "adam_eps": 1e-3, "weight_decay": 0.2},
    )
    rule = make_optimizer(config)
    start = np.array([[1.0, -2.0], [0.5, 3.0]])
    weights, first, second = start, np.zeros_like(start), np.zeros_like(start)
    params: Any = {"kernel": jnp.asarray(start, jnp.float32)}
    state = rule.init(params)
    for count, scale in enumerate((1.0, -0.5, 2.0), 1):
        slope = scale * np.array([[0.3, -0.1], [0.7, 0.2]])
        first = 0.7 * first + 0.3 * slope
        second = 0.95 * second + 0.05 * slope**2
        ratio = first / (1 - 0.7**count)
        ratio /= np.sqrt(second / (1 - 0.95**count)) + 1e-3
        weights = weights - 0.1 * (ratio + 0.2 * weights)
        slopes = {"kernel": jnp.asarray(slope, jnp.float32)}
        with jax.numpy_dtype_promotion("standard"):
            updates, state = rule.update(slopes, state, params)
            params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["kernel"], weights, rtol=1e-5)


def small_model() -> tuple[nnx.GraphDef, nnx.State]:
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 12}
    model = SequenceClassifier(
        5, 3, gate=True, short_conv=3, max_length=6, **sizes, rngs=nnx.Rngs(0)
    )
    return nnx.split(model, nnx.Param)


def updates_of(rule: optax.GradientTransformation, steps: int = 2) -> Any:
    """The updates of a few steps, for gradients that are drawn."""
    params: Any = small_model()[1]
    state, updates = rule.init(params), params
    for step in range(steps):
        rng = np.random.default_rng(step)
        grads = jax.tree.map(
            lambda x, rng=rng: jnp.asarray(rng.normal(size=x.shape), x.dtype), params
        )
        with jax.numpy_dtype_promotion("standard"):
            updates, state = rule.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return updates


def muon_numbers(params: Any) -> Any:
    """Muon's for kernels between embeddings and logits; convolutions are none."""
    outer = ("convs", "logits")
    flat = [
        (path, path[-1] == "kernel" and not {*outer} & {*path})
        for path, _ in nnx.to_flat_state(params)
    ]
    numbers = {
        path: params_at(params, path).replace(
            contrib.MuonDimensionNumbers() if is_matrix else None
        )
        for path, is_matrix in flat
    }
    return nnx.from_flat_state(numbers)


def params_at(params: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        params = params[key]
    return params


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("adafactor", "", lambda rate: optax.adafactor(rate)),
        ("lion", "b2=0.9", lambda rate: optax.lion(rate, b2=0.9, weight_decay=0)),
        ("sgd", "momentum=0.9", lambda rate: optax.sgd(rate, momentum=0.9)),
        ("optax:adamax", "", lambda rate: optax.adamax(rate)),
        (
            "muon",
            "beta=0.9",
            lambda rate: contrib.muon(
                rate,
                beta=0.9,
                muon_weight_dimension_numbers=muon_numbers,
            ),
        ),
    ],
)
def test_optimizers_are_those_of_optax(name, options, make):
    config = TrainConfig(
        **{"optimizer": name, "optimizer_options": options, "learning_rate": 0.1},
        **{"schedule": "linear", "warmup": 0, "steps": 10, "clip_norm": 0.0},
    )
    rates = optax.linear_schedule(0.1, 0.0, 10)
    ours, theirs = updates_of(make_optimizer(config)), updates_of(make(rates))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    make_optimizer(config, PretrainConfig(steps=5))  # Their schedules can go on.

    decayed = dataclasses.replace(config, weight_decay=0.5, decay_vectors=False)
    rule = make_optimizer(decayed)
    # Of the first step, which leaves the parameters as drawn.
    params = small_model()[1]
    less = updates_of(rule, 1)
    plain = updates_of(make(rates), 1)
    labels = label_parameters(params)

    def check(label, parameter, one, other) -> None:
        shrunk = 0.0 if label == "vector" else -0.1 * 0.5 * parameter
        np.testing.assert_allclose(one - other, shrunk, atol=1e-6)

    jax.tree.map(check, labels, params, less, plain)


def test_labels_of_parameters():
    labels = label_parameters(small_model()[1])
    flat = {".".join(map(str, p)): x.get_value() for p, x in nnx.to_flat_state(labels)}
    block = "encoder.blocks.0"
    expected = {
        f"{block}.attention.query.kernel": "matrix",
        f"{block}.attention.query.bias": "vector",
        f"{block}.attention.convs.query.kernel": "table",
        f"{block}.attention.out_norm.gain": "vector",
        f"{block}.mlp.outer.kernel": "matrix",
        "encoder.embed.embedding": "table",
        "encoder.positions": "table",
        "hidden.kernel": "matrix",
        "logits.kernel": "table",
        "logits.bias": "vector",
    }
    assert {name: flat[name] for name in expected} == expected


def signs(schedule, labels, scale=1.0):
    """An optimizer of one's own: signs for matrices, gradients for the rest."""
    rules = {"matrix": optax.scale_by_sign(), "other": optax.identity()}

    def kinds(params: Any) -> Any:
        return jax.tree.map(
            lambda x: "matrix" if x == "matrix" else "other", labels(params)
        )

    return optax.chain(
        optax.scale(scale),
        optax.partition(rules, kinds),
        optax.scale_by_learning_rate(schedule),
    )


NOTHING = 3


def no_optimizer(schedule):
    return schedule


def test_an_optimizer_of_ones_own():
    """Given the schedule and the labels; clipped before, decayed after it."""
    config = TrainConfig(
        **{"optimizer": f"{__name__}:signs", "optimizer_options": "scale=0.5"},
        **{"schedule": "constant", "warmup": 0, "learning_rate": 0.1},
        **{"clip_norm": 1.0, "weight_decay": 0.5},
    )
    assert dataclasses.replace(config, optimizer=signs) == config  # From Python.
    params: Any = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(2, 2.0)}
    grads = {"kernel": jnp.full((2, 2), -3.0), "bias": jnp.full(2, 8.0)}
    rule = make_optimizer(config)
    updates: Any = rule.update(grads, rule.init(params), params)[0]
    np.testing.assert_allclose(updates["kernel"], 0.1 - 0.1 * 0.5 * 2, rtol=1e-5)
    norm = np.sqrt(4 * 9 + 2 * 64)
    decayed = -0.1 * 0.5 * 8 / norm - 0.1 * 0.5 * 2
    np.testing.assert_allclose(updates["bias"], decayed, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lionn", "", "one of adamw, .*, got 'lionn'; did you mean 'lion'"),
        ("no_module:f", "", "importable module before ':' in 'no_module:f'"),
        (f"{__name__}:sings", "", "no attribute 'sings'; did you mean 'signs'"),
        (f"{__name__}:NOTHING", "", "to be a class or a function, got an int"),
        (
            f"{__name__}:no_optimizer",
            "",
            "make a GradientTransformation, got a function",
        ),
        (f"{__name__}:signs", "b=2", "to take \\(schedule, .*, b\\), got"),
        (f"{__name__}:small_model", "", "to take \\(schedule\\), got too many"),
        ("lion", "momentum=2", "'lion' to take \\(schedule, .*, momentum\\), got"),
        ("muon", "momentum=2", "'muon' to take \\(schedule, .*, momentum\\), got"),
        ("adamw", "momentum=2", "'adamw' to take \\(b1, b2, eps, momentum\\), got an"),
    ],
)
def test_a_wrong_optimizer_is_refused(name, options, words):
    config = TrainConfig(optimizer=name, optimizer_options=options)
    with pytest.raises(ValueError, match=f"^--train.optimizer: expected .*{words}"):
        check_types(config, "--train.")
        make_optimizer(config)


def hidden_count(schedule):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)


def test_a_schedule_that_would_begin_again_after_pretraining_is_refused():
    config = TrainConfig(optimizer=f"{__name__}:hidden_count", warmup=0)
    make_optimizer(config)
    with pytest.raises(
        ValueError, match=r"^--pretrain\.steps: expected 0 with .*count"
    ):
        make_optimizer(config, PretrainConfig(steps=5))
