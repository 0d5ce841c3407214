"""Text for language models: corpora, vocabularies, and rows of a fixed length."""
