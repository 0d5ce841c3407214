"""Models and objectives that tasks are put together from."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import Config
from lra_jax.data.dataset import SequenceDataset
from lra_jax.models import EncoderConfig, MatchingClassifier, SequenceClassifier
from lra_jax.tasks.checks import parse_options

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
    return SequenceClassifier(
        dataset.vocab_size,
        dataset.num_classes,
        pooling=config.model.pooling,
        padding=config.model.padding,
        config=encoder_config(config, dataset.image_shape),
        rngs=rngs,
    )


def make_matcher(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> MatchingClassifier:
    """The classifier of pairs that a config describes."""
    return MatchingClassifier(
        dataset.vocab_size,
        dataset.num_classes,
        interaction=config.model.interaction,
        pooling=config.model.pooling,
        padding=config.model.padding,
        config=encoder_config(config, dataset.image_shape),
        rngs=rngs,
    )


def encoder_config(
    config: Config, image_shape: tuple[int, int] | None = None
) -> EncoderConfig:
    """The encoder that a config describes, for images of this shape if they are any."""
    model = config.model
    return EncoderConfig(
        num_layers=model.num_layers,
        embed_dim=model.embed_dim,
        num_heads=model.num_heads,
        qkv_features=model.qkv_dim,
        mlp_dim=model.mlp_dim,
        mlp=model.mlp,
        mlp_options=parse_options(model.mlp_options, "mlp_options"),
        max_length=model.max_length,
        mechanism=_mechanism(config),
        options=parse_options(model.attention_options),
        inputs=model.inputs,
        positions=model.positions,
        grid=image_shape,
        embed_std=model.embed_std,
        dropout=model.dropout,
        remat=config.train.remat,
        qkv_bias=model.qkv_bias,
        dtype=jnp.dtype(config.train.dtype),
    )


def _mechanism(config: Config) -> Any:
    if config.train.seq_devices == 1:
        return config.attention
    return sequence_parallel(config.attention)
