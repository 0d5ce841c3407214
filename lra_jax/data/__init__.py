"""The tasks of the Long-Range Arena as data: numpy, tfds and grain, never jax."""
