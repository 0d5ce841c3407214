"""Generators of the tests of recall, copying and state tracking."""
