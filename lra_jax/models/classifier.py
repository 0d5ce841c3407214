"""Classification of whole sequences: masks, encoder, pooling, and a head.

How padding is determined:
  lengths  positions beyond a sequence's length. Exact: in a padded batch each sequence
           gets the result that it would get alone.
  zeros    the rule of the Long-Range Arena's code, for comparison: every token of id 0
           is padding to the attention, wherever it is, so that an image's black pixels
           vanish (two thirds of Pathfinder), along with a class vector if the first
           one is black. The mean is over all T positions; "attention" and "ends" use
           the real ones only. A patch is padding if all its pixels are.
           Deviation: here a masked query attends to the real keys; in that code it
           gets the mean of all values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import packed
from lra_jax.attention.feature_maps import masked_softmax
from lra_jax.attention.inputs import check_size
from lra_jax.attention.masking import both, next_position
from lra_jax.errors import expected
from lra_jax.models.config import ModelConfig
from lra_jax.models.encoder import TransformerEncoder
from lra_jax.models.inputs import known_values, length_mask
from lra_jax.models.layers import Dense, Dropout, LayerNorm, rows_at
from lra_jax.models.padding import order_real_first, reorder
from lra_jax.models.patches import any_real

# For attention pooling.
_QUERIES = 4


class PooledEncoder(nnx.Module):
    """The base of the classifiers: an encoder that yields one vector per sequence.

    The setting ``pooling`` is "mean" over the real tokens; "cls", the row of a learned
    vector in front of them; "first", the row of the first token; "last", that of the
    last real one; "ends", the rows of the first and the last real token, concatenated;
    "attention", four means, concatenated, each weighted by the softmax over the real
    tokens of ``q . x / sqrt(D)`` with a learned q; "attention+ends", both; or
    "flatten", the GELU of all ``max_length`` rows, concatenated, 0 at padding.

    Args:
      vocab_size, rngs, **settings: see `TransformerEncoder`.

    Raises:
      ValueError: a pooling that does not depend on the input, or see `ModelConfig`.
    """

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs, **settings: Any):
        self.encoder = TransformerEncoder(vocab_size, rngs=rngs, **settings)
        config = self.encoder.config
        self.pooling, self.padding = config.pooling, config.padding
        pooling, reason = config.pooling, _why_constant(config)
        if reason:
            raise expected("pooling", f"another value with {reason}", f"{pooling!r}")
        self.last = config.at(config.num_layers - 1)  # The sizes of the last stage.
        width = self.last.embed_dim
        draw = nnx.initializers.normal(1.0)
        # One assignment: an attribute first set to None cannot become a parameter.
        self.queries = (
            nnx.Param(draw(rngs.params(), (_QUERIES, width), jnp.float32))
            if "attention" in pooling
            else None
        )
        # Reconstructs hidden tokens; the paper's head is also linear.
        self.tokens: Any = (
            Dense(width, vocab_size, rngs=rngs) if config.reconstructs else None
        )
        rows = {"attention": _QUERIES, "ends": 2, "flatten": self.last.length}
        self.pooled_features = width * sum(rows.get(x, 1) for x in pooling.split("+"))

    def pool(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        segment_ids: jax.Array | None = None,
        documents: int | None = None,
    ) -> jax.Array:
        """One float32 vector `[B, pooled_features]` for each row of tokens `[B, T]`.

        Args:
          tokens: integer `[B, T]`, pixels in colour or real vectors `[B, T, C]`.
          lengths: integer `[B]`; None = T for all.
          rngs: with a stream "dropout", for training; None for evaluation.
          segment_ids: integers `[B, T]`, see `TransformerEncoder`; the result then has
            a vector for each document of a row, in order,
            `[B, documents, pooled_features]`.
          documents: the maximum number in a row; in rows with fewer, the last vectors
            are meaningless.

        Raises:
          ValueError: tokens or lengths of another shape, lengths beyond T where they
            are known (not traced), sequences too long for the encoder, packed documents
            where they are not supported, or more of them than ``documents``, where ids
            are known.
        """
        mask = self._mask(tokens, lengths, segment_ids)
        if segment_ids is None:
            if documents is not None:
                raise expected("documents", "None without segment_ids", documents)
            encoded = self.encoder(tokens, mask, rngs, in_place=True)
            encoded = encoded.astype(jnp.float32)
            last: Any = self.last
            if mask is not None and last.patch > 1:
                mask = any_real(mask, last.grid, last.patch)
            return self._pool(encoded, mask, self._start(encoded, mask))
        label: Any = packed.documents(segment_ids, tokens, tokens)
        count = check_size("documents", documents)
        known = known_values(label.label)
        if known is not None and known.max(initial=0) > count:
            needed = f"at least {known.max()}, the most in a row"
            raise expected("documents", needed, count)
        encoded = self.encoder(tokens, mask, rngs, segment_ids, in_place=True)
        encoded = encoded.astype(jnp.float32)
        if self.pooling == "mean":  # One product; separate means would copy the rows.
            inside = label.label[:, None] == jnp.arange(1, count + 1)[None, :, None]
            inside = inside if mask is None else inside & mask[:, None]
            weights = inside.astype(jnp.float32)
            total = jnp.einsum("bkt,btd->bkd", weights, encoded, precision="highest")
            return total / jnp.maximum(weights.sum(-1), 1)[..., None]

        def one(number: jax.Array) -> jax.Array:
            inside, rows = label.label == number, encoded
            start = _row(rows, jnp.argmax(inside, 1))
            if self.pooling == "flatten":  # The document's rows come first.
                order, _ = order_real_first(inside)
                inside, rows = reorder(inside, order), reorder(rows, order)
            return self._pool(rows, both(inside, mask), start)

        return jax.vmap(one, out_axes=1)(jnp.arange(1, count + 1))

    def reconstruct(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None,
        hidden: jax.Array,
        rngs: nnx.Rngs | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits `[B, T, vocab_size]` of every token, where some are masked.

        Args:
          tokens, lengths, rngs, segment_ids: as in `pool`.
          hidden: boolean `[B, T]`, True at the tokens to reconstruct.

        Raises:
          ValueError: the model was made without ``reconstructs``.
        """
        mask = self._mask(tokens, lengths, segment_ids)
        encoded = self.encoder(tokens, mask, rngs, segment_ids, hidden, in_place=True)
        rows = encoded[:, int(self.pooling == "cls") :]  # Without the class vector.
        return self.tokens(rows.astype(jnp.float32))

    def _start(self, encoded: jax.Array, mask: jax.Array | None) -> jax.Array:
        """The first row, `[B, D]`; for "ends", that of the first real token, or the
        last row if none is real, as in a black image."""
        if mask is None or self.padding == "lengths" or "ends" not in self.pooling:
            return encoded[:, 0]
        length = mask.shape[1]
        places = jnp.where(mask, length - jnp.arange(length), 1)
        return _row(encoded, length - places.max(1))

    def _pool(
        self, encoded: jax.Array, real: jax.Array | None, start: jax.Array
    ) -> jax.Array:
        """`[B, T, D]` to `[B, pooled_features]`; ``start`` is the first row."""
        if self.pooling == "mean":
            return _mean(encoded, real if self.padding == "lengths" else None)
        if self.pooling in ("cls", "first"):
            return start
        if self.pooling == "last":
            return _last(encoded, real)
        if self.pooling == "flatten":
            return _flat(encoded, real, self.last.length)
        parts = []
        if self.queries is not None:
            parts.append(_attend(encoded, self.queries[...], real))
        if "ends" in self.pooling:
            parts += [start, _last(encoded, real)]
        return jnp.concatenate(parts, -1)

    def real(self, tokens: jax.Array, lengths: jax.Array | None) -> jax.Array:
        """Boolean `[B, T]`, True at the tokens that are not padding."""
        mask = self._mask(tokens, lengths)
        return jnp.ones(tokens.shape[:2], bool) if mask is None else mask

    def _mask(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array | None:
        """Boolean `[B, T]`, True where attention is allowed; None = everywhere."""
        if self.padding == "zeros" and segment_ids is not None:
            raise expected("segment_ids", "None with padding='zeros'", "an array")
        mask = length_mask(tokens, lengths)
        grid = self.encoder.config.grid
        if grid is not None and tokens.shape[1] == grid[0] * grid[1]:
            mask = None  # All images are of one size.
        if self.padding == "zeros":
            black = tokens.max(-1) if tokens.ndim == 3 else tokens
            mask = both(mask, black > 0)
        return mask


class SequenceClassifier(PooledEncoder):
    """Encoder, pooling, and a head of one hidden layer.

    ``logits = W2 ReLU(W1 pool(encoder(tokens)))``, the head of the LRA code; with
    pooling "flatten" ``W dropout(pool(encoder(tokens)))``, that of time series
    (Zerveas et al. 2021, arXiv:2010.02803); with head "linear" ``W norm(pool(x))``,
    that of image models, where x are the rows of an encoder without its last norm. One
    logit can also be a number to predict.

    The hidden layer is as wide as the last block's MLP. Pooling, head and logits are
    computed in float32, whatever the dtype.

    Args:
      vocab_size, rngs, **settings: see `TransformerEncoder`.
      num_classes: number of logits.

    Raises:
      ValueError: a number of classes below 1, or see `PooledEncoder`.

    Examples:
      >>> model = SequenceClassifier(
      ...     256, 10, mechanism="flow", num_layers=1, embed_dim=32, num_heads=2,
      ...     mlp_dim=64, max_length=512, rngs=nnx.Rngs(0),
      ... )
      >>> model(jnp.ones((2, 300), int), lengths=jnp.array([300, 120])).shape
      (2, 10)
    """

    INPUTS = ("tokens", "lengths")
    """The arrays of a batch that a call takes, in order."""

    def __init__(
        self, vocab_size: int, num_classes: int, *, rngs: nnx.Rngs, **settings: Any
    ):
        super().__init__(vocab_size, rngs=rngs, **settings)
        self.num_classes = check_size("num_classes", num_classes)
        config = self.encoder.config
        width, is_linear = self.pooled_features, config.head == "linear"
        one_layer, hidden = self.pooling == "flatten" or is_linear, self.last.mlp_dim
        self.hidden: Any = None if one_layer else Dense(width, hidden, rngs=rngs)
        self.norm: Any = LayerNorm(width) if is_linear else None
        if is_linear:
            self.encoder.norm = None
        width = width if one_layer else hidden
        self.logits = Dense(width, self.num_classes, rngs=rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        segment_ids: jax.Array | None = None,
        documents: int | None = None,
    ) -> jax.Array:
        """Scores a batch.

        Args:
          tokens: integer `[B, T]`, pixels in colour or real vectors `[B, T, C]`;
            anything beyond a sequence's length is ignored.
          lengths: integer `[B]`, number of tokens in each sequence; None = T for all.
            An image is always read in full.
          rngs: with a stream "dropout", for training; None for evaluation.
          segment_ids, documents: for rows of several packed documents, and the maximum
            number in a row; see `pool`.

        Returns:
          float32 logits `[B, num_classes]`, or `[B, documents, num_classes]`.

        Raises:
          ValueError: see `pool`.
        """
        pooled = self.pool(
            tokens, lengths, rngs, segment_ids=segment_ids, documents=documents
        )
        if self.norm is not None:
            pooled = self.norm(pooled)
        if self.hidden is None:
            return self.logits(self.dropout(pooled, rngs))
        return self.logits(jax.nn.relu(self.hidden(pooled)))


def is_of_task(path: tuple[Any, ...], variable: Any) -> bool:
    """An `nnx.filterlib` filter: the parameters of a `PooledEncoder` that labels train,
    all but those of the reconstruction.

    The gradients of these are zero, but AdamW would still change them.
    """
    return path[0] != "tokens" and path[:2] != ("encoder", "hidden")


def is_of_reconstruction(path: tuple[Any, ...], variable: Any) -> bool:
    """An `nnx.filterlib` filter: the parameters that pretraining trains, all but those
    of pooling and head."""
    return path[0] in ("encoder", "tokens")


def _why_constant(config: ModelConfig) -> str:
    """Why the pooled vectors do not depend on the input; "" if they do.

    Over the positions of a sequence, instance-normalised rows have a fixed mean, and
    rows of padding are all the same. An image often begins with black pixels, which
    ``padding="zeros"`` takes for padding.
    """
    pooling = config.pooling
    if config.is_causal and pooling == "first":
        return "is_causal, where the first token sees no other"
    if config.norm != "instance":
        return ""
    if pooling == "mean":
        return "norm='instance', after which every mean is the same"
    blank = config.grid is not None and config.padding == "zeros"
    if blank and pooling in ("cls", "first"):
        reason = "after which padding='zeros' gives a first black pixel a constant row"
        return f"norm='instance', {reason}"
    return ""


def _mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Mean of `[B, T, D]` over the real tokens; zero if there are none."""
    if mask is None:
        return x.mean(1)
    weights = mask.astype(x.dtype)
    # A product and a sum, not an einsum, whose gradient XLA lays out with T last.
    total = jnp.sum(x * weights[:, :, None], 1)
    return total / jnp.maximum(weights.sum(1), 1)[:, None]


def _attend(x: jax.Array, queries: jax.Array, mask: jax.Array | None) -> jax.Array:
    """``sum_t softmax_t(q . x_t / sqrt(D)) x_t`` for each query q: `[B, Q D]`."""
    scores = jnp.einsum("btd,qd->bqt", x, queries) / x.shape[-1] ** 0.5
    mask = None if mask is None else mask[:, None]
    weights = masked_softmax(scores, mask)
    return jnp.einsum("bqt,btd->bqd", weights, x).reshape(x.shape[0], -1)


def _flat(x: jax.Array, mask: jax.Array | None, length: int) -> jax.Array:
    """The GELU of all rows, and zeros at padding: `[B, T, D]` to `[B, length D]`."""
    x = jax.nn.gelu(x, approximate=False)
    x = x if mask is None else jnp.where(mask[:, :, None], x, 0)
    missing = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0))).reshape(x.shape[0], -1)


def _row(x: jax.Array, index: jax.Array) -> jax.Array:
    """`[B, T, D]` and `[B]` -> `[B, D]`."""
    return rows_at(x, index[:, None])[:, 0]


def _last(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The row of the last real token, `[B, D]`; the first row if there are none."""
    if mask is None:
        return x[:, -1]
    last = jnp.maximum(next_position(mask, *mask.shape) - 1, 0)
    return _row(x, last)
