"""Models and objectives from which tasks are assembled."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lra_jax.configs import Config
from lra_jax.data.dataset import SequenceDataset
from lra_jax.models import (
    AutoEncoder,
    MatchingClassifier,
    SequenceClassifier,
    TokenClassifier,
)
from lra_jax.tasks.encoder import encoder_config

Model = TypeVar(
    "Model", SequenceClassifier, MatchingClassifier, TokenClassifier, AutoEncoder
)
Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


def classification_loss(
    model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None
) -> Sums:
    """Cross-entropy and accuracy of a classifier, summed over the batch.

    Each label counts once: that of a sequence, of a pair, or of a single position.

    Args:
      model: ``(*inputs, rngs) -> logits``, `[B, classes]` or `[B, K, classes]`; its
        ``INPUTS`` name the arrays of the batch that it takes.
      batch: these arrays, labels `[B]` or `[B, K]`, -1 where a row has fewer than K,
        and weights `[B]` if some rows are filler; without weights every row counts
        once. For packed rows, as made by `lra_jax.data.packing`, tokens and segment_ids
        `[B, T]`, and labels `[B, K]` of its documents.
      rngs: dropout stream, for training.
    """
    classifier: Any = model
    labels = batch["labels"]
    if "segment_ids" in batch:
        packed = {"segment_ids": batch["segment_ids"], "documents": labels.shape[1]}
        logits = classifier(batch["tokens"], None, rngs, **packed)
    else:
        inputs = (batch[name] for name in classifier.INPUTS)
        logits = classifier(*inputs, rngs)
    return summed(logits, labels, batch)


def summed(logits: jax.Array, labels: jax.Array, batch: Batch) -> Sums:
    """Cross-entropy and accuracy over labels >= 0, in the rows that count."""
    weights = (labels >= 0).astype(jnp.float32)
    if "weights" in batch:
        rows = batch["weights"]
        weights = weights * rows.reshape(-1, *(1,) * (labels.ndim - 1))
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, jnp.maximum(labels, 0)
    )
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
    return _make(SequenceClassifier, config, dataset, rngs, **_pooling(config))


def make_token_classifier(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> TokenClassifier:
    """The classifier of single positions that a config describes."""
    return _make(TokenClassifier, config, dataset, rngs)


def make_auto_encoder(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> AutoEncoder:
    """The model that a config describes, from one vector to all positions."""
    return _make(AutoEncoder, config, dataset, rngs)


def make_matcher(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> MatchingClassifier:
    """The classifier of pairs that a config describes."""
    interaction = config.model.interaction
    settings = {"interaction": interaction, **_pooling(config)}
    return _make(MatchingClassifier, config, dataset, rngs, **settings)


def _pooling(config: Config) -> dict[str, Any]:
    return {"pooling": config.model.pooling, "padding": config.model.padding}


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
        config=encoder_config(config, dataset.image_shape),
        **settings,
        rngs=rngs,
    )
