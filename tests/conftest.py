"""Strict dtypes and ranks for every test, and two CPU devices for the mesh."""

import os

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 2)
# Nearly all of the tests' time is compilation, and their programs are too small to gain
# from optimised machine code; subprocesses are told by the environment.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# Command lines started by tests neither restart themselves nor share a cache.
os.environ["LRA_JAX_ALLOCATOR"] = "system"


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A compilation cache of this session's own, for its subprocesses too."""
    folder = str(tmp_path_factory.mktemp("xla"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
