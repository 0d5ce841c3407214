"""The trainer: step, loop, checkpoints, metrics, sharding. It knows no particular task."""

from lra_jax.training.loop import Interrupted, NonFiniteLoss, Trainer

__all__ = ["Interrupted", "NonFiniteLoss", "Trainer"]
