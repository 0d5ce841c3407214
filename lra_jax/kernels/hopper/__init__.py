"""Pallas kernels for Hopper GPUs."""
