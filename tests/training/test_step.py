"""The step: dropout with a key for each, and moments that begin anew."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_equal_trees, quick_jit

from lra_jax.models import SequenceClassifier
from lra_jax.training.optimizer import renew
from lra_jax.training.step import (
    TrainState,
    init_state,
    scored_params,
    step_function,
)


def make_step(
    optimizer: optax.GradientTransformation, dropout: float = 0.0, **options: Any
) -> tuple[Callable[[TrainState], TrainState], TrainState]:
    """A step on one batch, and the state before the first."""
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 16}
    more = {name: options.pop(name) for name in ("norm",) if name in options}
    more |= {"pooling": "ends"} if more else {}
    model = SequenceClassifier(9, 3, dropout=dropout, **sizes, **more, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 9, (4, 12)))
    labels = jnp.array([0, 1, 2, 0])

    def loss(model, batch, rngs):
        logits = model(batch["tokens"], rngs=rngs)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        count = jnp.asarray(len(each), jnp.float32)
        return {"loss": each.sum(), "correct": count, "count": count}

    step = step_function(loss, graphdef, optimizer, **{"seed": 0} | options)
    batch = {"tokens": tokens, "labels": labels}
    state = init_state(params, optimizer, options.get("ema", 0.0))
    compiled = quick_jit(step)
    return lambda state: compiled(state, batch), state


def losses(dropout: float, seed: int = 0, steps: int = 3) -> list[float]:
    """The losses of steps that do not change the parameters."""
    step, state = make_step(optax.sgd(0.0), dropout, seed=seed)
    sums = [0.0]
    for _ in range(steps):
        state = step(state)
        sums.append(float(state.sums["loss"]))
    return np.diff(sums).tolist()


def test_each_step_drops_other_entries():
    one, two, three = losses(0.5)
    assert len({round(x, 3) for x in (one, two, three)}) == 3


def test_dropout_is_on_in_training():
    without = losses(0.0)
    assert without == pytest.approx([without[0]] * 3, abs=1e-4)
    assert abs(losses(0.5)[0] - without[0]) > 1e-2


def test_the_seed_decides_what_is_dropped():
    assert losses(0.5, seed=1, steps=1) == losses(0.5, seed=1, steps=1)
    assert losses(0.5, seed=1, steps=1) != losses(0.5, seed=2, steps=1)


def test_moments_begin_anew_after_a_number_of_steps():
    """The third step is then the first of another optimizer; the second is not."""
    optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 4))
    step, state = make_step(optimizer)
    renewing, _ = make_step(optimizer, renewed_at=2)
    one = step(state)
    two = step(one)
    assert_equal_trees(renewing(one).params, two.params)
    params = nnx.filter_state(two.params, nnx.Param)
    fresh: Any = renew(two.opt_state, optimizer.init(params))
    assert int(fresh[1].count) == 2  # The schedule goes on.
    fresh = two._replace(opt_state=fresh)
    assert_equal_trees(renewing(two).params, step(fresh).params)
    change = jax.tree.map(
        lambda x, y: float(jnp.abs(x - y).max()), renewing(two).params, step(two).params
    )
    assert max(jax.tree.leaves(change)) > 1e-3


def test_an_average_of_the_parameters_by_hand():
    """That of Adam's paper: weights 0.9^(t - k), divided by their sum."""
    step, state = make_step(optax.sgd(0.5), ema=0.9)
    steps = []
    for _ in range(3):
        state = step(state)
        steps.append(jax.tree.leaves(state.params))
        average = jax.tree.leaves(scored_params(state))
        shares = 0.9 ** np.arange(len(steps))[::-1]
        for mean, *values in zip(average, *steps, strict=True):
            expected = np.average(np.asarray(values, np.float64), 0, shares)
            np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7)


def test_the_average_begins_anew_with_the_moments():
    step, state = make_step(optax.sgd(0.5), ema=0.9, renewed_at=2)
    for _ in range(3):
        state = step(state)
    assert scored_params(state) is not state.params
    jax.tree.map(
        lambda mean, last: np.testing.assert_allclose(mean, last, atol=1e-6),
        scored_params(state),
        state.params,
    )


def test_running_means_are_averaged_too():
    step, state = make_step(optax.sgd(0.5), ema=0.5, norm="batch")
    one = step(state)
    two = step(one)

    def means(params: nnx.State) -> np.ndarray:
        return np.asarray(params["encoder"]["norm"]["mean"][...])

    assert np.abs(means(two.params) - means(one.params)).max() > 1e-3
    expected = (means(one.params) + 2 * means(two.params)) / 3
    np.testing.assert_allclose(means(scored_params(two)), expected, rtol=1e-5)
