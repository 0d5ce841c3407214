"""Models, objectives and scores of the language tasks."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax import vocabularies
from lra_jax.configs import Config, ModelConfig
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.labels import Kind
from lra_jax.data.language import labelled
from lra_jax.errors import InputError, expected, rename, within
from lra_jax.models import MaskedLM, SequenceClassifier, load
from lra_jax.models.config import parse_options
from lra_jax.models.saved import read_description
from lra_jax.tasks.base import (
    Batch,
    Sums,
    encoder_config,
    make_classifier,
    sum_losses,
)

# As in BERT and RoBERTa: the share of tokens to predict, and how they are masked.
_ASKED = 0.15
_MASKED, _RANDOM = 0.8, 0.1
# Above this vocabulary size, not all logits are kept at once.
_LARGE = 16_384


def next_token_loss(
    model: nnx.Module,
    batch: Batch,
    rngs: nnx.Rngs | None = None,
    label_smoothing: float = 0.0,
) -> Sums:
    """Cross-entropy and accuracy of the next tokens, each counted once.

    Args:
      model: a `CausalLM`.
      batch: tokens, segment_ids and labels `[B, T]`, -1 where there is no target, and
        weights `[B]` if some rows are filler.
      rngs: dropout stream, for training.
      label_smoothing: see `sum_losses`.
    """
    lm: Any = model
    x = lm.read(batch["tokens"], rngs=rngs, segment_ids=batch["segment_ids"])
    return _sums(lm, x, batch["labels"], batch, label_smoothing)


def _sums(
    model: Any, x: jax.Array, labels: jax.Array, batch: Batch, label_smoothing: float
) -> Sums:
    """Loss and accuracy of features `[B, K, D]` for labels `[B, K]`.

    With a large vocabulary, logits exist for as many positions at a time as a row has,
    or as there are rows if these are more, in the gradient too.
    """
    if model.encoder.vocab_size <= _LARGE:
        return sum_losses(model.compute_logits(x), labels, batch, label_smoothing)

    @jax.checkpoint
    def part(rows: tuple[jax.Array, jax.Array]) -> Sums:
        x, labels = rows
        return sum_losses(model.compute_logits(x), labels, batch, label_smoothing)

    # Some positions of each row, because a loop over the rows would gather those of all
    # devices on each.
    parts = min(x.shape[:2])
    missing = -x.shape[1] % parts
    x = jnp.pad(x, [(0, 0), (0, missing), (0, 0)])
    labels = jnp.pad(labels, [(0, 0), (0, missing)], constant_values=-1)
    cut = (
        jnp.moveaxis(a.reshape(len(a), -1, parts, *a.shape[2:]), 2, 0)
        for a in (x, labels)
    )
    return {name: y.sum() for name, y in jax.lax.map(part, tuple(cut)).items()}


def next_token_scores(
    dataset: Any, split: str, loss: float, _: Any
) -> dict[str, float]:
    """Perplexity, and bits per byte of the text.

    Words have no bits per byte: unknown words and white space would count as bytes that
    cost nothing.

    Args:
      dataset: a `lra_jax.data.language.rows.TextDataset`.
      split: the split that was scored.
      loss: its mean loss, in nats per token.
    """
    scores = _perplexity(loss)
    if dataset.raw.get("vocabulary", dataset.raw)["kind"] != "words":
        bits = loss * dataset.num_targets(split) / math.log(2)
        scores["bits_per_byte"] = bits / dataset.num_bytes[split]
    return scores


def hidden_token_loss(
    model: nnx.Module,
    batch: Batch,
    rngs: nnx.Rngs | None = None,
    label_smoothing: float = 0.0,
) -> Sums:
    """Cross-entropy and accuracy of masked tokens, each counted once.

    15 % of the tokens in each row are to be predicted; 80 % of these are replaced by
    the mask token and 10 % by a random token. Training draws them afresh in every step,
    from the dropout stream; in an evaluation, those of a row depend on its tokens.
    Unlike in RoBERTa, ends of documents can be masked too.

    Args:
      model: a `MaskedLM`.
      batch: tokens and segment_ids `[B, T]`, and weights `[B]` if some rows are
        filler.
      rngs: dropout stream, for training.
      label_smoothing: see `sum_losses`.
    """
    lm: Any = model
    tokens, ids = batch["tokens"].astype(jnp.int32), batch["segment_ids"]
    masked = functools.partial(hide, vocab_size=lm.encoder.vocab_size)
    if rngs is None:
        sums = tokens.sum(1, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), sums)
        rows = jax.vmap(masked)(keys, tokens[:, None], ids[:, None] > 0)
        hidden, places, labels = (x[:, 0] for x in rows)
    else:
        hidden, places, labels = masked(rngs.dropout(), tokens, ids > 0)
    x = lm.read(hidden, None, places, rngs, segment_ids=ids)
    return _sums(lm, x, labels, batch, label_smoothing)


def hide(
    key: jax.Array, tokens: jax.Array, real: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Masks some tokens.

    Args:
      key: for the random choices.
      tokens: int32 `[B, T]`.
      real: boolean `[B, T]`, False at padding.
      vocab_size: random tokens are below this, and its last token is the mask.

    Returns:
      The tokens with some of them masked, `[B, T]`; the positions to predict,
      `[B, K]`; and the original tokens there, -1 where a row has fewer than K.
    """
    where, how, random = jax.random.split(key, 3)
    most = max(1, round(_ASKED * tokens.shape[1]))
    order = jnp.where(real, jax.random.uniform(where, tokens.shape), -1.0)
    _, places = jax.lax.top_k(order, most)
    count = jnp.round(_ASKED * real.sum(1, keepdims=True).astype(jnp.float32))
    least = real.any(1, keepdims=True).astype(jnp.float32)
    is_asked = jnp.arange(most, dtype=jnp.float32)[None] < jnp.maximum(count, least)
    known = jnp.take_along_axis(tokens, places, 1)
    draw = jax.random.uniform(how, places.shape)
    others = jax.random.randint(random, places.shape, 0, vocab_size)
    shown = jnp.where(draw < _MASKED + _RANDOM, others, known)
    shown = jnp.where(draw < _MASKED, vocab_size - 1, shown)
    shown = jnp.where(is_asked, shown, known)
    hidden = jnp.put_along_axis(tokens, places, shown, 1, inplace=False)
    return hidden, places, jnp.where(is_asked, known, -1)


