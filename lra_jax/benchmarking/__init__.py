"""What `python -m lra_jax.benchmark` measures: cases, programs, roofline, views."""
