"""From texts to token ids and back.

A vocabulary has two ids of its own: `END`, which stands between documents, and `MASK`,
which hides a token from a masked language model.
"""

from typing import Protocol

import numpy as np


class Vocabulary(Protocol):
    """Attributes: `size`, ids are below it; `end` and `mask`, the ids of these."""

    size: int
    end: int
    mask: int

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

    def encode(self, text: bytes) -> np.ndarray:
        """See `Vocabulary`."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """See `Vocabulary`."""
        return tokens[tokens < self.end].astype(np.uint8).tobytes()
