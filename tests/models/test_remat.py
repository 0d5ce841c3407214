"""Recomputed blocks: the same gradients, in less memory on this machine as well."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import SequenceClassifier
from lra_jax.models.remat import recompute


def rooted(scale, picked, x, memory):
    """Uses a float and an integer array that no argument passes."""
    return jnp.sqrt(jnp.abs(x))[picked] * scale + memory["added"]


@pytest.mark.parametrize("compiled", [False, True])
def test_closed_over_arrays_have_gradients(compiled):
    picked = jnp.array([2, 0])
    x, memory = jnp.array([1.0, 4.0, 9.0]), {"added": jnp.ones(2)}

    def loss(scale, x, memory, call):
        result, _ = call(lambda _, x, m: (rooted(scale, picked, x, m), None), x, memory)
        return jnp.square(result).sum()

    def plain(call, *arrays):
        return call(None, *arrays)

    def again(call, *arrays):
        return recompute(call, None, *arrays)

    grads = []
    for call in (plain, again):
        grad = jax.grad(lambda *args, call=call: loss(*args, call), (0, 1, 2))
        grad = helpers.quick_jit(grad) if compiled else grad
        grads.append(grad(jnp.float32(2), x, memory))
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gradients_that_are_not_numbers_arrive():
    x = jnp.array([0.0, 1.0])

    def loss(x):
        return recompute(lambda _, x: jnp.sqrt(x) * jnp.nan, None, x).sum()

    assert np.isnan(jax.grad(loss)(x)).all()


def test_complex_parameters_have_gradients():
    turn = jnp.array([1 + 2j, 3j], jnp.complex64)

    def loss(turn, call):
        return jnp.abs(call(lambda _, x: x * turn, jnp.ones(2, jnp.complex64))).sum()

    plain_gradient = jax.grad(lambda turn: loss(turn, lambda f, x: f(None, x)))(turn)
    actual = jax.grad(lambda turn: loss(turn, lambda f, x: recompute(f, None, x)))(turn)
    np.testing.assert_allclose(actual, plain_gradient, rtol=1e-6)


def test_a_model_for_each_row():
    """Under vmap, as in an ensemble."""
    scales = jnp.array([1.0, 2.0])

    def grad(scale):
        call = lambda _, x: jnp.sin(x * scale)  # noqa: E731
        return jax.grad(lambda x: recompute(call, None, x).sum())(jnp.ones(3))

    expected = np.outer(scales * np.cos(scales), np.ones(3))
    np.testing.assert_allclose(jax.vmap(grad)(scales), expected, rtol=1e-6)


def test_a_compiled_step_needs_less_memory():
    """XLA drops the barriers of ``jax.checkpoint`` on a CPU, so they are not enough."""
    tokens = jnp.ones((4, 256), jnp.uint8)
    sizes = {"num_layers": 8, "embed_dim": 16, "mlp_dim": 128, "max_length": 256}
    needed = []
    for remat in (False, True):
        model = SequenceClassifier(7, 3, **sizes, remat=remat, rngs=nnx.Rngs(params=0))
        graph, params = nnx.split(model)

        def loss(params, graph=graph):
            return jnp.square(nnx.merge(graph, params)(tokens, None)).sum()

        step: Any = jax.jit(jax.grad(loss)).lower(params).compile()
        needed.append(step.memory_analysis().temp_size_in_bytes)
    assert needed[1] < 0.4 * needed[0]
