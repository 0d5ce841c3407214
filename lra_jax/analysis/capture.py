"""A look inside a model: the states between its blocks, and the inputs of attention.

Works with any model of ``lra_jax.models``, trained or not: anything with `EncoderBlock`
and `MultiHeadAttention` modules, which name their intermediates for ``nnx.capture``
(`lra_jax.models.intermediates`).
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.networks import Variant
from lra_jax.attention import Mechanism
from lra_jax.errors import expected
from lra_jax.models import EncoderBlock, MultiHeadAttention


class AttentionCall(NamedTuple):
    """One call of a mechanism.

    Attributes:
      mechanism: the mechanism.
      query, key, value: `[B, T, N, H]`.
      keywords: all other arguments: masks, the mechanism's parameter arrays, options.
      function: the function that was called.
    """

    mechanism: Mechanism
    query: jax.Array
    key: jax.Array
    value: jax.Array
    keywords: dict[str, Any]
    function: Callable[..., Any]

    def weights(self) -> np.ndarray:
        """The dense matrix `[B, N, T, S]` of this call, float32.

        The fast form never builds it. For norm attention, retention and lightning
        attention, which normalise their output, it is the matrix before that.

        Raises:
          ValueError: the mechanism has no such matrix.
        """
        function = self.mechanism.find_weights()
        if function is None:
            return self._of_unit_values()
        parameters = inspect.signature(function).parameters
        keywords = {k: v for k, v in self.keywords.items() if k in parameters}
        # Compiled once: run eagerly, each of many operations would be compiled.
        compiled = jax.jit(functools.partial(function, **keywords))
        return np.asarray(compiled(self.query, self.key))

    def _of_unit_values(self) -> np.ndarray:
        """The matrix W of an outside function that computes ``W value``.

        With unit vectors as values, its output is W.
        """
        run = jax.jit(functools.partial(self.function, **self.keywords))
        batch, length, heads, _ = self.key.shape
        unit = jnp.eye(length, dtype=self.value.dtype)[None, :, None]
        unit = jnp.broadcast_to(unit, (batch, length, heads, length))
        wanted = f"{self.mechanism.name!r} with NAME_weights, or linear in its values"
        try:
            weights = run(self.query, self.key, unit)
            out = run(self.query, self.key, self.value)
            again = jnp.einsum("btns,bsnv->btnv", weights, self.value)
        except Exception as error:
            got = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise expected("attention", wanted, got) from error
        if not jnp.allclose(again, out, atol=1e-2 * float(jnp.abs(out).max())):
            raise expected(
                "attention", wanted, "an output that its matrix does not give"
            )
        return np.asarray(jnp.moveaxis(weights, 2, 1), np.float32)


class Captured(NamedTuple):
    """The intermediates of one run of a model.

    Attributes:
      states: float32 `[L + 1, B, T, D]`: the first block's input, and each block's
        output.
      documents: int `[B, T]`, the number of each token's document in a packed row, 1 in
        other rows, 0 at padding.
      calls: every attention layer, in order; one a block, or two where a second one
        takes the place of the MLP (gau, flash).
    """

    states: np.ndarray
    documents: np.ndarray
    calls: list[AttentionCall]

    @property
    def mask(self) -> np.ndarray:
        """Boolean `[B, T]`, True at real tokens."""
        return self.documents > 0

    def call(self, layer: int) -> AttentionCall:
        """The attention of a layer, counted from 1 over `calls`.

        Raises:
          ValueError: there is no such layer.
        """
        if not 1 <= layer <= len(self.calls):
            raise expected("layer", f"1 to {len(self.calls)}, the model's last", layer)
        return self.calls[layer - 1]


def capture(model: nnx.Module, run: Callable[[], Any]) -> Captured:
    """Runs a model once and returns the states between its blocks.

    If the blocks run more than once, the states are those of the first run.

    Args:
      model: holds `EncoderBlock` modules.
      run: calls the model, as in ``lambda: model(tokens, lengths)``; not compiled.

    Raises:
      ValueError: the model has no such blocks.
    """
    found = _intermediates(model, run)
    blocks = _blocks(model, found)
    _, first = blocks[0]
    outputs = [first["inputs"], *(named["outputs"] for _, named in blocks)]
    states = np.stack([np.asarray(x[0], np.float32) for x in outputs])
    rows = {name: first[name][0] for name in ("mask", "segment_ids")}
    documents = _documents(states.shape[1:3], **rows)
    return Captured(states, documents, _calls(model, found))


def capture_attention(model: nnx.Module, run: Callable[[], Any]) -> list[AttentionCall]:
    """Every call of a mechanism while a model runs, layer by layer.

    Args:
      model: holds `MultiHeadAttention` modules.
      run: as in `capture`.
    """
    return _calls(model, _intermediates(model, run))


def variant_states(
    model: nnx.Module, run: Callable[[], Any], variants: Mapping[str, Variant]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The states between the blocks with parts of each block left out.

    Args:
      model, run: as in `capture`.
      variants: by name.

    Returns:
      For each variant float32 `[L + 1, B, T, D]`, and a mask `[B, T]`: True at the
      tokens of the row's longest document (if a row is not packed, all real tokens).
      Documents do not see each other, so they do not collapse into one.

    Raises:
      ValueError: the model has no such blocks.
    """
    blocks = _blocks(model, _intermediates(model, run))
    first, named = blocks[0]
    x = named["inputs"][0]
    rows = {name: named[name][0] for name in ("mask", "segment_ids")}
    found = {}
    for name, variant in progress.told(variants.items(), "variants", len(variants)):
        states, memory = [x], None
        for block, _ in blocks:
            own = block.attention.config.own_parameters
            parameters = None if own else first.attention.parameters
            out, memory = _run_block(
                block,
                variant,
                states[-1],
                parameters=parameters,
                memory=memory,
                **rows,
            )
            states.append(out)
        found[name] = np.stack([np.asarray(state, np.float32) for state in states])
    return found, longest_document(_documents(x.shape[:2], **rows))


