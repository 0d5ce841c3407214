"""Gated units, which do the work of attention and MLP."""
