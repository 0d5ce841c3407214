"""Flow-Attention and what only it needs."""
