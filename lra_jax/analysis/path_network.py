"""The networks of the path experiments, whole and along single paths.

A post-norm encoder that labels every token, as in the published code: embeddings, or
points through one or two dense layers, layer normalisation, then blocks ``x = LN(x +
attention(x))``, optionally each with an MLP, and a linear classifier. Weights are
N(0, 0.02); values and output projections are uniform within 1 / sqrt(D).

Along a path a layer uses one of its heads and nothing else, ``x = LN'(P_h x W_h + b)``,
or is skipped; LN' has no scale or bias. Contributions of several paths are summed,
normalised by LN' and classified, which the code calls ``--no_sub_path``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.networks import EPSILON, INIT
from lra_jax.attention import registry
from lra_jax.errors import expected
from lra_jax.models import EncoderBlock, MultiHeadAttention
from lra_jax.models.layers import Dense, Dropout, LayerNorm
from lra_jax.models.mlp import Mlp


@dataclasses.dataclass(frozen=True)
class PathSettings:
    """Sizes of a network.

    Attributes:
      width, num_layers, num_heads: of the blocks.
      num_outputs: classes, or coordinates of a point.
      vocab_size: of token ids; None for points in the plane.
      longest: number of positions with an embedding; 0 = none.
      input_layers: dense layers that points go through.
      mlp: whether the blocks have one.
      dropout: rate on embeddings, branches and before the classifier.
    """

    width: int
    num_layers: int
    num_heads: int
    num_outputs: int
    vocab_size: int | None = None
    longest: int = 0
    input_layers: int = 1
    mlp: bool = False
    dropout: float = 0.1


def _make_block(settings: PathSettings, mechanism: str, rngs: nnx.Rngs) -> EncoderBlock:
    width = settings.width
    attention = MultiHeadAttention(
        settings.num_heads, width, mechanism=mechanism, rngs=rngs
    )
    uniform = functools.partial(
        jax.random.uniform, minval=-(width**-0.5), maxval=width**-0.5
    )
    for name in ("query", "key", "value", "out"):
        kernel = getattr(attention, name).kernel
        init = INIT if name in ("query", "key") else uniform
        kernel[...] = init(rngs.params(), kernel[...].shape)
    mlp = None
    if settings.mlp:
        mlp = Mlp(width, width, activation="gelu_exact", kernel_init=INIT, rngs=rngs)
    more: Any = {"post_norm": True, "epsilon": EPSILON, "dropout": settings.dropout}
    return EncoderBlock(attention, mlp, width, **more)


def _one_head(
    attention: Any, x: jax.Array, mask: jax.Array | None, head: jax.Array
) -> jax.Array:
    """The contribution of a head, normalised without scale; -1 returns x itself."""
    kernel = attention.out.kernel[...]
    rows = jnp.arange(len(kernel)) // attention.head_dim == head
    attention = nnx.clone(attention)
    attention.out.kernel[...] = jnp.where(rows[:, None], kernel, 0)
    branch = _normalise(attention(x, mask=mask))
    return jnp.where(head < 0, x, branch)


class PathNetwork(nnx.Module):
    """Labels every token; see the module.

    Args:
      settings: sizes and parts.
      mechanism: a registered mechanism that has all four projections and no parameter
        arrays.
      rngs: for initialisation.
    """

    def __init__(
        self, settings: PathSettings, mechanism: str = "softmax", *, rngs: nnx.Rngs
    ):
        self.settings = settings
        width = settings.width

        def dense(inputs: int) -> Dense:
            return Dense(inputs, width, kernel_init=INIT, rngs=rngs)

        if settings.vocab_size is None:
            sizes = [2, *[width] * (settings.input_layers - 1)]
            self.inputs = nnx.List([dense(size) for size in sizes])
        else:
            size = (settings.vocab_size, width)
            self.embed = nnx.Param(INIT(rngs.params(), size))
            if settings.longest:
                size = (settings.longest, width)
                self.positions = nnx.Param(INIT(rngs.params(), size))
            self.inputs = nnx.List([dense(width)])
        self.norm = LayerNorm(width, epsilon=EPSILON)
        self.blocks = nnx.List(
            [_make_block(settings, mechanism, rngs) for _ in range(settings.num_layers)]
        )
        self.head = Dense(width, settings.num_outputs, kernel_init=INIT, rngs=rngs)
        self.dropout = Dropout(settings.dropout)

    def __call__(
        self,
        inputs: jax.Array,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """`[B, T]` ids or `[B, T, 2]` points to `[B, T, num_outputs]`.

        ``rngs`` with a stream "dropout" trains; ``mask`` `[B, T]` is True at tokens.
        """
        x = self.dropout(self.embed_inputs(inputs), rngs)
        for block in self.blocks:
            x = block(x, mask, rngs)
        return self.head(self.dropout(x, rngs))

    def along(
        self, inputs: jax.Array, paths: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array:
        """The same from a sum of paths, `int [P, L]`: their heads, -1 = skipped."""
        start = self.embed_inputs(inputs)

        def add(total: jax.Array, path: jax.Array) -> tuple[jax.Array, None]:
            """The sum with one more path."""
            x = start
            for block, head in zip(self.blocks, path, strict=True):
                x = _one_head(block.attention, x, mask, head)
            return total + x, None

        total, _ = jax.lax.scan(add, jnp.zeros_like(start), paths)
        return self.head(_normalise(total))

    def embed_inputs(self, inputs: jax.Array) -> jax.Array:
        """The input of the first block, `[B, T, D]`, for ids or points as above."""
        x = inputs
        if self.settings.vocab_size is not None:
            x = self.embed[...][inputs]
            if self.settings.longest:
                x = x + self.positions[...][None, : inputs.shape[1]]
        for index, layer in enumerate(self.inputs):
            x = layer(jax.nn.gelu(x, approximate=False) if index else x)
        return self.norm(x)


def check_mechanism(mechanism: str) -> None:
    """Refuses a mechanism that a `PathNetwork` cannot have."""
    entry = registry.resolve(mechanism)
    if entry.parameters or len(entry.projections) < 4:
        kind = "a mechanism of queries, keys and values without parameters of its own"
        raise expected("--attention", kind, repr(mechanism))


def draw_paths(
    length: int, count: int, num_layers: int, num_heads: int, rng: Any
) -> np.ndarray:
    """Random paths through ``length`` layers, `int32 [count, num_layers]`.

    The layers, and the head of each, are drawn uniformly; -1 = skipped.
    """
    paths = rng.integers(num_heads, size=(count, num_layers), dtype=np.int32)
    for path in paths:
        path[rng.permutation(num_layers)[length:]] = -1
    return paths


def _normalise(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + EPSILON)


def fit_epochs(
    model: PathNetwork,
    loss: Callable[..., jax.Array],
    arrays: Iterable[np.ndarray],
    batch_size: int,
    optimizer: optax.GradientTransformation,
    epochs: int,
    seed: int,
) -> np.ndarray:
    """Trains a model on the batches in the same order in every epoch.

    Args:
      model: gets the trained weights.
      loss: maps ``(model, *batch, rngs)`` to a scalar.
      arrays: the examples, `[n, ...]` each, without those of a last, smaller batch.
      batch_size, optimizer, epochs: of the training; an epoch is one program.
      seed: of dropout.

    Returns:
      The mean loss of each epoch.
    """
    graph, params = nnx.split(model, nnx.Param)
    size = batch_size
    data = tuple(
        jnp.asarray(x[: len(x) // size * size].reshape(-1, size, *x.shape[1:]))
        for x in arrays
    )

    def batch_loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return loss(nnx.merge(graph, params), *batch, nnx.Rngs(dropout=key))

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        """One batch: the new parameters, state and key, and the loss before it."""
        params, state, key = carry
        key, dropout = jax.random.split(key)
        value, grads = jax.value_and_grad(batch_loss)(params, batch, dropout)
        with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
            updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, key), value

    epoch = jax.jit(lambda carry, data: jax.lax.scan(step, carry, data))
    carry = (params, optimizer.init(params), jax.random.key(seed))
    losses = []
    for _ in progress.track(range(epochs), "epochs", epochs):
        carry, values = epoch(carry, data)
        losses.append(float(values.mean()))
    nnx.update(model, carry[0])
    return np.array(losses)
