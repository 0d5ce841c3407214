"""Where a trained model looks: attention matrices of one example, and what each token
receives; for Flow-Attention also competition and allocation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lra_jax.analysis.capture import capture
from lra_jax.attention.flow.flow import flow_terms


class Maps(NamedTuple):
    """The attention of one layer on one example, without padding.

    Attributes:
      layer: counted from 1.
      weights: `[N, T, T]`, with the class vector first if the model has one.
      received: `[N, T]`, how much each token is attended to, in units of an even share:
        the row of the class vector, or the mean over all rows, in absolute values,
        divided by its mean. In a causal model a token is also divided by what it would
        receive if every token attended evenly to all that it sees, of which the first
        tokens get most. The class vector itself is left out.
      tokens: `[T]`, ids, bytes or pixels.
      competition, allocation: of Flow-Attention, `[N, T]`; None for other mechanisms.
      label, prediction: classes; None if there is one per position.
    """

    layer: int
    weights: np.ndarray
    received: np.ndarray
    tokens: np.ndarray
    competition: np.ndarray | None
    allocation: np.ndarray | None
    label: int | None = None
    prediction: int | None = None


def shortest(lengths: np.ndarray) -> int:
    """The shortest example of a split, by its lengths `[n]`, or `[n, 2]` of pairs, of
    which the maps show the first document."""
    return int(lengths.reshape(len(lengths), -1)[:, 0].argmin())


def example_maps(saved: Any, batch: Any, layer: int) -> Maps:
    """The maps of the first example of a batch.

    Args:
      saved: a `lra_jax.training.restore.SavedRun`.
      batch: of its examples.
      layer: counted from 1.

    Raises:
      ValueError: there is no such layer, or its mechanism has no matrix.
    """
    captured = capture(saved.model, lambda: saved.run(batch))
    call = captured.call(layer)
    matrix = call.weights()[0].astype(np.float64)
    name = saved.dataset.sequences[0]
    length = _length(batch, name)
    tokens = batch[name][0, :length]
    config = saved.model.encoder.config
    # A class vector comes before the tokens, and each position may be a patch of them.
    front, end = int(config.cls_token), config.num_positions(length)
    weights = matrix[:, :end, :end]
    size = np.abs(weights[:, 0] if front else weights.mean(1))[:, front:]
    mean = size.mean(-1, keepdims=True)
    received = size / np.where(mean == 0, 1, mean)
    if config.is_causal:
        received = received / _even(captured.documents[0, front:end])
    competition = allocation = None
    if call.mechanism.name == "flow":
        terms = flow_terms(call.query, call.key, **call.keywords)
        seen = slice(front, end)
        competition = np.asarray(terms.competition)[0, seen].T
        allocation = np.asarray(terms.allocation)[0, seen].T
    label = guess = None
    if batch["labels"].ndim == 1:
        label = int(batch["labels"][0])
        arrays = (jnp.asarray(batch[name]) for name in saved.model.INPUTS)
        guess = int(saved.model(*arrays)[0].argmax())
    return Maps(layer, weights, received, tokens, competition, allocation, label, guess)


def _even(documents: np.ndarray) -> np.ndarray:
    """The shares `[T]`, on average 1, that the tokens of a causal model would receive
    if each attended evenly to those of its document that it sees."""
    seen = np.tril(documents[:, None] == documents[None])
    received = (seen / seen.sum(1, keepdims=True)).mean(0)
    return received / received.mean()


def _length(batch: Any, name: str) -> int:
    """The number of real tokens of the first example, or of all texts in its row."""
    if "segment_ids" in batch:
        return int((batch["segment_ids"][0] > 0).sum())
    return int(batch[name.replace("tokens", "lengths", 1)][0])
