"""The named intermediates of the modules, for ``nnx.capture``.

``nnx.capture(model, nnx.Intermediate)(tokens, lengths)`` returns, beside the output, a
state with a tuple of values, one for each call, at the path of each module:

  EncoderBlock        inputs, outputs `[B, T, D]`; mask `[B, T]` or None.
  MultiHeadAttention  queries, keys, values `[B, T, N, H]`; keywords, the other arrays
                      that the mechanism got: masks, gates, its own parameters.

Nothing is computed or kept where nothing captures, and the compiled step is the same.
"""

from typing import Any

from flax import nnx


def sow(module: nnx.Module, **values: Any) -> None:
    """Leaves values to the capture that runs, if there is one."""
    if is_captured(module):
        for name, value in values.items():
            module.sow(nnx.Intermediate, name, value)


def is_captured(module: nnx.Module) -> bool:
    """Whether ``nnx.capture`` runs.

    Outside of it ``Module.sow`` would make the values attributes of the module, with a
    warning; flax below 0.12.12 has no other way to ask.
    """
    return hasattr(module, "__captures__")
