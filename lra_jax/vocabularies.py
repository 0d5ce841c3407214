"""From texts to token ids and back.

A vocabulary has two special ids: ``end``, which separates documents, and the last of
all, ``mask``, which hides a token from a masked language model.
"""

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from lra_jax.errors import expected, known


class Vocabulary(Protocol):
    """Attributes: `size`, ids are below it; `end` and `mask`, the special ids."""

    size: int
    end: int
    mask: int

    @property
    def raw(self) -> dict[str, Any]:
        """The description that `from_raw` reads."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a text.

        Raises:
          ValueError: the vocabulary cannot express it.
        """
        ...

    def decode(self, tokens: np.ndarray) -> bytes:
        """The text of ids, without those that are not text."""
        ...


class Bytes:
    """Each byte is its own id."""

    end = 256
    mask = 257
    size = 258

    @property
    def raw(self) -> dict[str, Any]:
        return {"kind": "bytes", "end": self.end, "mask": self.mask}

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> bytes:
        return tokens[tokens < self.end].astype(np.uint8).tobytes()


class Words:
    """Words between blanks, and the ends of lines.

    `END` ends every line, including the last line of a document: the rule of WikiText,
    whose official vocabulary is every word of the training text, including the line
    end. Ids are sorted by frequency, most frequent first.

    Args:
      words: by id; includes `END`, and may include `UNKNOWN`, which replaces words that
        are missing.
    """

    END, UNKNOWN = "<eos>", "<unk>"

    def __init__(self, words: Sequence[str]):
        self._words = list(words)
        self._ids = {word: index for index, word in enumerate(words)}
        self.end, self.mask, self.size = self._ids[self.END], len(words), len(words) + 1

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Self:
        """The vocabulary of training texts; with `UNKNOWN`, even if it is unused."""
        counts = collections.Counter({cls.END: 0, cls.UNKNOWN: 0})
        for text in texts:
            for line in _lines(text):
                counts.update(line.split())
                counts[cls.END] += 1
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls([word for word, _ in ordered])

    @property
    def raw(self) -> dict[str, Any]:
        return {"kind": "words", "ids": self._ids}

    def encode(self, text: bytes) -> np.ndarray:
        """See `Vocabulary`. The end of the last line is left out: it ends the text."""
        unknown = self._ids.get(self.UNKNOWN)
        ids: list[int] = []
        for line in _lines(text):
            ids += [self._id(word, unknown) for word in line.split()]
            ids.append(self.end)
        return np.array(ids[:-1], np.int32)

    def missing(self, text: bytes) -> list[str]:
        """The words of a text that the vocabulary lacks."""
        return [word for word in _text(text).split() if word not in self._ids]

    def decode(self, tokens: np.ndarray) -> bytes:
        words = [self._words[t] for t in tokens.tolist() if t != self.mask]
        parts = ["\n" if word == self.END else f"{word} " for word in words]
        return "".join(parts).encode()

    def _id(self, word: str, unknown: int | None) -> int:
        index = self._ids.get(word, unknown)
        if index is None:
            raise expected("text", "words of the vocabulary", repr(word))
        return index


class Bpe:
    """Pairs of bytes, merged in order of frequency: byte-level BPE.

    Learned and applied by Hugging Face's ``tokenizers``.

    Args:
      description: description of the merges, the library's JSON.

    Raises:
      ValueError: the library is not installed.
    """

    def __init__(self, description: str):
        self._tokenizer = _library().Tokenizer.from_str(description)
        self._description = description
        size = self._tokenizer.get_vocab_size()
        self.end, self.mask, self.size = size, size + 1, size + 2

    @classmethod
    def of(cls, texts: Iterable[bytes], size: int) -> Self:
        """Learns the merges from training texts, for a vocabulary of `size` tokens.

        Raises:
          ValueError: `size` is too small for all bytes, or the library is missing.
        """
        if size < 258:
            needed = "at least 258, all bytes and two more"
            raise expected("vocab_size", needed, size)
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        byte_level = library.pre_tokenizers.ByteLevel
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size - 2,
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(_text, texts), trainer)
        return cls(tokenizer.to_str())

    @property
    def raw(self) -> dict[str, Any]:
        return {"kind": "ids", "bpe": self._description}

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self._tokenizer.encode(_text(text)).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """See `Vocabulary`; a token may be part of a character."""
        known = tokens[tokens < self.end].tolist()
        letters = "".join(map(self._tokenizer.id_to_token, known))
        return bytes(map(_byte_letters().__getitem__, letters))


def make(kind: str, size: int, texts: Sequence[bytes]) -> Vocabulary:
    """Makes the vocabulary of a corpus.

    Args:
      kind: "bytes", "words" or "bpe".
      size: number of tokens for "bpe".
      texts: the training texts.

    Raises:
      ValueError: an unknown kind, or see `Bpe`.
    """
    match known("tokenizer", kind, ("bytes", "words", "bpe")):
        case "words":
            return Words.of(texts)
        case "bpe":
            return Bpe.of(texts, size)
    return Bytes()


def from_raw(raw: Mapping[str, Any]) -> Vocabulary:
    """Makes the vocabulary from its description, or from one that contains it.

    Raises:
      ValueError: it does not describe a vocabulary.
    """
    if raw.get("kind") == "vocabulary":
        raw = raw.get("vocabulary") or {}
    if raw.get("kind") == "bytes" and raw.get("end") == Bytes.end:
        return Bytes()
    if raw.get("kind") == "words" and Words.END in raw.get("ids", ()):
        return Words(sorted(raw["ids"], key=raw["ids"].__getitem__))
    if "bpe" in raw:
        return Bpe(raw["bpe"])
    got = f"{raw.get('kind')!r}"
    raise expected("model", "one with a vocabulary of a language model", got)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte of each letter of byte-level BPE: printable bytes are their own letters,
    and the others, in their order, have the letters from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _lines(text: bytes) -> list[str]:
    """Lines without their ends; a final line end does not start an empty last line."""
    return _text(text).removesuffix("\n").split("\n")


def _text(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]} at {error.start}: use bytes"
        raise expected("text", "UTF-8 for words and bpe", got) from error


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        got = "none (pip install 'lra-jax[bpe]')"
        raise expected("tokenizer", "the package tokenizers for bpe", got) from error
    return tokenizers
