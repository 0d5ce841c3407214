"""Data of the tasks: numpy, tfds and grain, never jax."""
