"""Models and objectives that tasks are put together from."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lra_jax.configs import Config
from lra_jax.data.dataset import SequenceDataset
from lra_jax.models import MatchingClassifier, SequenceClassifier
from lra_jax.tasks.encoder import encoder_config

Model = TypeVar("Model", SequenceClassifier, MatchingClassifier)
Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


def classification_loss(
    model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None
) -> Sums:
    """Cross-entropy and accuracy of a sequence classifier, summed over the batch.

    Args:
      model: ``(tokens, lengths, rngs) -> logits [B, classes]``.
      batch: tokens `[B, T]`, lengths `[B]`, labels `[B]`, and weights `[B]` where some
        rows are fill; without weights every row counts once.
      rngs: dropout stream, to train.
    """
    return _cross_entropy(model(batch["tokens"], batch["lengths"], rngs), batch)


def matching_loss(
    model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None
) -> Sums:
    """The same for pairs: tokens_1, lengths_1, tokens_2, lengths_2 in the batch."""
    names = ("tokens_1", "lengths_1", "tokens_2", "lengths_2")
    return _cross_entropy(model(*(batch[name] for name in names), rngs), batch)


def _cross_entropy(logits: jax.Array, batch: Batch) -> Sums:
    labels = batch["labels"]
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    weights = batch.get("weights")
    weights = jnp.ones_like(losses) if weights is None else weights
    correct = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    return {
        "loss": jnp.sum(losses * weights),
        "correct": jnp.sum(correct * weights),
        "count": jnp.sum(weights),
    }


def make_classifier(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> SequenceClassifier:
    """The encoder and head that a config describes, for a dataset's vocabulary."""
    return _make(SequenceClassifier, config, dataset, rngs)


def make_matcher(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> MatchingClassifier:
    """The classifier of pairs that a config describes."""
    interaction = config.model.interaction
    return _make(MatchingClassifier, config, dataset, rngs, interaction=interaction)


def _make(
    kind: type[Model],
    config: Config,
    dataset: SequenceDataset,
    rngs: nnx.Rngs,
    **settings: Any,
) -> Model:
    return kind(
        dataset.vocab_size,
        dataset.num_classes,
        pooling=config.model.pooling,
        padding=config.model.padding,
        config=encoder_config(config, dataset.image_shape),
        **settings,
        rngs=rngs,
    )
