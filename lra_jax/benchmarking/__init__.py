"""The parts of `python -m lra_jax.benchmark`: cases, programs, roofline, views."""
