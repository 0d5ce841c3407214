"""Mechanisms whose state fades or forgets by gates of the input."""
