"""Softmax attention, then windows, hashes and patterns."""
