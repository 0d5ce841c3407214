"""The trainer: step, loop, checkpoints, metrics, sharding; knows no particular task."""

from lra_jax.training.loop import Interrupted, fit
from lra_jax.training.trainer import NonFiniteLoss, Trainer

__all__ = ["Interrupted", "NonFiniteLoss", "Trainer", "fit"]
