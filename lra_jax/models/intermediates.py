"""The named intermediates of the modules, for ``nnx.capture``.

``nnx.capture(model, nnx.Intermediate)(tokens, lengths)`` returns, besides the output, a
state that holds, at the path of each module, a tuple of values, one per call:

  Block               inputs, outputs `[B, T, D]`; mask, segment_ids `[B, T]` or
                      None.
  MultiHeadAttention  queries, keys, values `[B, T, N, H]`; keywords, the other arrays
                      passed to the mechanism: masks, gates, its own parameters.

Outside a capture nothing is computed or kept, and the compiled step is the same.
"""

from typing import Any

from flax import nnx


def sow(module: nnx.Module, **values: Any) -> None:
    """Records values if a capture is running."""
    if is_captured(module):
        for name, value in values.items():
            module.sow(nnx.Intermediate, name, value)


def is_captured(module: nnx.Module) -> bool:
    """Whether an ``nnx.capture`` is running.

    Outside one, ``Module.sow`` would make the values attributes of the module, with a
    warning; flax below 0.12.12 has no other way to ask.
    """
    return hasattr(module, "__captures__")
