"""A look inside a model: the states between its blocks, and the inputs of attention.

Works with any model of ``lra_jax.models``, trained or not: anything with `Block`
and `MultiHeadAttention` modules, which name their intermediates for ``nnx.capture``
(`lra_jax.models.intermediates`).
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import progress
from lra_jax.analysis.networks import Variant, run_parts
from lra_jax.attention import Mechanism
from lra_jax.errors import expected
from lra_jax.models import Block, EncoderBlock, MultiHeadAttention


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
        function = self.mechanism.find("weights")
        if function is None:
            return self._apply_to_units()
        parameters = inspect.signature(function).parameters
        keywords = {k: v for k, v in self.keywords.items() if k in parameters}
        arrays = {k: v for k, v in keywords.items() if isinstance(v, jax.Array)}
        options = tuple(item for item in keywords.items() if item[0] not in arrays)
        return np.asarray(_call(function, options, arrays, self.query, self.key))

    def _apply_to_units(self) -> np.ndarray:
        """The matrix W of an outside function that computes ``W value``.

        With unit vectors as values, its output is W.
        """
        run = jax.jit(functools.partial(self.function, **self.keywords))
        batch, length, heads, _ = self.key.shape
        unit = jnp.eye(length, dtype=self.value.dtype)[None, :, None]
        unit = jnp.broadcast_to(unit, (batch, length, heads, length))
        kind = f"{self.mechanism.name!r} with NAME_weights, or linear in its values"
        try:
            weights = run(self.query, self.key, unit)
            out = run(self.query, self.key, self.value)
            again = jnp.einsum("btns,bsnv->btnv", weights, self.value)
        except Exception as error:
            got = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise expected("attention", kind, got) from error
        if not jnp.allclose(again, out, atol=1e-2 * float(jnp.abs(out).max())):
            got = "an output that its matrix does not give"
            raise expected("attention", kind, got)
        return np.asarray(jnp.moveaxis(weights, 2, 1), np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(
    function: Any, options: tuple, arrays: dict[str, jax.Array], *inputs: jax.Array
) -> jax.Array:
    """Compiled once for all layers and draws of a mechanism."""
    return function(*inputs, **dict(options), **arrays)


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


def call_of(calls: Sequence[AttentionCall], layer: int) -> AttentionCall:
    """The attention of a layer, counted from 1."""
    if not 1 <= layer <= len(calls):
        raise expected("layer", f"1 to {len(calls)}, the model's last", layer)
    return calls[layer - 1]


def capture(model: nnx.Module, run: Callable[[], Any]) -> Captured:
    """Runs a model once and returns the states between its blocks.

    If the blocks run more than once, the states are those of the first run.

    Args:
      model: holds `Block` modules.
      run: calls the model, as in ``lambda: model(tokens, lengths)``; not compiled.

    Raises:
      ValueError: the model has no such blocks, or its stages differ in size.

    Examples:
      >>> from lra_jax.models import SequenceClassifier
      >>> model = SequenceClassifier(16, 10, max_length=8, rngs=nnx.Rngs(0))
      >>> captured = capture(model, lambda: model(jnp.arange(8)[None]))
      >>> captured.states.shape  # The embeddings, and the output of each block.
      (3, 1, 8, 64)
      >>> call_of(captured.calls, layer=1).weights().shape
      (1, 2, 8, 8)
    """
    modules = _run(model, run)
    blocks = _blocks(model, modules)
    _, first = blocks[0]
    outputs = [first["inputs"], *(values["outputs"] for _, values in blocks)]
    states = np.stack([np.asarray(x[0], np.float32) for x in outputs])
    return Captured(states, _documents(first), _calls(modules))


def capture_attention(model: nnx.Module, run: Callable[[], Any]) -> list[AttentionCall]:
    """`Captured.calls` for any model with `MultiHeadAttention` modules."""
    return _calls(_run(model, run))


def variant_states(
    model: nnx.Module, run: Callable[[], Any], variants: Mapping[str, Variant]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The states between the blocks with parts of each block left out.

    Arguments and errors are those of `capture`.

    Returns:
      For each variant float32 `[L + 1, B, T, D]`, and a mask `[B, T]`: True at the
      tokens of the row's longest document (if a row is not packed, all real tokens).
      Documents do not see each other, so they do not collapse into one.
    """
    blocks = _blocks(model, _run(model, run), EncoderBlock)
    first, values = blocks[0]
    rows = {name: values[name][0] for name in ("mask", "segment_ids")}
    states = {}
    for name, variant in progress.track(variants.items(), "variants", len(variants)):
        xs, memory = [values["inputs"][0]], None
        for block, _ in blocks:
            has_own = block.attention.own_parameters
            parameters = None if has_own else first.attention.parameters
            out, memory = _run_block(
                block, variant, xs[-1], rows, parameters=parameters, memory=memory
            )
            xs.append(out)
        states[name] = np.stack([np.asarray(x, np.float32) for x in xs])
    return states, longest_document(_documents(values))


