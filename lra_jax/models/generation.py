"""Text generation with a causal language model, token by token."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.errors import (
    Count,
    NotNegative,
    Range,
    Size,
    a_thing,
    check_types,
    expected,
)
from lra_jax.models import decoding
from lra_jax.models.language import CausalLM

# Prompts are padded to a multiple of this, so that few lengths are compiled.
_MULTIPLE = 64
_Share = Annotated[float, Range("a number above 0, at most 1", above=0, most=1)]
# In place of a token, for logits from which none can be sampled.
_NO_NUMBER = -1


def generate(
    model: CausalLM,
    prompts: Sequence[Any],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end: int | None = None,
) -> list[np.ndarray]:
    """Continues prompts.

    The prompts are read in one pass; after that, each token takes the same time and
    memory at every position, for every mechanism but softmax.

    Args:
      model: a model whose mechanism has a stream.
      prompts: token ids `[T]` of each prompt, T > 0; lengths may differ.
      num_tokens: number of tokens to generate.
      temperature: divides the logits; 0 = always the most probable token.
      top_k: sample from the k most probable tokens; None = all.
      top_p: sample from the most probable tokens that together have this probability
        (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751); 1 or None = all.
      seed: an int from -2^31 to 2^32 - 1; it fixes the samples, which depend only on a
        prompt's index in the batch.
      end: a token that ends a text; None = none does.

    Returns:
      The new tokens of each prompt, at most `num_tokens`, without `end`.

    Raises:
      ValueError: the model has no stream, a setting is out of range, a prompt is empty,
        an id is beyond the vocabulary, a text would be longer than the model can
        continue (`lra_jax.models.decoding.longest`), or the logits are NaN.

    Examples:
      >>> model = CausalLM(
      ...     256, mechanism="linear", num_layers=1, embed_dim=32, num_heads=2,
      ...     mlp_dim=64, max_length=512, rngs=nnx.Rngs(0),
      ... )
      >>> [text.shape for text in generate(model, [[1, 2, 3], [4]], num_tokens=5)]
      [(5,), (5,)]
    """
    more: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "seed": seed, "end": end}
    steps = tokens_in_turn(model, prompts, num_tokens, temperature=temperature, **more)
    drawn, texts = np.stack(list(steps), 1), []
    for row in drawn:
        stop = np.flatnonzero(row == end) if end is not None else []
        texts.append(row[: stop[0]] if len(stop) else row)
    return texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the arguments of `generate`."""

    num_tokens: Size
    temperature: NotNegative = 1.0
    top_k: Size | None = None
    top_p: _Share | None = None
    seed: Any = 0
    end: Count | None = None

    def __post_init__(self):
        check_types(self)
        is_int = isinstance(self.seed, int | np.integer) and self.seed is not True
        # Without 64-bit types, jax would drop the upper half of a longer one.
        if not is_int or not -(2**31) <= self.seed < 2**32:
            raise expected("seed", "an int from -2^31 to 2^32 - 1", f"{self.seed!r}")


