"""Shared by tests of models, trainer and command lines: small runs, foreign attention.

The functions below are also named on command lines, as in ``helpers:values_only``.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention import Mechanism
from lra_jax.configs import Config, get_preset
from lra_jax.models import saved
from lra_jax.models.norms import BatchNorm
from lra_jax.training.console import RunConsole
from lra_jax.training.metrics import read_metrics
from lra_jax.training.result import Result
from lra_jax.training.session import Session

TRAIN = {
    "steps": 40,
    "warmup": 5,
    "batch_size": 8,
    "eval_batch_size": 16,
    "eval_every": 10,
    "log_every": 4,
}
MODEL = {
    "num_layers": 1,
    "embed_dim": 16,
    "qkv_dim": 16,
    "mlp_dim": 16,
    "max_length": 64,
}
DATA = {
    "min_length": 10,
    "max_length": 60,
    "num_train": 400,
    "num_valid": 50,
    "num_test": 45,
    "processes": 1,
    # Every batch of one length: a run compiles one program of each kind.
    "buckets": "60",
}
TWO_LENGTHS = {"buckets": "32,60"}
# Trees that are made in no time.
FEW_TREES = {
    "num_train": 60,
    "num_valid": 7,
    "num_test": 5,
    "min_length": 5,
    "max_length": 60,
    "processes": 1,
}
# Optimises nothing: nearly all of the time of small programs is compilation.
_QUICK = {"xla_backend_optimization_level": 0}


def quick_jit(function: Any, **keywords: Any) -> Any:
    """``jax.jit`` that compiles quickly."""
    return jax.jit(function, compiler_options=_QUICK, **keywords)


def call_model(function: Any, model: nnx.Module, *args: Any, **keywords: Any) -> Any:
    """``function(model, ...)``, compiled once for all models of the same build."""
    graph, params = nnx.split(model)
    build = (function, repr(graph))
    if build not in _compiled:
        _compiled[build] = quick_jit(
            lambda params, args, keywords: function(
                nnx.merge(graph, params), *args, **keywords
            )
        )
    return _compiled[build](params, args, keywords)


_compiled: dict[Any, Any] = {}


def tiny(data_dir: Path, workdir: Path | None = None, **changes: Any) -> Config:
    """A run of seconds; dicts of changes for train, model and data go one deeper."""
    sizes: dict[str, dict[str, Any]] = {"train": TRAIN, "model": MODEL, "data": DATA}
    parts = {name: size | changes.pop(name, {}) for name, size in sizes.items()}
    parts["data"] |= {"dir": str(data_dir)}
    place = None if workdir is None else str(workdir)
    return get_preset(preset="compact").replace(workdir=place, **parts, **changes)


def result(**values: Any) -> Result:
    """A run's result, with numbers that do not matter but for these."""
    numbers = {
        **{"test_accuracy_best": 30.0, "test_accuracy_last": 29.0, "steps": 9},
        **{"valid_accuracy_best": 50.0, "valid_loss_best": 1.0, "best_step": 4},
        **{"test_examples": 10, "parameters": 1000, "seconds": 1.0},
        **{"steps_per_second": 2.0, "peak_memory_bytes": 1000},
    }
    return Result(**numbers | {"data_fingerprint": "ab"} | values)


class Closed(RunConsole):
    """A console that nobody reads any more after 7 steps, which ends a run."""

    _step = 0

    def advance(self, step: int) -> None:
        self._step = step

    @property
    def broken(self) -> bool:
        return self._step == 7


def steps_resumed(session: Session) -> list[int]:
    """Lists the step that a session goes on from, once it has run."""
    steps: list[int] = []

    def line(text: str = "") -> None:
        if text.startswith("resuming from step "):
            steps.append(int(text.rpartition(" ")[2]))

    session.console.line = line
    return steps


def resume(config: Config, step: int) -> Session:
    """Ends a copy of a finished run, as if that had been killed after a checkpoint.

    Its reports and its model are the same to the last bit.
    """
    workdir = Path(str(config.workdir))
    copy = workdir.with_name(f"{workdir.name}-again")
    shutil.copytree(workdir, copy)
    (copy / "result.json").unlink()
    for folder in (copy / "checkpoints" / "latest").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    written = (copy / saved.FILE).read_bytes()
    (copy / saved.FILE).unlink()
    with Session(config.replace(workdir=str(copy)), quiet=True) as session:
        begun = steps_resumed(session)
        session.run()
    assert begun == [step]
    assert (copy / saved.FILE).read_bytes() == written
    assert without_times(copy) == without_times(workdir)
    return session


# Whether the steps of a report were all compiled hangs on where a session began.
TIMES = ("seconds", "steps_per_second", "warm", "data_wait")


def without_times(workdir: Path) -> list[dict[str, Any]]:
    """The reports of a run, but for what differs from one run to the next."""
    lines = read_metrics(workdir)
    return [{k: v for k, v in x.items() if k not in TIMES} for x in lines]


def flags(config: Config) -> list[str]:
    """The command line that gives a config."""
    from lra_jax.configs.base import flatten

    settings = flatten(config.to_dict())
    return [
        f"--{name}={value}" for name, value in settings.items() if value is not None
    ]


def start(*command: str, **changes: str) -> subprocess.Popen[str]:
    """Starts Python in a process of its own, which finds this module too."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(changes),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs Python to its end in a process of its own."""
    return subprocess.run(
        [sys.executable, *command],
        env=environment(changes),
        text=True,
        capture_output=True,
        timeout=900,
    )