def hidden_token_scores(_: Any, __: str, loss: float, ___: Any) -> dict[str, float]:
    """The perplexity of masked tokens."""
    return _perplexity(loss)


def _perplexity(loss: float) -> dict[str, float]:
    """The exponential of a loss; left out where it is infinite, which JSON cannot hold:
    a finite loss of thousands may still fall."""
    try:
        return {"perplexity": math.exp(loss)}
    except OverflowError:
        return {}


def prepare_texts(
    data_dir: str | None = None,
    *,
    checkpoint: str | None,
    path: str | None,
    seed: int,
    max_length: int,
    labels: Kind,
) -> SequenceDataset:
    """Labelled texts, tokenised as for the checkpoint; as bytes if there is none.

    See `lra_jax.data.language.labelled.prepare`.

    Raises:
      ValueError: the checkpoint is not of a language model, or an error of `prepare`.
    """
    vocabulary = None
    if checkpoint is not None:
        with _of_checkpoint():
            file = read_description(checkpoint)
        _check_masked(file.kind)
        with _of_checkpoint():
            vocabulary = vocabularies.from_raw(file.raw)
    return labelled.prepare(
        data_dir,
        path=path,
        seed=seed,
        max_length=max_length,
        vocabulary=vocabulary,
        labels=labels,
    )


def make_finetuned(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> SequenceClassifier:
    """A classifier whose encoder comes from a masked language model.

    Raises:
      ValueError: the checkpoint is not of such a model, or has another attention,
        vocabulary or sizes.
    """
    data: Any = config.data
    if data.checkpoint is None:
        return make_classifier(config, dataset, rngs)
    with _of_checkpoint():
        # Only the settings of this run may name code, and never that of the folder.
        named = ":" in config.attention or bool(config.model.own_parts)
        saved = load(read_description(data.checkpoint).arrays, allow_code=named)
    _check_masked(type(saved.model).__name__)
    size = saved.model.encoder.vocab_size
    if size < dataset.vocab_size:
        needed = f"a vocabulary of at least {dataset.vocab_size} tokens"
        raise expected("--data.checkpoint", needed, size)
    encoder = encoder_config(config)
    # Split sequences are computed by another function, with the same results.
    _check_same(config.replace(train={"seq_devices": 1}), saved.config)
    model = SequenceClassifier(
        size,
        dataset.num_classes,
        config=encoder,
        rngs=rngs,
    )
    nnx.update(model.encoder, nnx.state(saved.model.encoder))
    return model


@contextlib.contextmanager
def _of_checkpoint() -> Iterator[None]:
    """Context whose errors about a file name the flag that gave it."""
    try:
        yield
    except InputError as error:
        flag = "--data.checkpoint"
        same = error.name == "run"
        raise (rename(error, flag) if same else within(flag, error)) from error


def _check_masked(kind: str) -> None:
    """Refuses a checkpoint of another kind of model."""
    if kind != MaskedLM.__name__:
        got = f"one of a {kind}"
        raise expected("--data.checkpoint", "a checkpoint of --task=mlm", got)


_FREE = ("dropout", "input_dropout", "mlp_dropout", "remat", "dtype", "reconstructs")
_OF_HEAD = ("padding", "interaction", "pooling")
"""Settings of a model that the arrays of its encoder do not depend on."""


def _check_same(config: Config, saved: ModelConfig) -> None:
    """Refuses an encoder unlike the checkpoint's.

    A vector for masked tokens is an addition to the checkpoint's arrays.
    """
    encoder = encoder_config(config)
    if encoder.cls_token:
        needed = "that of a checkpoint without a class vector"
        raise expected("--model.pooling", needed, "cls")
    for field in dataclasses.fields(encoder):
        needed, got = (_as_flag(one, field.name) for one in (saved, encoder))
        if field.name not in (*_FREE, *_OF_HEAD) and needed != got:
            flag = config.flag(field.name)
            raise expected(flag, f"{needed}, of the checkpoint", got)


def _as_flag(config: ModelConfig, name: str) -> str:
    """A setting of an encoder as it is written on the command line."""
    value = getattr(config, name)
    if name in ("attention_options", "mlp_options"):
        value = tuple(sorted(f"{n}={x}" for n, x in parse_options(value).items()))
    if isinstance(value, tuple):
        value = ",".join(str(getattr(one, "name", one)) for one in value)
    return str(getattr(value, "name", value)) or "none"
