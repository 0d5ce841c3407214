"""The values that ``nnx.capture`` finds: compiled, recomputed, and where none runs."""

import warnings
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.attention import linear_attention
from lra_jax.models import SequenceClassifier

TOKENS = jnp.arange(14).reshape(2, 7) % 8 + 1
LENGTHS = jnp.array([7, 5], jnp.int32)


def classifier(**changes) -> SequenceClassifier:
    settings: dict[str, Any] = {
        "mechanism": "linear",
        "num_layers": 2,
        "embed_dim": 8,
        "mlp_dim": 8,
    }
    settings |= {"max_length": 8, "dropout": 0.2} | changes
    return SequenceClassifier(9, 3, **settings, rngs=nnx.Rngs(0))


def captured(model: Any, *arguments: Any) -> Any:
    watched: Any = nnx.capture(model, nnx.Intermediate)
    return watched(*arguments)


@pytest.mark.parametrize("remat", [False, True])
def test_compiled(remat):
    model = classifier(remat=remat)
    out, captured_values = helpers.call_model(captured, model, TOKENS, LENGTHS)
    np.testing.assert_allclose(
        out, helpers.call_model(SequenceClassifier.__call__, model, TOKENS, LENGTHS)
    )
    captured_values = nnx.to_pure_dict(captured_values)["encoder"]["blocks"]
    for index, block in enumerate(model.encoder.blocks):
        layer: Any = block.attention
        named = {
            name: calls[0]
            for name, calls in captured_values[index]["attention"].items()
        }
        arrays = [named[name] for name in ("queries", "keys", "values")]
        assert [x.shape for x in arrays] == 3 * [(2, 7, 2, 4)]
        heads = linear_attention(*arrays, **named["keywords"])
        (x,), (mask,), (outputs,) = (
            captured_values[index][name] for name in ("inputs", "mask", "outputs")
        )
        np.testing.assert_array_equal(mask.sum(1), LENGTHS)
        x = x + layer.out(heads.reshape(2, 7, 8))
        x = x + block.mlp(block.mlp_norm(x))
        np.testing.assert_allclose(outputs, x, atol=1e-5)
    np.testing.assert_array_equal(
        captured_values[0]["outputs"][0], captured_values[1]["inputs"][0]
    )


def test_nothing_is_left_where_nothing_captures():
    model: Any = classifier()
    _, before = nnx.split(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(TOKENS, LENGTHS)
        captured(model, TOKENS, LENGTHS)
        model(TOKENS, LENGTHS)
    helpers.assert_equal_trees(before, nnx.split(model)[1])
    graph, params = nnx.split(model)

    def program(run) -> str:
        call = lambda params: run(nnx.merge(graph, params), TOKENS, None)  # noqa: E731
        return str(jax.make_jaxpr(call)(params))

    plain, watched = program(SequenceClassifier.__call__), program(captured)
    assert plain != watched  # More outputs of the same equations.
    assert plain.count(" = ") == watched.count(" = ")
