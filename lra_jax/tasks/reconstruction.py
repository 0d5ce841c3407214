"""Pretraining on a task's own training inputs.

Self-pretraining reconstructs masked tokens:

``loss = - sum_t h_t log softmax(W x_t)[token_t]`` over the masked tokens. h_t is 1
with a probability of the mask rate; the encoder, which computes x, sees a learned
vector in place of masked tokens. This needs no labels and no other data. Then the same
encoder learns the task.

Source: Amos, Berant and Gupta 2023, "Never Train from Scratch", arXiv:2310.02980, and
its code, IdoAmos/not-from-scratch: one vector replaces all masked tokens, the loss
counts only these, the head is linear. Their rate for the Image task is one half; for
the others it is a flag without a value in their files. Deviation: an image's pixels are
classes here, whatever form the input has.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lra_jax.errors import expected
from lra_jax.models.classifier import PooledEncoder
from lra_jax.models.layers import draw_mask
from lra_jax.tasks.base import Batch, Sums

# Folded into dropout's key of the step.
_STREAM = 1


def reconstruction_loss(
    model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None, *, mask_rate: float
) -> Sums:
    """Cross-entropy and accuracy of masked tokens, summed over the batch.

    Args:
      model: a classifier of sequences or pairs that ``reconstructs``.
      batch: as for the task's own objective; labels are not used.
      rngs: stream "dropout", also used to choose the masked tokens.
      mask_rate: the share of the real tokens that are masked.

    Raises:
      ValueError: a model that does not reconstruct.
    """
    if not isinstance(model, PooledEncoder) or rngs is None:
        got = f"{type(model).__name__}, rngs={rngs}"
        raise expected("model", "a classifier, and rngs to draw masked tokens", got)
    key = jax.random.fold_in(rngs.dropout(), _STREAM)
    names = [name for name in batch if name.startswith("tokens")]
    sums = [
        _sums(model, batch, name, jax.random.fold_in(key, index), rngs, mask_rate)
        for index, name in enumerate(names)
    ]
    return jax.tree.map(lambda *parts: sum(parts, jnp.zeros(())), *sums)


def _sums(
    model: PooledEncoder,
    batch: Batch,
    name: str,
    key: jax.Array,
    rngs: nnx.Rngs,
    mask_rate: float,
) -> Sums:
    """The sums for one of the sequences of an example."""
    tokens = batch[name].astype(jnp.int32)
    segment_ids = batch.get("segment_ids")
    lengths = None
    if segment_ids is None:
        lengths = batch[name.replace("tokens", "lengths", 1)]
    real = model.real(tokens, lengths) if segment_ids is None else segment_ids > 0
    hidden = draw_mask(key, mask_rate, tokens.shape) & real
    logits = model.reconstruct(tokens, lengths, hidden, rngs, segment_ids=segment_ids)
    counted = hidden.astype(jnp.float32)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens)
    correct = (jnp.argmax(logits, -1) == tokens).astype(jnp.float32)
    return {
        "loss": jnp.sum(losses * counted),
        "correct": jnp.sum(correct * counted),
        # By chance a batch may hide nothing; then its loss is 0.
        "count": jnp.maximum(jnp.sum(counted), 1e-6),
    }
