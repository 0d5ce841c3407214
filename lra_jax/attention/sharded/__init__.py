"""A sequence over several devices."""