def tokens_in_turn(
    model: CausalLM, prompts: Sequence[Any], num_tokens: int, **sampling: Any
) -> Iterator[np.ndarray]:
    """As `generate`, but yields the tokens `[B]` of each step as they are sampled.

    A finished text is continued with `end`; iteration stops when every text is
    finished. Arguments are checked before the first step.
    """
    if not isinstance(model, CausalLM):
        raise expected("model", "a CausalLM", a_thing(model))
    settings = Sampling(num_tokens=num_tokens, **sampling)
    size = model.encoder.vocab_size
    if settings.end is not None and settings.end >= size:
        raise expected("end", f"an id of the vocabulary, below {size}", settings.end)
    batch = _prompts(model, prompts, num_tokens)
    limit = decoding.longest(model)
    width = -(-max(map(len, batch)) // _MULTIPLE) * _MULTIPLE
    width = width if limit is None else min(width, limit)
    tokens = np.zeros((len(batch), width), np.int32)
    for row, prompt in zip(tokens, batch, strict=True):
        row[: len(prompt)] = prompt
    mask = np.arange(width)[None] < np.array([[len(prompt)] for prompt in batch])
    return _steps(model, tokens, mask, settings)


def _steps(
    model: CausalLM, tokens: np.ndarray, mask: np.ndarray, settings: Sampling
) -> Iterator[np.ndarray]:
    draw = functools.partial(
        _draw,
        key=jax.random.key(settings.seed),
        temperature=np.float32(settings.temperature),
        greedy=settings.temperature == 0,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    graph, params = nnx.split(model)
    logits, state = _prefill(graph, params, tokens, mask)
    complete, end = np.zeros(len(tokens), bool), settings.end
    for index in range(settings.num_tokens):
        tokens = draw(logits, np.int32(index))
        if index + 1 < settings.num_tokens:  # Begun before the host reads the tokens.
            logits, state = _step(graph, params, state, tokens)
        drawn = np.array(tokens)
        if (drawn == _NO_NUMBER).any():
            raise expected("model", "weights that give finite logits", "NaN")
        if end is not None:
            drawn = np.where(complete, end, drawn)
            complete |= drawn == end
        yield drawn
        if complete.all():
            return


@functools.partial(jax.jit, static_argnums=0)
def _prefill(graph: Any, params: Any, tokens: jax.Array, mask: jax.Array) -> Any:
    return decoding.prefill(nnx.merge(graph, params), tokens, mask=mask)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(graph: Any, params: Any, state: Any, tokens: jax.Array) -> Any:
    return decoding.step(nnx.merge(graph, params), state, tokens)


@functools.partial(jax.jit, static_argnames=("greedy", "top_k", "top_p"))
def _draw(
    logits: jax.Array,
    index: jax.Array,
    *,
    key: jax.Array,
    temperature: jax.Array,
    greedy: bool,
    top_k: int | None,
    top_p: float | None,
) -> jax.Array:
    """Tokens `[B]` of logits `[B, V]`; `_NO_NUMBER` where some are NaN."""
    broken = jnp.isnan(logits).any(-1)
    if greedy:
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        return jnp.where(broken, _NO_NUMBER, tokens)
    # The most probable token's logit is 0, which a tiny temperature leaves finite.
    logits = logits - jnp.max(logits, -1, keepdims=True)
    least = jnp.asarray(jnp.finfo(logits.dtype).tiny, logits.dtype)
    divisor = jnp.maximum(temperature.astype(logits.dtype), least)
    logits = restrict(logits / divisor, top_k, top_p)
    step_key = jax.random.fold_in(key, index)
    samples = jnp.arange(len(logits))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, samples)
    tokens = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return jnp.where(broken, _NO_NUMBER, tokens)


def restrict(
    logits: jax.Array, top_k: int | None = None, top_p: float | None = None
) -> jax.Array:
    """Logits `[B, V]`, set to minus infinity for tokens that must not be sampled.

    Equally probable tokens are all kept, or all dropped.
    """
    if top_k is not None:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    # At 1 nothing is dropped: a float32 sum may reach 1 before the last token.
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, -1, descending=True)
        shares = jax.nn.softmax(ordered, -1)
        # A token is kept while the more probable ones do not reach the probability.
        before = jnp.cumsum(shares, -1) - shares
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def _prompts(
    model: CausalLM, prompts: Sequence[Any], num_tokens: int
) -> list[np.ndarray]:
    """The ids of each prompt, checked."""
    try:
        batch = [np.asarray(prompt) for prompt in prompts]
    except (TypeError, ValueError) as error:
        raise expected("prompts", "integers [T] for each text", error) from error
    if not batch:
        raise expected("prompts", "at least one", "none")
    size, limit = model.encoder.vocab_size, decoding.longest(model)
    if limit is not None and num_tokens >= limit:  # Whatever the prompts are.
        raise expected("num_tokens", f"an int below max_length={limit}", num_tokens)
    for prompt in batch:
        if prompt.ndim != 1 or not prompt.size or prompt.dtype.kind not in "iu":
            got = f"{prompt.dtype}{list(prompt.shape)}"
            raise expected("prompts", "integers [T] with T > 0", got)
        if prompt.min() < 0 or prompt.max() >= size:
            needed = f"ids of the vocabulary, from 0 to {size - 1}"
            raise expected("prompts", needed, f"{prompt.min()} to {prompt.max()}")
        if limit is not None and len(prompt) + num_tokens > limit:
            needed = f"at most max_length={limit} with num_tokens={num_tokens}"
            raise expected("prompts", needed, f"{len(prompt)} tokens")
    return batch
