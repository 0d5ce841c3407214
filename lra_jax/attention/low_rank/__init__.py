"""Mechanisms that mix positions down to a few."""
