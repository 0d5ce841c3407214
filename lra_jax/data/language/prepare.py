"""The dataset for a language model's settings."""

import numpy as np

from lra_jax import vocabularies
from lra_jax.data.language import corpora, wikitext
from lra_jax.data.language.rows import TextDataset, make_stream
from lra_jax.errors import InputError, rename


def prepare(
    *,
    path: str | None = None,
    pattern: str = "*",
    tokenizer: str = "bytes",
    vocab_size: int = 8_192,
    max_length: int = 512,
    slides: bool = True,
) -> TextDataset:
    """Reads a corpus and arranges it in rows.

    Args:
      path, pattern, tokenizer, vocab_size, max_length: see
        `lra_jax.configs.lm.LmData`.
      slides: also score the test split with overlapping rows.

    Raises:
      ValueError: the files are missing, empty, not text, or shorter than a row.
    """
    if path is None:
        corpus = corpora.standard_library()
    else:
        corpus = wikitext.read(path) or corpora.of_path(path, pattern)
    texts = corpus.documents
    try:
        vocabulary = vocabularies.make(tokenizer, vocab_size, texts["train"])
        encoded = {
            split: [vocabulary.encode(text) for text in parts]
            for split, parts in texts.items()
        }
    except InputError as error:
        if error.name != "text":
            raise
        raise rename(error, "path") from error
    dtype = np.min_scalar_type(vocabulary.size - 1)
    streams = {
        split: make_stream(encoded[split], vocabulary.end, sum(map(len, parts)), dtype)
        for split, parts in texts.items()
    }
    return TextDataset(
        corpus.name,
        streams,
        length=max_length,
        vocabulary=vocabulary,
        slides=slides,
    )
