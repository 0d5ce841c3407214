"""Text for language models: corpora, and rows of a fixed length."""
