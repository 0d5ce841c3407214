"""From texts to token ids and back.

A vocabulary has two ids of its own: ``end``, which comes between documents, and the
last of all, ``mask``, which hides a token from a masked language model.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from lra_jax.errors import expected


class Vocabulary(Protocol):
    """Attributes: `size`, ids are below it; `end` and `mask`, the ids of these."""

    size: int
    end: int
    mask: int

    @property
    def raw(self) -> dict[str, Any]:
        """What `described` reads."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a text.

        Raises:
          ValueError: it holds what the vocabulary cannot express.
        """
        ...

    def decode(self, tokens: np.ndarray) -> bytes:
        """The text of ids; what is not of the text is left out."""
        ...


class Bytes:
    """A byte is its own id."""

    end = 256
    mask = 257
    size = 258

    @property
    def raw(self) -> dict[str, Any]:
        """See `Vocabulary`."""
        return {"kind": "bytes", "end": self.end, "mask": self.mask}

    def encode(self, text: bytes) -> np.ndarray:
        """See `Vocabulary`."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """See `Vocabulary`."""
        return tokens[tokens < self.end].astype(np.uint8).tobytes()


def described(raw: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a description.

    Raises:
      ValueError: it describes none.
    """
    if raw.get("kind") == "bytes" and raw.get("end") == Bytes.end:
        return Bytes()
    raise expected("model", "one with a vocabulary of a language model", dict(raw))
