"""The step: dropout is on, with a key of its own in each step."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra_jax.models import SequenceClassifier
from lra_jax.training.step import init_state, step_function


def losses(dropout: float, seed: int = 0, steps: int = 3) -> list[float]:
    """The losses of steps on one batch, which do not change the parameters."""
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

    optimizer = optax.sgd(0.0)
    step = step_function(loss, graphdef, optimizer, seed=seed)
    state, sums = init_state(params, optimizer), [0.0]
    for _ in range(steps):
        state = step(state, {"tokens": tokens, "labels": labels})
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
