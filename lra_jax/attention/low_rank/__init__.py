"""Mechanisms that compress positions to a few."""
