"""An endless ordered map over worker processes, which end together with it.

`ProcessPoolExecutor.map` submits everything at once, and its workers outlive a killed
parent; both matter here.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)


def map_in_order(
    function: Callable[[int], _T], processes: int
) -> Generator[_T, None, None]:
    """Yields `function(0), function(1), ...` without end; close it to stop.

    Args:
      function: a picklable pure function of an integer.
      processes: worker processes, started by spawn; 1 = no other process.

    If workers cannot start (a script without the `__main__` guard, or one read from
    standard input) the work continues in this process.
    """
    if processes == 1:
        yield from map(function, itertools.count())
        return
    delivered = 0
    try:
        with contextlib.closing(_map_in_pool(function, processes)) as results:
            for result in results:
                yield result
                delivered += 1
    except BrokenProcessPool:
        _logger.warning(
            "The worker processes ended early; continuing in this process. A script "
            "that uses several processes needs `if __name__ == '__main__':`."
        )
        yield from map(function, itertools.count(delivered))


def _map_in_pool(
    function: Callable[[int], _T], processes: int
) -> Generator[_T, None, None]:
    pool = concurrent.futures.ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_initialize_worker,
    )
    indices = itertools.count()
    try:
        with _block_interrupts():
            pending = collections.deque(
                pool.submit(function, next(indices)) for _ in range(processes)
            )
        # One more task than workers, so that none waits while a result is used.
        while True:
            pending.append(pool.submit(function, next(indices)))
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def available_cpus() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _block_interrupts() -> Generator[None, None, None]:
    """Blocks SIGINT while workers start, so that they inherit the block.

    Ctrl-C reaches every process of the terminal's group. Only the parent should act on
    it; a worker that is still importing would otherwise print a traceback.
    """

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _initialize_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent():
    """Ends this worker if its parent was killed and could not end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
