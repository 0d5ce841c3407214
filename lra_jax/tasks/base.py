"""Models and objectives from which tasks are assembled."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lra_jax.attention import registry
from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import Config, ModelConfig
from lra_jax.data.dataset import SequenceDataset
from lra_jax.errors import known
from lra_jax.models import (
    AutoEncoder,
    CausalLM,
    MaskedLM,
    MatchingClassifier,
    SequenceClassifier,
    TokenClassifier,
)

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


def classification_loss(
    model: nnx.Module,
    batch: Batch,
    rngs: nnx.Rngs | None = None,
    label_smoothing: float = 0.0,
) -> Sums:
    """Cross-entropy and accuracy of a classifier, summed over the batch.

    Each label counts once: that of a sequence, of a pair, or of a single position.

    Args:
      model: ``(*inputs, rngs) -> logits``, `[B, classes]` or `[B, K, classes]`; its
        ``INPUTS`` name the arrays of the batch that it takes.
      batch: these arrays, labels `[B]` or `[B, K]`, -1 where a row has fewer than K,
        and weights `[B]` if some rows are filler; without weights every row counts
        once. For packed rows, as made by `lra_jax.data.packing`, tokens and segment_ids
        `[B, T]`, and labels `[B, K]` of its documents. For mixtures of two images, see
        `lra_jax.training.mixing`, also other_labels `[B]` and the share of the first.
      rngs: dropout stream, for training.
      label_smoothing: see `sum_losses`.
    """
    logits = _logits(model, batch, rngs)
    sums = sum_losses(logits, batch["labels"], batch, label_smoothing)
    if "other_labels" not in batch:
        return sums
    other = sum_losses(logits, batch["other_labels"], batch, label_smoothing)
    share = batch["share"]
    return sums | {"loss": share * sums["loss"] + (1 - share) * other["loss"]}


def supervised_loss(
    model: nnx.Module,
    batch: Batch,
    rngs: nnx.Rngs | None = None,
    label_smoothing: float = 0.0,
) -> Sums:
    """The loss for the labels of a batch: `regression_loss` of floats,
    `multi_label_loss` of labels with an axis of classes, else `classification_loss`."""
    labels = batch["labels"]
    if labels.dtype.kind == "f":
        return regression_loss(model, batch, rngs)
    has_classes = labels.ndim == 2 + ("segment_ids" in batch)
    loss = multi_label_loss if has_classes else classification_loss
    return loss(model, batch, rngs, label_smoothing)


def multi_label_loss(
    model: nnx.Module,
    batch: Batch,
    rngs: nnx.Rngs | None = None,
    label_smoothing: float = 0.0,
) -> Sums:
    """Binary cross-entropy and accuracy, means over the classes, summed over examples.

    Args:
      model, batch, rngs: as in `classification_loss`; labels are 0 and 1 `[B, classes]`
        or, of packed rows, `[B, K, classes]`, -1 where a row has fewer than K.
      label_smoothing: a, for the targets ``1 - a / 2`` and ``a / 2``.

    Returns:
      Also counts for each class, `[classes]`: ``hits``, the examples of it that were
      recognised; ``claims``, those predicted to be of it; ``members``, those that are.
    """
    labels, logits = batch["labels"], _logits(model, batch, rngs)
    weights = weigh(labels[..., 0] >= 0, batch)
    is_member = (labels > 0).astype(logits.dtype)
    targets = is_member * (1 - label_smoothing) + label_smoothing / 2
    losses = optax.losses.sigmoid_binary_cross_entropy(logits, targets).mean(-1)
    is_claimed = (logits > 0).astype(logits.dtype)
    correct = (is_claimed == is_member).astype(jnp.float32).mean(-1)

    def count(marks: jax.Array) -> jax.Array:
        return (marks * weights[..., None]).reshape(-1, marks.shape[-1]).sum(0)

    return add_up(losses, correct, weights) | {
        "hits": count(is_claimed * is_member),
        "claims": count(is_claimed),
        "members": count(is_member),
    }


def regression_loss(
    model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None
) -> Sums:
    """Squared error of a model of one logit, summed over the batch; no accuracy.

    Args:
      model, batch, rngs: as in `classification_loss`; labels are float32, NaN where a
        row has fewer than K.
    """
    labels, predicted = batch["labels"], _logits(model, batch, rngs)[..., 0]
    weights = weigh(~jnp.isnan(labels), batch)
    errors = predicted - jnp.where(jnp.isnan(labels), predicted, labels)
    return add_up(errors**2, jnp.zeros(()), weights)


def regression_scores(
    dataset: SequenceDataset, split: str, loss: float, _: Any
) -> dict[str, float]:
    """R2, the share of a split's variance that predictions explain, if labels are
    numbers, and the squared error in their units; ``loss`` is the mean squared error.

    The training split's variance takes the place of that of equal labels, 0.
    """
    if not dataset.has_numbers:
        return {}
    labels, (_, deviation) = dataset.labels(split), dataset.scale
    variance = float(np.nanvar(labels, dtype=np.float64)) or 1.0
    return {"squared_error": loss * deviation**2, "r2": 1 - loss / variance}


def _logits(model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None) -> jax.Array:
    classifier: Any = model
    if "segment_ids" in batch:
        documents = batch["labels"].shape[1]
        packed = {"segment_ids": batch["segment_ids"], "documents": documents}
        return classifier(batch["tokens"], None, rngs, **packed)
    return classifier(*(batch[name] for name in classifier.INPUTS), rngs)


def weigh(is_label: jax.Array, batch: Batch) -> jax.Array:
    """1 for each label in a row that counts, else 0."""
    weights = is_label.astype(jnp.float32)
    if "weights" in batch:
        rows = batch["weights"]
        weights = weights * rows.reshape(-1, *(1,) * (is_label.ndim - 1))
    return weights


def sum_losses(
    logits: jax.Array, labels: jax.Array, batch: Batch, label_smoothing: float = 0.0
) -> Sums:
    """Cross-entropy and accuracy over labels >= 0, in the rows that count.

    With label smoothing a, the target of a label among C classes is ``1 - a + a / C``
    for its own class and ``a / C`` for any other.
    """
    weights = weigh(labels >= 0, batch)
    if label_smoothing:
        classes = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        targets = optax.smooth_labels(classes, label_smoothing)
        losses = optax.losses.softmax_cross_entropy(logits, targets)
    else:
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, jnp.maximum(labels, 0)
        )
    correct = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    return add_up(losses, correct, weights)


def add_up(losses: jax.Array, correct: jax.Array, weights: jax.Array) -> Sums:
    return {
        "loss": jnp.sum(losses * weights),
        "correct": jnp.sum(correct * weights),
        "count": jnp.sum(weights),
    }


def encoder_config(
    config: Config, image_shape: tuple[int, int] | None = None, channels: int = 1
) -> ModelConfig:
    """The encoder of a run; for images, of this shape and with this many values per
    pixel.

    Raises:
      ValueError: see `ModelConfig.check`.
    """
    split = config.train.seq_devices > 1
    main = registry.resolve(config.attention, "--attention")
    mechanism: Any = sequence_parallel(main) if split else config.attention
    hybrid = [
        mechanism
        if name == config.attention or registry.MECHANISMS.get(name) == main
        else _other(name, split)
        for name in config.model.hybrid_names
    ]
    encoder = dataclasses.replace(
        config.model,
        mechanism=mechanism,
        hybrid=hybrid,
        max_length=config.max_length,
        grid=image_shape,
        channels=channels,
        reconstructs=config.pretrain.steps > 0,
        remat=config.train.remat,
        dtype=jnp.dtype(config.train.dtype),
    )
    encoder.check()
    return encoder


def _other(name: str, split: bool) -> str | registry.Mechanism:
    """A hybrid's other mechanism; only a name, so that no other code is imported."""
    known("--model.hybrid", name, registry.MECHANISMS)
    return sequence_parallel(name) if split else name


def make_model(
    kind: Callable[..., Any],
    config: Config,
    dataset: SequenceDataset,
    rngs: nnx.Rngs,
    **sizes: int,
) -> Any:
    """A model that a config describes, for a dataset's vocabulary and images."""
    shape = dataset.image_shape
    channels = dataset.token_shape[0] if shape and dataset.token_shape else 1
    encoder = encoder_config(config, shape, channels)
    return kind(dataset.vocab_size, **sizes, config=encoder, rngs=rngs)


def _make_scorer(
    kind: Callable[..., Any],
    config: Config,
    dataset: SequenceDataset,
    rngs: nnx.Rngs,
) -> Any:
    sizes = {"num_classes": dataset.num_classes}
    return make_model(kind, config, dataset, rngs, **sizes)


make_classifier = functools.partial(_make_scorer, SequenceClassifier)
make_matcher = functools.partial(_make_scorer, MatchingClassifier)
make_token_classifier = functools.partial(_make_scorer, TokenClassifier)
make_auto_encoder = functools.partial(_make_scorer, AutoEncoder)
make_causal = functools.partial(make_model, CausalLM)
make_masked = functools.partial(make_model, MaskedLM)
