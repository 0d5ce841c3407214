"""Mechanisms whose state decays or forgets by gates computed from the input."""
