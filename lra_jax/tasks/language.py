"""Models, objectives and scores of the language tasks."""

import math
from typing import Any

from flax import nnx

from lra_jax.configs import Config
from lra_jax.data.dataset import SequenceDataset
from lra_jax.models import CausalLM
from lra_jax.tasks.base import Batch, Sums, summed
from lra_jax.tasks.encoder import encoder_config


def make_causal(config: Config, dataset: SequenceDataset, rngs: nnx.Rngs) -> CausalLM:
    """The decoder that a config describes, for a dataset's vocabulary."""
    return CausalLM(dataset.vocab_size, config=encoder_config(config), rngs=rngs)


def next_token_loss(
    model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None
) -> Sums:
    """Cross-entropy and accuracy of the next tokens, each of which counts once.

    Args:
      model: a `CausalLM`.
      batch: tokens, segment_ids and labels `[B, T]`, -1 where nothing is asked for, and
        weights `[B]` where some rows are fill.
      rngs: dropout stream, to train.
    """
    ids = batch["segment_ids"]
    logits = model(batch["tokens"], None, None, rngs, segment_ids=ids)
    return summed(logits, batch["labels"], batch)


def next_token_scores(dataset: Any, split: str, loss: float) -> dict[str, float]:
    """Perplexity, and bits for each byte of the text.

    Args:
      dataset: a `lra_jax.data.language.rows.TextDataset`.
      split: what was scored.
      loss: its mean, in nats a token.
    """
    bits = loss * dataset.num_targets(split) / math.log(2)
    return {
        "perplexity": math.exp(loss),
        "bits_per_byte": bits / dataset.num_bytes[split],
    }
