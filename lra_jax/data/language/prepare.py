"""The dataset of a language model's settings."""

import numpy as np

from lra_jax.data.language import corpora
from lra_jax.data.language.rows import TextDataset, make_stream
from lra_jax.data.language.vocabularies import Bytes


def prepare(
    _: object = None,
    *,
    path: str | None = None,
    pattern: str = "*",
    max_length: int = 512,
    slides: bool = True,
) -> TextDataset:
    """Reads a corpus and lays it into rows.

    Args:
      path: a file or a folder; None = the standard library of Python.
      pattern: of the names of a folder's files.
      max_length: positions of a row.
      slides: score the test split with rows that overlap, too.

    Raises:
      ValueError: the files are missing, empty, no text, or less than a row.
    """
    if path is None:
        corpus = corpora.standard_library()
    else:
        corpus = corpora.of_path(path, pattern)
    vocabulary = Bytes()
    dtype = np.min_scalar_type(vocabulary.size - 1)
    streams = {
        split: make_stream(
            [vocabulary.encode(text) for text in texts],
            vocabulary.end,
            sum(map(len, texts)),
            dtype,
        )
        for split, texts in corpus.documents.items()
    }

    return TextDataset(
        corpus.name,
        streams,
        length=max_length,
        vocabulary=vocabulary,
        slides=slides,
    )
