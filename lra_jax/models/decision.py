"""A decision transformer: actions from states, and from the return to be reached.

Source: Chen et al. 2021, "Decision Transformer", arXiv:2106.01345.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention.inputs import check_shape, check_size
from lra_jax.errors import expected
from lra_jax.models.config import ModelConfig
from lra_jax.models.decoding import prefill_blocks
from lra_jax.models.encoder import VectorEncoder
from lra_jax.models.layers import Dense, LayerNorm, take_rows


class DecisionTransformer(nnx.Module):
    """``action_t = tanh(W decoder(tokens)_t + b)``, read at the token of state t.

    A step is three tokens, ``LN(W_r return + v_t)``, ``LN(W_s state + v_t)`` and
    ``LN(W_a action + v_t)``: the sum of the rewards from this step on, the state, and
    the action, each with a learned vector v of the time step t. The decoder is causal:
    an action depends on the returns and states up to its own and on earlier actions.
    Tokens and head are computed in float32, whatever the dtype.

    Args:
      state_dim, action_dim: sizes S and A.
      horizon: the longest episode, in steps.
      config: the settings of the decoder, whose ``max_length`` counts tokens; those of
        inputs, and of positions other than rotary ones, have no effect.
      rngs: for initialisation.

    Raises:
      ValueError: sizes below 1, ``is_causal=False``, or see `ModelConfig`; from a call
        or a step, arrays of other shapes.

    Examples:
      >>> config = ModelConfig(mechanism="flow", is_causal=True, max_length=60)
      >>> model = DecisionTransformer(11, 3, 1000, config=config, rngs=nnx.Rngs(0))
      >>> returns, states, actions = (jnp.ones((2, 20, x)) for x in (1, 11, 3))
      >>> times = jnp.broadcast_to(jnp.arange(20), (2, 20))
      >>> model(returns, states, actions, times, jnp.array([20, 7])).shape
      (2, 20, 3)
    """

    INPUTS = ("returns", "states", "actions", "times", "lengths")
    """The arrays of a batch that a call takes, in order."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        horizon: int,
        *,
        config: ModelConfig,
        rngs: nnx.Rngs,
    ):
        if not config.is_causal:
            raise expected("is_causal", "True for actions", False)
        width = config.embed_dim
        self.returns = Dense(1, width, rngs=rngs)
        self.states = Dense(check_size("state_dim", state_dim), width, rngs=rngs)
        self.actions = Dense(check_size("action_dim", action_dim), width, rngs=rngs)
        draw = nnx.initializers.normal(config.embed_std)
        shape = check_size("horizon", horizon), width
        self.times = nnx.Param(draw(rngs.params(), shape, jnp.float32))
        self.norm = LayerNorm(width)
        self.encoder = VectorEncoder(config, rngs=rngs)
        self.head = Dense(width, action_dim, rngs=rngs)

    def __call__(
        self,
        returns: jax.Array,
        states: jax.Array,
        actions: jax.Array,
        times: jax.Array,
        lengths: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """The actions of windows of episodes, float32 `[B, T, A]` in (-1, 1).

        Args:
          returns: `[B, T, 1]`, the return to be reached from each step on.
          states: `[B, T, S]`.
          actions: `[B, T, A]`; the last one has no effect.
          times: integers `[B, T]`, the steps before each; below ``horizon``.
          lengths: integers `[B]`, the real steps of each row, which is padded on the
            right; None = T.
          rngs: with a stream "dropout", for training; None for evaluation.
        """
        check_shape("times", times, "B T", None, None)
        batch, steps = times.shape
        parts = {"returns": returns, "states": states, "actions": actions}
        tokens = jnp.stack([self._token(*part, times) for part in parts.items()], 2)
        mask = None
        if lengths is not None:
            mask = jnp.arange(3 * steps)[None] < 3 * lengths[:, None]
        tokens = tokens.reshape(batch, 3 * steps, -1)
        return self._read(self.encoder.encode(tokens, mask, rngs)[:, 1::3])

    def step(
        self,
        returns: jax.Array,
        states: jax.Array,
        actions: jax.Array,
        times: jax.Array,
        past: list[Any] | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """The next actions `[B, A]`: as a call on the whole past, but by a stream.

        Args:
          returns, states, times: as in a call, without the axis T.
          actions: `[B, A]`, those of the step before; at the first step ignored.
          past: what the last call returned; None at the first step.

        Returns:
          The actions, and the past to pass on: arrays whose size does not depend on the
          time, unless the mechanism keeps every key, as softmax does.

        Raises:
          ValueError: the mechanism has no stream.
        """
        parts = [("returns", returns, times), ("states", states, times)]
        if past is not None:
            parts = [("actions", actions, times - 1), *parts]
        tokens = jnp.stack([self._token(*part) for part in parts], 1)
        encoded, past = prefill_blocks(self.encoder, tokens, states=past)
        return self._read(encoded[:, -1]), past

    def _token(self, name: str, values: jax.Array, times: jax.Array) -> jax.Array:
        """One of the three tokens of each step, `[B, T, D]` or `[B, D]`."""
        layer: Dense = getattr(self, name)
        axes = "B T C" if times.ndim == 2 else "B C"
        check_shape(name, values, axes, *times.shape, layer.in_features)
        # NaN beyond the longest episode.
        rows = take_rows(self.times[...], times)
        tokens = self.norm(layer(values.astype(jnp.float32)) + rows)
        return tokens.astype(self.encoder.config.dtype or jnp.float32)

    def _read(self, encoded: jax.Array) -> jax.Array:
        return jnp.tanh(self.head(encoded.astype(jnp.float32)))