def environment(changes: dict[str, str]) -> dict[str, str]:
    here = Path(__file__).parent
    paths = (str(here.parent), str(here), os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # So that "python", in advice on resuming, is this one.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "LRA_JAX_CPU_DEVICES": "2",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **changes,
    }


def assert_one_error(code: Any, stderr: str, expected: int, *parts: str) -> None:
    """One line on stderr, ``error: ...``, with the parts in it."""
    assert code == expected, stderr
    assert stderr.startswith("error: "), stderr
    assert len(stderr.splitlines()) == 1, stderr
    for part in parts:
        assert part in stderr


class Sizes:
    """A dataset of which only the numbers of examples matter."""

    splits = ("train", "valid", "test")

    def __init__(self, *counts: int):
        self._counts = dict(zip(self.splits, counts, strict=True))

    def num_examples(self, split: str) -> int:
        return self._counts[split]


DAMAGE = ("gone", "empty", "cut", "flipped", "garbage", "foreign")


def damage(file: Path, how: str, foreign: Path | None = None) -> None:
    """Spoils a file; ``foreign`` is the same one of another run or dataset."""
    content = file.read_bytes()
    middle = len(content) // 2
    match how:
        case "gone":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "cut":
            file.write_bytes(content[:middle])
        case "flipped":
            bit = bytes([content[middle] ^ 1]) if content else b"1"
            file.write_bytes(content[:middle] + bit + content[middle + 1 :])
        case "garbage":
            file.write_bytes(random.Random(0).randbytes(max(len(content), 64)))
        case "foreign":
            assert foreign is not None
            file.write_bytes(foreign.read_bytes())
        case _:
            raise ValueError(how)


def move_running_means(model: nnx.Module) -> None:
    """Gives batch norms other statistics than at first, when they change nothing."""
    rng = np.random.default_rng(0)
    for _, norm in nnx.iter_modules(model):
        if isinstance(norm, BatchNorm):
            size = norm.mean[...].shape
            norm.mean[...] = jnp.asarray(rng.normal(size=size), jnp.float32)
            norm.var[...] = jnp.asarray(rng.uniform(0.2, 3, size), jnp.float32)


def assert_equal_trees(one: Any, two: Any) -> None:
    """Equal to the last bit."""
    chex.assert_trees_all_equal(one, two, strict=True)


def values_only(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = None
) -> jax.Array:
    """An attention of one's own: the mean of the real values."""
    weights = jnp.ones(key.shape[:2]) if mask is None else mask[:, 0, 0]
    weights = weights.astype(value.dtype)[:, :, None, None]
    mean = (value * weights).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
    return jnp.broadcast_to(mean, query.shape)


def marked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mark: jax.Array,
    gain: jax.Array,
    mask: Any = None,
) -> jax.Array:
    """An attention with arrays of its own, of which one is trained and one is not."""
    return value * gain + mark[None, None].astype(value.dtype)


def marked_parameters(
    rng_key: jax.Array, *, num_heads: int, head_dim: int, **_: Any
) -> dict[str, jax.Array]:
    mark = jax.random.normal(rng_key, (num_heads, head_dim))
    return {"mark": mark, "gain": jnp.ones(())}


MARKED = Mechanism(
    name="marked",
    module="helpers",
    function=marked,
    parameters="marked_parameters",
    buffers=("mark",),
)


def power_parameters(rng_key: jax.Array, *, num_heads: int) -> dict[str, jax.Array]:
    return {"log_power": jnp.zeros((num_heads,))}


def power_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = None, *, log_power
) -> jax.Array:
    """A user's attention with a learned array, and the matrix for it."""
    weights = power_weights(query, key, mask, log_power=log_power)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def power_weights(
    query: jax.Array, key: jax.Array, mask: Any = None, *, log_power: jax.Array
) -> jax.Array:
    """In proportion to ``exp(q k)`` to a power."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    real = None if mask is None else jnp.broadcast_to(mask, scores.shape)
    return jax.nn.softmax(scores * jnp.exp(log_power)[None, :, None, None], where=real)


class Scaled(nnx.Module):
    """An attention of one's own that is a module, with parameters and an option."""

    def __init__(
        self, num_heads: int, head_dim: int, *, scale: float = 1.0, rngs: nnx.Rngs
    ):
        self.scale = nnx.Param(jnp.full((1, 1, num_heads, 1), scale))
        self.mix = nnx.Linear(head_dim, head_dim, rngs=rngs)

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = None
    ) -> jax.Array:
        zeros = jnp.zeros(self.scale.shape[2])
        query = self.mix(query) * self.scale[...]
        return power_attention(query, key, value, mask, log_power=zeros)


def make_scaled(num_heads: int, head_dim: int, rngs: nnx.Rngs) -> Scaled:
    return Scaled(num_heads, head_dim, rngs=rngs)


class Dropped(Scaled):
    """A module with random numbers of its own, which a run does not keep."""

    def __init__(self, num_heads: int, head_dim: int, rngs: nnx.Rngs):
        super().__init__(num_heads, head_dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def fragile(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = None
) -> jax.Array:
    """NaN as soon as training has made the values large."""
    return jnp.where(jnp.abs(value).max() > FRAGILE_LIMIT, jnp.nan, value)


FRAGILE_LIMIT = 10.0


def bad_gradient(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = None
) -> jax.Array:
    """Finite, with a gradient that is not: the square root at 0."""
    return value + jnp.sqrt(0 * value)


def reports(config: Config, steps: int) -> str:
    """The lines of training in a run's ``metrics.jsonl``."""
    places = range(config.train.log_every, steps + 1, config.train.log_every)
    lines = [
        {"step": step, "split": "train", "accuracy": step / 10_000, "loss": 1.0}
        for step in places
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)
