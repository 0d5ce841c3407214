"""The collapse of pure attention compared with the theorem's bound, in float64.

In float32 a residual is lost in rounding after two layers; in float64 after three.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.analysis.bound import collapse_beta, collapse_bound
from lra_jax.analysis.capture import capture, longest_document
from lra_jax.analysis.networks import Network, Shape, find_shape, zipf_tokens
from lra_jax.analysis.residual import composite_norm, residual
from lra_jax.analysis.variants import Variant
from lra_jax.errors import expected
from lra_jax.models import EncoderBlock, MultiHeadAttention
from lra_jax.models.batch_norm import BatchNorm
from lra_jax.models.instance_norm import InstanceNorm
from lra_jax.models.layers import LayerNorm


class BoundedCollapse(NamedTuple):
    """Residual norms ``||res(X_l)||`` of one sequence, float64 `[L + 1]` each.

    Attributes:
      residuals: measured, after each layer; the input first.
      rounding: the part of them that may be rounding, ``eps ||X_l||``.
      bounds: Theorem 2.2 applied from the input on.
      next_bounds: the same for one layer, from the measured residual before it; for the
        input, its own residual.
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
    """Runs only the attention of a network at initialisation, on random tokens.

    Args:
      shape: of the network; its attention must be that of the theorem.
      norm: apply layer normalisation after each layer, unlike the theorem.
      scale: of the embedded tokens, and so of their residual.
      length, num_layers: see `networks.Network`.
      seed: of weights and tokens.

    Raises:
      ValueError: as for `networks.Network`, a scale that is not positive, or a shape
        whose layers have more than attention (ALBERT's, XLNet's).
    """
    shape = find_shape(shape)
    if shape.relative or shape.shared:
        raise expected("shape", "one of attention by content alone, as BERT's", shape)
    if not scale > 0:
        raise expected("scale", "a positive number", scale)
    network = Network(shape, length=length, num_layers=num_layers, rngs=nnx.Rngs(seed))
    tokens = zipf_tokens(shape.vocab_size, 1, length, seed)
    states = _states(network, tokens, norm, scale)
    layers = [block.attention for block in network.blocks]
    return _bounded(states, layers, shape.num_heads)


def bounded_model(
    model: nnx.Module, run: Callable[[], Any], *, norm: bool = False
) -> BoundedCollapse:
    """Runs only the attention of a model trained here, on its first example.

    Computed in float64 from the weights, on the longest document of the first row.

    Args:
      model, run: see `capture.capture`.
      norm: keep the normalisation of each attention.

    Raises:
      ValueError: its attention is not that of the theorem: softmax of query times key
        over all positions, computed from the layer's own input.
    """
    blocks = [x for _, x in nnx.iter_modules(model) if isinstance(x, EncoderBlock)]
    layers: list[Any] = [block.attention for block in blocks]
    for layer in layers:
        _check_layer(layer)
    captured = capture(model, run)
    document = longest_document(captured.documents)[0]
    x = captured.states[0, 0][document].astype(np.float64)
    states = [x]
    for block in blocks:
        before, after = norm and not block.post_norm, norm and block.post_norm
        inner = _normalised(x, block.attention_norm) if before else x
        x = _attend(inner, block.attention)
        x = _normalised(x, block.attention_norm) if after else x
        states.append(x)
    return _bounded(np.stack(states), layers, layers[0].num_heads)


def _bounded(
    states: np.ndarray, layers: Sequence[Any], num_heads: int
) -> BoundedCollapse:
    """The result for hidden states `[L + 1, T, D]` and the attention between them."""
    residuals = composite_norm(residual(states))
    head_dim = layers[0].query.kernel.shape[-1] // num_heads
    heads = {"head_dim": head_dim, "num_heads": num_heads}
    beta = max(_beta(layer, num_heads) for layer in layers)
    first, depths = float(residuals[0]), range(len(residuals))
    bounds = [collapse_bound(first, depth, beta=beta, **heads) for depth in depths]
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
        run = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids, variant, scale))
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), state)
        return np.asarray(run(wide, jnp.asarray(tokens)))[:, 0]


def _beta(layer: Any, num_heads: int) -> float:
    """The beta of a layer with kernels ``query``, ``key``, ``value`` and ``out``."""
    query, key, value = (
        _heads(np.asarray(part.kernel[...], np.float64), num_heads)
        for part in (layer.query, layer.key, layer.value)
    )
    out = np.asarray(layer.out.kernel[...], np.float64)
    return collapse_beta(query, key, value @ out.reshape(num_heads, -1, out.shape[-1]))


def _heads(x: np.ndarray, num_heads: int) -> np.ndarray:
    """`[T, N * H]` to `[N, T, H]`."""
    return np.moveaxis(x.reshape(len(x), num_heads, -1), 1, 0)


def _check_layer(layer: MultiHeadAttention) -> None:
    config = layer.config
    wrong = {
        f"attention {config.mechanism.name!r}": config.mechanism.name != "softmax",
        "a causal model": config.is_causal,
        "rotary positions": config.rotary,
        "shared heads of keys": layer.num_kv_heads != layer.num_heads,
    }
    for name in ("short_conv", "gate", "local_values", "options"):
        wrong[name] = bool(getattr(config, name))
    found = [name for name, is_so in wrong.items() if is_so]
    if found:
        wanted = "plain softmax over all positions of the layer's own inputs"
        raise expected("model", wanted, " and ".join(found))


def _attend(x: np.ndarray, layer: MultiHeadAttention) -> np.ndarray:
    """The layer on one sequence `[T, D]`, in float64."""
    query, key, value = (
        _heads(_project(x, part), layer.num_heads)
        for part in (layer.query, layer.key, layer.value)
    )
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(layer.head_dim)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.moveaxis(weights @ value, 0, 1)
    return _project(mixed.reshape(len(x), -1), layer.out)


def _project(x: np.ndarray, layer: Any) -> np.ndarray:
    out = x @ np.asarray(layer.kernel[...], np.float64)
    bias = layer.bias
    return out if bias is None else out + np.asarray(bias[...], np.float64)


def _normalised(
    x: np.ndarray, layer: LayerNorm | InstanceNorm | BatchNorm
) -> np.ndarray:
    """The norm of one sequence `[T, D]`, over columns or over positions."""
    if isinstance(layer, BatchNorm):
        mean, var = (np.asarray(p[...], np.float64) for p in (layer.mean, layer.var))
    else:
        axis = 0 if isinstance(layer, InstanceNorm) else -1
        mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    scale, bias = (np.asarray(p[...], np.float64) for p in (layer.scale, layer.bias))
    return (x - mean) / np.sqrt(var + layer.epsilon) * scale + bias
