"""Flow-Attention and its own helpers."""
