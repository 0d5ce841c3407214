"""Converts raw examples to token ids, by a description that a file can hold.

The kinds are
  words   text; each word has its id in ``ids``; characters of ``ignored`` are blanks;
  bytes   text or bytes, truncated to ``max_length``, without the white space around
          them if ``strip`` is True;
  vocabulary
          text or bytes, as the tokens of a ``vocabulary`` that
          `lra_jax.vocabularies` describes, truncated to ``max_length``,
          and stripped like bytes; or their ids;
  pixels  images of 0 to 255 with a ``shape``, `(rows, columns)` in grey and
          `(rows, columns, 3)` in colour;
  vectors series `[T, C]`, standardised by ``mean`` and ``deviation`` of each channel
          and truncated to the model's length; NaN is taken for the mean;
  ids     integers, unchanged.

``buckets``, if there are any, are the lengths to which training padded its examples,
increasing.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lra_jax import vocabularies
from lra_jax.errors import a_thing, expected, known, rename

Raw = Mapping[str, Any]
Read = Callable[[str, Any], np.ndarray]
"""``(name, example) -> ids [T]``; the name is for errors."""

IDS: Raw = {"kind": "ids"}


def check_raw(raw: Raw) -> None:
    """Raises ``ValueError`` unless this is a description of raw examples.

    Lengths that do not fit are refused when an example is read.
    """
    kind = known("raw", raw.get("kind", ""), _KINDS)
    if kind == "vocabulary":
        vocabularies.from_raw(raw)
    for name, of in {"ids": "words", "shape": "pixels"}.items():
        if kind == of and not raw.get(name):
            raise expected("raw", f"{name} for kind={of!r}", "none")
    buckets = list(raw.get("buckets", ()))
    if buckets != sorted(set(buckets)):
        raise expected("raw", "increasing lengths as buckets", f"{buckets!r}")


def reader(raw: Raw, max_length: int) -> Read:
    """Makes the function that reads one sequence: text, bytes, or an array.

    It raises ``ValueError`` for an example that cannot be read, is empty, or is too
    long (bytes and text in a vocabulary are truncated).
    """
    kind = raw["kind"]
    read = _with_vocabulary(raw) if kind == "vocabulary" else _READERS[kind]

    def read_example(name: str, example: Any) -> np.ndarray:
        tokens = read(raw, name, example)
        cuts = kind in ("bytes", "vocabulary") and isinstance(example, str | bytes)
        if cuts or kind == "vectors":
            tokens = tokens[:max_length]
        if not 0 < len(tokens) <= max_length:
            raise expected(name, f"1 to {max_length} tokens", len(tokens))
        return tokens

    return read_example


def _words(raw: Raw, name: str, example: Any) -> np.ndarray:
    if not isinstance(example, str):
        raise expected(name, "text", a_thing(example))
    blank = str.maketrans(dict.fromkeys(raw.get("ignored", ""), " "))
    words, ids = example.translate(blank).split(), raw["ids"]
    for word in words:
        known(name, word, ids)
    return np.array([ids[word] for word in words], np.int32)


def _bytes(raw: Raw, name: str, example: Any) -> np.ndarray:
    return np.frombuffer(_encode(raw, name, example), np.uint8).astype(np.int32)


def _encode(raw: Raw, name: str, example: Any) -> bytes:
    text = _utf8(name, example)
    # As in training, where an empty text is the end of a line.
    return (text.strip() or b"\n") if raw.get("strip") else text


def _utf8(name: str, example: Any) -> bytes:
    if isinstance(example, str):
        try:
            return example.encode("utf-8")
        except UnicodeEncodeError as error:
            raise expected(name, "text that UTF-8 can hold", error) from error
    if not isinstance(example, bytes):
        raise expected(name, "text or bytes", a_thing(example))
    return example


def _with_vocabulary(raw: Raw) -> Callable[[Raw, str, Any], np.ndarray]:
    vocabulary = vocabularies.from_raw(raw)

    def read(raw: Raw, name: str, example: Any) -> np.ndarray:
        if not isinstance(example, str | bytes):
            return _ids(raw, name, example)
        try:
            ids = vocabulary.encode(_encode(raw, name, example))
        except ValueError as error:
            raise rename(error, name) from error
        # As in training, an empty text is the end of one.
        return ids if len(ids) else np.array([vocabulary.end], np.int32)

    return read


def _pixels(raw: Raw, name: str, example: Any) -> np.ndarray:
    array, shape = np.asarray(example), tuple(raw["shape"])
    if array.shape != shape:
        kind = "an image [rows, columns, 3]" if shape[2:] else "a grey image"
        raise expected(name, f"{kind} {shape}", array.shape)
    if array.dtype != np.uint8:
        raise expected(name, "uint8, from 0 to 255", array.dtype)
    return array.reshape(-1, *shape[2:]).astype(np.int32)


def _vectors(raw: Raw, name: str, example: Any) -> np.ndarray:
    array, channels = np.asarray(example), len(raw["mean"])
    if array.ndim != 2 or array.shape[1] != channels or array.dtype.kind not in "fiu":
        needed = f"numbers [T, C] with C={channels}"
        raise expected(name, needed, f"{array.dtype}{list(array.shape)}")
    if np.isinf(array).any():
        raise expected(name, "finite numbers, or NaN", "infinity")
    scaled = (array - np.array(raw["mean"])) / np.array(raw["deviation"])
    return np.nan_to_num(scaled).astype(np.float32)


def _ids(_: Raw, name: str, example: Any) -> np.ndarray:
    try:
        array = np.asarray(example)
    except ValueError as error:  # Rows of different lengths.
        raise expected(name, "integers [T]", f"{example!r}"[:60]) from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise expected(name, "integers [T]", f"{array.dtype}{list(array.shape)}")
    return array


_READERS = {
    "words": _words,
    "bytes": _bytes,
    "pixels": _pixels,
    "vectors": _vectors,
    "ids": _ids,
}
_KINDS = (*_READERS, "vocabulary")
