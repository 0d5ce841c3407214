"""Several processes as one run: how they meet, how they agree, and which one writes.

Every process runs the same program on its own devices. Process 0 writes metrics and
results and prints; checkpoints are written by all, into one directory that they all
see.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lra_jax.configs import Config
from lra_jax.errors import expected, first_line

Result = TypeVar("Result")

# JAX ends all processes when one has given no sign of life for this long.
_HEARTBEAT_SECONDS = 30
# How long the processes wait for one another at the start.
START_SECONDS = 300
# How long a process with an error waits for the others to end with it.
LEAVE_SECONDS = 10


def connect(config: Config) -> None:
    """Joins the other processes if the config says ``distributed``; once per process.

    Call it before any device is used. ``jax.distributed.initialize`` supports TPU pods,
    SLURM, Open MPI and Kubernetes; elsewhere the config gives the coordinator.

    Ends the process with a one-line message if the others do not arrive in time; JAX
    would end it too, with a stack trace.
    """
    if not config.distributed or jax.distributed.is_initialized():
        return
    # A CPU would wait for other processes inside the threads that compile, so two
    # processes with one core each would wait for each other forever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Its handler of SIGTERM would replace ours until training begins.
    jax.config.update("jax_enable_preemption_service", False)
    alone = threading.Timer(START_SECONDS, _give_up, [config])
    alone.daemon = True
    alone.start()
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            initialization_timeout=START_SECONDS + 60,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        needed = f"the other processes at {config.coordinator}"
        if config.coordinator is None:
            needed = "a cluster, or --coordinator=HOST:PORT, --num_processes and "
            needed += "--process_id"
        raise expected("--distributed", needed, first_line(error)) from error
    finally:
        alone.cancel()


def _give_up(config: Config) -> None:
    count = config.num_processes or "all"
    place = f" at {config.coordinator}" if config.coordinator else ""
    needed = f"{count} processes{place} within {START_SECONDS} s"
    error = expected("--distributed", needed, "fewer; start all of them again")
    leave(str(error), 2)


def leave(message: str, code: int = 1) -> NoReturn:
    """Ends the process at once: an orderly exit would wait for a lost process."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(code)


def is_writer() -> bool:
    """Whether this process writes and prints for all of them."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest value of any process; all of them must call this."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).max())


def writer_first(call: Callable[[], Result]) -> Result:
    """Process 0 calls first, the others after it; each gets its own result.

    For calls that make files which the others then find. An error in one process ends
    all of them.
    """
    result: Any = None
    error: Exception | None = None
    for turn in (is_writer(), not is_writer()):
        try:
            result = call() if turn else result
        except Exception as failure:
            error = failure
        failed = agree(error is not None)
        if error is not None:
            raise error
        if failed:
            raise expected("--distributed", "all processes", "one stopped; it says why")
    return result


def leave_soon() -> None:
    """Ends this process in a while, if it is one of several, even if it hangs."""
    if jax.distributed.is_initialized():
        timer = threading.Timer(LEAVE_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()


def lost_process(error: BaseException) -> str | None:
    """The user's message if an error means that another process is gone, else None.

    A failed collective operation raises an error of the machine's network layer, in its
    own words; Gloo, the one for CPUs, may raise a ``ValueError``.
    """
    # Orbax raises errors of its own from those of the network.
    every = [x for x in (error, error.__cause__) if x is not None]
    network = any(
        isinstance(x, jax.errors.JaxRuntimeError) or "Gloo" in str(x) for x in every
    )
    is_of_memory = any("RESOURCE_EXHAUSTED" in str(x) for x in every)
    if jax.process_count() == 1 or not network or is_of_memory:
        return None
    return (
        f"process {jax.process_index()} of {jax.process_count()} lost another one, so "
        f"the job ends; its last checkpoint is kept ({first_line(error)})"
    )
