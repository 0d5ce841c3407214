"""The step: dropout with a key for each, and moments that begin anew."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_equal_trees

from lra_jax.models import SequenceClassifier
from lra_jax.training.optimizer import without_moments
from lra_jax.training.step import TrainState, init_state, step_function


def made(
    optimizer: optax.GradientTransformation, dropout: float = 0.0, **options: Any
) -> tuple[Callable[[TrainState], TrainState], TrainState]:
    """A step on one batch, and the state before the first."""
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 16}
    model = SequenceClassifier(9, 3, dropout=dropout, **sizes, rngs=nnx.Rngs(0))
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
    return lambda state: step(state, batch), init_state(params, optimizer)


def losses(dropout: float, seed: int = 0, steps: int = 3) -> list[float]:
    """The losses of steps that do not change the parameters."""
    step, state = made(optax.sgd(0.0), dropout, seed=seed)
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
    """The third step is then the first of another optimiser; the second is not."""
    step, state = made(optax.adam(0.1))
    renewing, _ = made(optax.adam(0.1), renewed_at=2)
    one = step(state)
    two = step(one)
    assert_equal_trees(renewing(one).params, two.params)
    fresh = two._replace(opt_state=without_moments(two.opt_state))
    assert_equal_trees(renewing(two).params, step(fresh).params)
    change = jax.tree.map(
        lambda x, y: float(jnp.abs(x - y).max()), renewing(two).params, step(two).params
    )
    assert max(jax.tree.leaves(change)) > 1e-3
