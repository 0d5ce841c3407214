"""How fast the tokens of a network become equal (Dong, Cordonnier and Loukas 2021,
Figure 2): the relative residual after each layer, for each variant of the network."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.capture import variant_states
from lra_jax.analysis.networks import (
    Network,
    Shape,
    check_length,
    find_shape,
    zipf_tokens,
)
from lra_jax.analysis.residual import relative_residual
from lra_jax.analysis.variants import VARIANTS, Variant
from lra_jax.attention.inputs import check_size
from lra_jax.errors import expected


def network_curves(
    shape: Shape | str,
    mechanism: str = "softmax",
    *,
    variants: Mapping[str, Variant] = VARIANTS,
    draws: int = 1,
    batch_size: int = 8,
    length: int = 128,
    num_layers: int | None = None,
    seed: int = 0,
    clock: progress.Clock | None = None,
) -> dict[str, np.ndarray]:
    """The curves for a network at initialisation, on random tokens.

    Args:
      shape, mechanism, length, num_layers: see `networks.Network`.
      variants: by name.
      draws: number of initialisations, each with its own tokens.
      batch_size: sequences per draw.
      seed: of the first draw.
      clock: counts the curves, one for each draw and variant.

    Returns:
      For each variant float64 `[draws * batch_size, L + 1]`, embeddings first.

    Raises:
      ValueError: as for `networks.Network`, or a number that is not positive.
    """
    check_size("draws", draws)
    check_size("batch_size", batch_size)
    shape = find_shape(shape)
    found: dict[str, list[np.ndarray]] = {name: [] for name in variants}
    run = None
    for draw in range(seed, seed + draws):
        network = Network(
            shape,
            mechanism,
            length=length,
            num_layers=num_layers,
            rngs=nnx.Rngs(draw),
        )
        graph, state = nnx.split(network)
        run = run or _compiled(graph)
        tokens = jnp.asarray(zipf_tokens(shape.vocab_size, batch_size, length, draw))
        for name, variant in variants.items():
            found[name].append(collapse_curves(run(state, tokens, variant)))
            if clock is not None:
                clock.tick()
    return {name: np.concatenate(curves) for name, curves in found.items()}


def trained_curves(
    network: Network,
    shape: Shape,
    variants: Mapping[str, Variant] = VARIANTS,
    *,
    length: int,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """The same for one network with given weights.

    Raises:
      ValueError: sequences longer than its table of positions.
    """
    check_length(shape, length)
    graph, state = nnx.split(network)
    run = _compiled(graph)
    tokens = jnp.asarray(zipf_tokens(shape.vocab_size, batch_size, length, seed))
    return {
        name: collapse_curves(run(state, tokens, variant))
        for name, variant in progress.told(variants.items(), "curves", len(variants))
    }


def model_curves(
    model: nnx.Module,
    run: Callable[[], Any],
    variants: Mapping[str, Variant] = VARIANTS,
) -> dict[str, np.ndarray]:
    """The curves for a model from this library on given inputs.

    Returns:
      For each variant float64 `[B, L + 1]`. Padding is ignored.
    """
    states, mask = variant_states(model, run, variants)
    return {name: collapse_curves(found, mask) for name, found in states.items()}


def collapse_curves(states: Any, mask: np.ndarray | None = None) -> np.ndarray:
    """Relative residuals `[B, L + 1]` of hidden states `[L + 1, B, T, D]`.

    Raises:
      ValueError: the states are not finite.
    """
    states = np.asarray(states, np.float64)
    if not np.isfinite(states).all():
        layer = int(np.isfinite(states).all((1, 2, 3)).argmin())
        raise expected("states", "finite numbers", f"others from layer {layer} on")
    if mask is not None:
        mask = np.broadcast_to(mask, states.shape[:3])
    return relative_residual(states, mask=mask).T


def _compiled(graph: Any) -> Callable[[Any, jax.Array, Variant], jax.Array]:
    def run(state: Any, tokens: jax.Array, variant: Variant) -> jax.Array:
        return nnx.merge(graph, state)(tokens, variant)

    return jax.jit(run, static_argnums=2)
