"""Refuses a run that cannot fit into memory, before anything is allocated."""

import dataclasses
import os

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.configs import TrainConfig
from lra_jax.errors import expected
from lra_jax.models import EncoderConfig, TransformerEncoder

_FLOAT32 = 4


def check_memory(train: TrainConfig, encoder: EncoderConfig, length: int) -> None:
    """Refuses parameters or batches that exceed all memory.

    Counts the parameters, with their gradient and AdamW's two moments, as if all blocks
    had the first one's options, but only a single array of the activations. So a run
    that passes may still need too much.

    Args:
      train: batch sizes and dtype.
      encoder: the model; its shapes are found by tracing.
      length: maximum number of tokens in a sequence.

    Raises:
      ValueError: with the flags, the available memory, and the memory needed.
    """
    device, total = memory()
    # Blocks that differ come in turn, so that many are one step.
    turn = max(len(encoder.hybrid), 1)
    if encoder.num_layers <= 2 * turn:
        count = _parameters(encoder, encoder.num_layers)
    else:
        one, two = _parameters(encoder, turn), _parameters(encoder, 2 * turn)
        count = int(one + (encoder.num_layers / turn - 1) * (two - one))
    _check(
        "--model.num_layers, --model.embed_dim and the other sizes",
        "parameters, their gradient and two moments",
        4 * _FLOAT32 * count,
        device,
    )
    width = encoder.embed_dim * jnp.dtype(train.dtype).itemsize
    for name in ("batch_size", "eval_batch_size"):
        needed = getattr(train, name) * length * width
        _check(f"--train.{name}", "activations", needed, total)


def _parameters(encoder: EncoderConfig, num_layers: int) -> int:
    """Number of parameters of an encoder with this many blocks, found by tracing."""
    options = encoder.options if encoder.hybrid else encoder.block_options[0]
    encoder = dataclasses.replace(encoder, num_layers=num_layers, options=options)
    model = nnx.eval_shape(
        lambda: TransformerEncoder(1, config=encoder, rngs=nnx.Rngs(params=0))
    )
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def memory() -> tuple[int, int]:
    """Memory in bytes, of a device and of all; a CPU's devices share theirs."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit, limit * jax.device_count()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine, machine * jax.process_count()


def _check(flag: str, what: str, needed: int, limit: int) -> None:
    if needed > limit:
        wanted = f"{what} of at most {limit / 1e9:.1f} GB, the memory"
        raise expected(flag, wanted, f"{needed / 1e9:.1f} GB")
