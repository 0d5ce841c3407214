"""The dataset of a language model's settings."""

import numpy as np

from lra_jax.data.language import corpora, vocabularies, wikitext
from lra_jax.data.language.rows import TextDataset, make_stream


def prepare(
    _: object = None,
    *,
    path: str | None = None,
    pattern: str = "*",
    tokenizer: str = "bytes",
    vocab_size: int = 8_192,
    max_length: int = 512,
    slides: bool = True,
) -> TextDataset:
    """Reads a corpus and lays it into rows.

    Args:
      path: a file, a folder or WikiText; None = the standard library of Python.
      pattern: of the names of a folder's files.
      tokenizer: "bytes", "words" or "bpe".
      vocab_size: tokens of the last.
      max_length: positions of a row.
      slides: score the test split with rows that overlap, too.

    Raises:
      ValueError: the files are missing, empty, no text, or less than a row.
    """
    if path is None:
        corpus = corpora.standard_library()
    else:
        corpus = wikitext.found(path) or corpora.of_path(path, pattern)
    texts = corpus.documents
    vocabulary = vocabularies.make(tokenizer, vocab_size, texts["train"])
    dtype = np.min_scalar_type(vocabulary.size - 1)
    streams = {
        split: make_stream(
            [vocabulary.encode(text) for text in own],
            vocabulary.end,
            sum(map(len, own)),
            dtype,
        )
        for split, own in texts.items()
    }
    return TextDataset(
        corpus.name,
        streams,
        length=max_length,
        vocabulary=vocabulary,
        slides=slides,
    )
