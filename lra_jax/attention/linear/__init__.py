"""Mechanisms whose weights are inner products of features."""
