"""The collapse of pure attention beside what the theorem allows, in float64.

In float32 a residual is lost in rounding after two layers; in float64 after three.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.analysis.bound import collapse_beta, collapse_bound
from lra_jax.analysis.networks import Network, Shape, find_shape, zipf_tokens
from lra_jax.analysis.residual import composite_norm, residual
from lra_jax.analysis.variants import Variant
from lra_jax.errors import expected


class BoundedCollapse(NamedTuple):
    """Residual norms ``||res(X_l)||`` of one sequence, float64 `[L + 1]` each.

    Attributes:
      residuals: measured, after each layer; the input first.
      rounding: the part of them that may be rounding, ``eps ||X_l||``.
      bounds: Theorem 2.2 from the input on.
      next_bounds: the same for one layer, from the measured residual before it; the
        input's is its own residual.
      beta: of the weights, see `lra_jax.analysis.collapse_beta`.
    """

    residuals: np.ndarray
    rounding: np.ndarray
    bounds: np.ndarray
    next_bounds: np.ndarray
    beta: float


def bounded_collapse(
    shape: Shape | str,
    *,
    norm: bool = False,
    scale: float = 1.0,
    length: int = 128,
    num_layers: int | None = None,
    seed: int = 0,
) -> BoundedCollapse:
    """Runs the attention of a network at initialisation alone, on random tokens.

    Args:
      shape: of the network; its attention must be that of the theorem.
      norm: layer normalisation after each layer, which the theorem has not.
      scale: of the embedded tokens, their residual with them.
      length, num_layers: see `networks.Network`.
      seed: of weights and tokens.

    Raises:
      ValueError: as of `networks.Network`, a scale that is not positive, or a shape
        whose layers are more than attention (ALBERT's, XLNet's).
    """
    shape = find_shape(shape)
    if shape.relative or shape.shared:
        raise expected("shape", "one of attention by content alone, as BERT's", shape)
    if not scale > 0:
        raise expected("scale", "a positive number", scale)
    network = Network(shape, length=length, num_layers=num_layers, rngs=nnx.Rngs(seed))
    tokens = zipf_tokens(shape.vocab_size, 1, length, seed)
    states = _states(network, tokens, norm, scale)
    residuals = composite_norm(residual(states))
    heads = {"head_dim": shape.width // shape.num_heads, "num_heads": shape.num_heads}
    beta = _beta(network, shape)
    first, layers = float(residuals[0]), range(len(residuals))
    bounds = [collapse_bound(first, i, beta=beta, **heads) for i in layers]
    steps = [
        collapse_bound(float(before), 1, beta=beta, **heads)
        for before in residuals[:-1]
    ]
    return BoundedCollapse(
        residuals,
        np.finfo(np.float64).eps * composite_norm(states),
        np.array(bounds),
        np.array([first, *steps]),
        beta,
    )


def _states(
    network: Network, tokens: np.ndarray, norm: bool, scale: float
) -> np.ndarray:
    """The hidden states `[L + 1, T, D]` of one sequence, in float64."""
    graph, state = nnx.split(network)
    variant = Variant(skip=False, mlp=False, norm=norm)
    with jax.enable_x64(True):

        @jax.jit
        def run(state: nnx.State, tokens: jax.Array) -> jax.Array:
            model = nnx.merge(graph, state)
            x = model.embedded(tokens) * scale
            states = [x]
            for block in model.blocks:
                x = block(x, variant)
                states.append(x)
            return jnp.stack(states)

        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), state)
        return np.asarray(run(wide, jnp.asarray(tokens)))[:, 0]


def _beta(network: Network, shape: Shape) -> float:
    def heads(layer: Any) -> np.ndarray:
        """`[N, D, H]`"""
        kernel = np.asarray(layer.kernel[...], np.float64)
        return np.moveaxis(kernel.reshape(shape.width, shape.num_heads, -1), 1, 0)

    betas = []
    for block in network.blocks:
        attention: Any = block.attention
        out = np.asarray(attention.out.kernel[...], np.float64)
        values = heads(attention.value) @ out.reshape(shape.num_heads, -1, shape.width)
        query, key = heads(attention.query), heads(attention.key)
        betas.append(collapse_beta(query, key, values))
    return max(betas)