def _run_block(
    block: EncoderBlock,
    variant: Variant,
    x: jax.Array,
    *,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    parameters: Any,
    memory: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`EncoderBlock.carry` with parts left out; with all parts, the block itself.

    Without the skip connection ``x = attention(LN(x))``, and so on.
    """
    rows: dict[str, Any] = {"mask": mask, "segment_ids": segment_ids}

    def normed(norm: Any, x: jax.Array, *, after: bool) -> jax.Array:
        return block.apply_norm(norm, x, after=after, **rows) if variant.norm else x

    inner = normed(block.attention_norm, x, after=False)
    branch, memory = block.attention.attend(
        inner, **rows, parameters=parameters, memory=memory
    )
    x = x + branch if variant.skip else branch
    x = normed(block.attention_norm, x, after=True)
    if not variant.mlp or block.mlp is None:
        return x, memory
    inner = normed(block.mlp_norm, x, after=False)
    x = x + block.transform(inner, mask, segment_ids)
    return normed(block.mlp_norm, x, after=True), memory


def _documents(shape: tuple[int, ...], mask: Any, segment_ids: Any) -> np.ndarray:
    """The number of each token's document `[B, T]`, 0 at padding."""
    labels = np.ones(shape, int) if segment_ids is None else np.asarray(segment_ids)
    return labels if mask is None else np.where(np.asarray(mask), labels, 0)


def longest_document(documents: np.ndarray) -> np.ndarray:
    """Each row's longest document, the first in a tie, as boolean `[B, T]`.

    Args:
      documents: int `[B, T]`, 0 at padding.
    """
    found = []
    for row in documents:
        names, sizes = np.unique(row[row > 0], return_counts=True)
        found.append(row == names[sizes.argmax()] if len(names) else row > 0)
    return np.stack(found)


def _intermediates(model: nnx.Module, run: Callable[[], Any]) -> nnx.State:
    return nnx.capture(lambda _: run(), nnx.Intermediate)(model)[1]


def _named(
    model: nnx.Module, kind: type[nnx.Module], found: nnx.State
) -> list[tuple[Any, dict[str, tuple]]]:
    """The modules of a type that ran, with a tuple of values for each name."""
    result = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, kind):
            at: Any = found
            for part in path:
                at = at.get(part, {})
            values = {
                name: variable.get_value()
                for name, variable in at.items()
                if isinstance(variable, nnx.Intermediate)
            }
            if values:
                result.append((module, values))
    return result


def _blocks(model: nnx.Module, found: nnx.State) -> list[tuple[EncoderBlock, dict]]:
    blocks = _named(model, EncoderBlock, found)
    if not blocks:
        wanted = "one made of lra_jax.models.EncoderBlock"
        raise expected("model", wanted, f"a {type(model).__name__} without any")
    return blocks


def _calls(model: nnx.Module, found: nnx.State) -> list[AttentionCall]:
    return [
        AttentionCall(
            layer.mechanism,
            query,
            key,
            value,
            arrays | layer.config.keywords,
            layer.function,
        )
        for layer, values in _named(model, MultiHeadAttention, found)
        for query, key, value, arrays in zip(
            *(values[n] for n in ("queries", "keys", "values", "keywords")), strict=True
        )
    ]
