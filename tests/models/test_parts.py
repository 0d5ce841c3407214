"""A block, MLP and positions of one's own in models: streams, packed rows, files."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import Block, CausalLM, SequenceClassifier, load, save
from lra_jax.models.decoding import prefill, step


class Parallel(Block):
    """``x + attention(norm(x)) + mlp(norm(x))``."""

    def __init__(self, attention, mlp, config, rngs):
        super().__init__(attention, mlp)
        self.norm = nnx.LayerNorm(config.embed_dim, rngs=rngs)

    def add_branches(self, x, attend, transform, rngs=None, **rows):
        inner = self.norm(x)
        return x + attend(inner) + transform(inner)


class Squared(nnx.Module):
    """``W_2 relu(W_1 x)^2``."""

    def __init__(self, config, rngs, factor=2):
        width, hidden = config.embed_dim, factor * config.embed_dim
        self.inner = nnx.Linear(width, hidden, rngs=rngs)
        self.outer = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x, *, mask=None, rngs=None):
        return self.outer(jnp.square(nnx.relu(self.inner(x))))


class Waves(nnx.Module):
    """Sines of learned frequencies."""

    def __init__(self, config, rngs):
        self.rates = nnx.Param(rngs.params.uniform((1, config.embed_dim)))

    def __call__(self, length):
        return jnp.sin(jnp.arange(0.0, length)[:, None] * self.rates[...])


SETTINGS: dict[str, Any] = {
    **{"block": Parallel, "mlp": Squared, "positions": Waves},
    **{"mlp_options": "factor=3", "mechanism": "linear", "num_layers": 2},
    **{"embed_dim": 8, "num_heads": 2, "max_length": 16, "dropout": 0.0},
}


class Halved(Parallel):
    """Not what a block is: its output has fewer columns than its input."""

    def add_branches(self, x, attend, transform, rngs=None, **rows):
        return super().add_branches(x, attend, transform, rngs, **rows)[..., ::2]


def test_a_block_of_another_output_is_refused() -> None:
    model = CausalLM(
        9, is_causal=True, **SETTINGS | {"block": Halved}, rngs=nnx.Rngs(0)
    )
    needed = r"^the output of block: expected \[B, T, D\]=\(1, 3, 8\), got \(1, 3, 4\)"
    with pytest.raises(ValueError, match=needed):
        model(jnp.zeros((1, 3), int))


def test_a_block_needs_its_branches() -> None:
    with pytest.raises(TypeError, match=r"abstract .*add_branches"):
        type("Unfinished", (Block,), {})(None, None)


def test_a_stream_is_the_whole_model() -> None:
    model = CausalLM(9, is_causal=True, **SETTINGS, rngs=nnx.Rngs(0))
    block: Any = model.encoder.blocks[0]
    assert isinstance(block, Parallel) and block.mlp.inner.kernel.shape == (8, 24)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 7)))
    logits = model(tokens)
    some, state = prefill(model, tokens[:, :5])
    np.testing.assert_allclose(some, logits[:, 4], atol=1e-5)
    for place in (5, 6):
        some, state = step(model, state, tokens[:, place])
        np.testing.assert_allclose(some, logits[:, place], atol=1e-5)


def test_packed_documents_are_those_alone() -> None:
    model = CausalLM(9, is_causal=True, **SETTINGS, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 9, (1, 9)))
    segment_ids = jnp.array([[1] * 4 + [2] * 5])
    packed = model(tokens, segment_ids=segment_ids)
    np.testing.assert_allclose(packed[:, :4], model(tokens[:, :4]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 4:], model(tokens[:, 4:]), atol=1e-5)


def test_a_file_names_them_and_asks_before_it_imports_them(tmp_path) -> None:
    model = SequenceClassifier(9, 3, **SETTINGS, rngs=nnx.Rngs(0))
    file = tmp_path / "model.safetensors"
    save(file, model)
    with pytest.raises(ValueError, match=f"True to import '{__name__}:Parallel', got"):
        load(file)
    again: Any = load(file, allow_code=True).model
    tokens = jnp.ones((2, 6), jnp.int32)
    np.testing.assert_array_equal(again(tokens), model(tokens))


def test_the_dtype_is_that_of_the_model() -> None:
    """Flax's layers without a dtype return float32; the next block gets bfloat16."""
    model = SequenceClassifier(9, 3, **SETTINGS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        x = jax.eval_shape(lambda: model.encoder(jnp.ones((2, 6), jnp.int32)))
    assert x.dtype == jnp.bfloat16