def _run_block(
    block: EncoderBlock,
    variant: Variant,
    x: jax.Array,
    rows: dict[str, Any],
    **shared: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """`EncoderBlock.carry` with parts left out; with all parts, the block itself."""
    memory = None

    def attend(x: jax.Array) -> jax.Array:
        nonlocal memory
        out, memory = block.attention.attend(x, **rows, **shared)
        return out

    def transform(x: jax.Array) -> jax.Array:
        return block.transform(x, **rows)

    return run_parts(block, x, variant, attend, transform, **rows), memory


def _documents(values: dict[str, tuple]) -> np.ndarray:
    """`Captured.documents`, from the values of the first block."""
    x, mask, labels = (values[name][0] for name in ("inputs", "mask", "segment_ids"))
    labels = np.ones(x.shape[:2], int) if labels is None else np.asarray(labels)
    return labels if mask is None else np.where(np.asarray(mask), labels, 0)


def longest_document(documents: np.ndarray) -> np.ndarray:
    """Each row's longest document, the first in a tie, as boolean `[B, T]`, of the
    numbers `[B, T]` of documents, 0 at padding."""
    masks = []
    for row in documents:
        names, sizes = np.unique(row[row > 0], return_counts=True)
        masks.append(row == names[sizes.argmax()] if len(names) else row > 0)
    return np.stack(masks)


def _run(model: nnx.Module, run: Callable[[], Any]) -> list[tuple[Any, dict]]:
    """The modules that ran, each with a tuple of values for each name."""
    state = nnx.capture(lambda _: run(), nnx.Intermediate)(model)[1]
    modules = []
    for path, module in nnx.iter_modules(model):
        at: Any = state
        for part in path:
            at = at.get(part, {})
        values = {
            name: variable.get_value()
            for name, variable in at.items()
            if isinstance(variable, nnx.Intermediate)
        }
        if values:
            modules.append((module, values))
    return modules


def _blocks(
    model: nnx.Module, modules: list[tuple[Any, dict]], kind: type = Block
) -> list[tuple[Any, dict]]:
    blocks = [pair for pair in modules if isinstance(pair[0], kind)]
    if not blocks:
        needed = f"one made of lra_jax.models.{kind.__name__}"
        raise expected("model", needed, f"a {type(model).__name__} without any")
    if len({values["outputs"][0].shape for _, values in blocks}) > 1:
        raise expected("model", "blocks of one length and width", "stages")
    return blocks


def _calls(modules: list[tuple[Any, dict]]) -> list[AttentionCall]:
    return [
        AttentionCall(
            layer.mechanism,
            query,
            key,
            value,
            arrays | layer.keywords,
            layer.function,
        )
        for layer, values in modules
        if isinstance(layer, MultiHeadAttention)
        for query, key, value, arrays in zip(
            *(values[n] for n in ("queries", "keys", "values", "keywords")), strict=True
        )
    ]
