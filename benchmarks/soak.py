"""Kills runs at random moments, resumes them, and compares them with undisturbed ones.

    python benchmarks/soak.py --kills=50 --stops=14 --out=results/soak.json

A small run on generated ListOps is trained again and again. Each time it gets a SIGKILL
at a random moment of one phase (start-up, data, compilation, step, evaluation,
checkpoint, end); then the same command resumes.
Parameters, optimiser, metric sums, position in the data, metrics and result at the end
must equal those of an undisturbed run, bit for bit. Stops are SIGINT and SIGTERM in the
same phases: the run must end with their exit code and one line. The log lists each of
them.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import origin, write

ROOT = Path(__file__).parents[1]
STEPS, EVAL_EVERY = 60, 20
FLAGS = (
    *("--model.num_layers=1", "--model.embed_dim=16", "--model.qkv_dim=16"),
    *("--model.mlp_dim=16", "--model.max_length=64", "--data.max_length=60"),
    *("--data.min_length=10", "--data.num_train=4000", "--data.num_valid=1000"),
    *("--data.num_test=1000", "--data.buckets=60", f"--train.steps={STEPS}"),
    "--data.processes=1",
    *(f"--train.eval_every={EVAL_EVERY}", "--train.log_every=2", "--train.warmup=5"),
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "LRA_JAX_ALLOCATOR": "system",
    "PYTHONPATH": str(ROOT),
}
# In a report, and in a result: whatever differs from run to run.
TIMES = ("seconds", "steps_per_second", "warm", "data_wait")
VARYING = (
    *("seconds", "steps_per_second", "steps_per_second_kind", "command"),
    *("data_wait", "peak_memory_bytes", "seal"),
)
LIMIT = 600  # Seconds.


@dataclasses.dataclass
class Job:
    """One run: its place, and when and as which process it began."""

    folder: Path
    begun: float = 0.0
    pid: int = 0

    @property
    def workdir(self) -> Path:
        return self.folder / "run"

    @property
    def flags(self) -> list[str]:
        data = f"--data.dir={self.folder / 'data'}"
        return [*FLAGS, data, f"--workdir={self.workdir}"]

    @property
    def finished(self) -> bool:
        return (self.workdir / "result.json").exists()

    def start(self, compiles: bool = False) -> subprocess.Popen[bytes]:
        """Starts it; its output goes to files. All jobs share compiled programs, unless
        this one compiles its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        cache = self.folder.parent / "cache"
        if compiles:
            cache = self.folder / f"cache-{time.time_ns()}"
        environment = os.environ | ENVIRONMENT
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        command = [sys.executable, "-m", "lra_jax.train", *self.flags]
        self.begun = time.time()
        out, err = (self.folder / f"{name}.txt" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command, env=environment, stdout=stdout, stderr=stderr
            )
        self.pid = process.pid
        return process

    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of its metrics."""
        with contextlib.suppress(OSError, ValueError):
            text = (self.workdir / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines()]
        return []

    def read(self, name: str) -> str:
        """Its output, or its errors."""
        return (self.folder / f"{name}.txt").read_text()


def _watches(job: Job) -> bool:
    """Whether it handles SIGTERM yet; before that, Python itself is starting."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{job.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _makes(pattern: str) -> Callable[[Job], bool]:
    """Whether a path has been made since the start."""

    def condition(job: Job) -> bool:
        with contextlib.suppress(OSError):
            return any(x.stat().st_ctime > job.begun for x in job.folder.glob(pattern))
        return False

    return condition


def _evaluates(job: Job) -> bool:
    last = (job.metrics() or [{"step": 1, "split": ""}])[-1]
    due = last["split"] == "train" and last["step"] % EVAL_EVERY == 0
    return due and "loss" in job.read("out")


# How to detect that a phase has begun, and about how many seconds it lasts.
PHASES: dict[str, tuple[Callable[[Job], bool], float]] = {
    "start-up": (_watches, 4.0),
    "data": (_makes("data/*/*/incomplete.*"), 1.0),
    "compilation": (lambda job: str(job.workdir) in job.read("out"), 2.0),
    "step": (lambda job: "loss" in job.read("out"), 1.0),
    "evaluation": (_evaluates, 0.5),
    "checkpoint": (_makes("run/checkpoints/*/*.orbax-checkpoint-tmp*"), 0.1),
    "end": (lambda job: "scoring the test split" in job.read("out"), 1.0),
}


def await_phase(
    job: Job, process: subprocess.Popen[bytes], phase: str, rng: random.Random
) -> bool:
    """Waits for a random moment of a phase; False if the process ended first."""
    begun, lasts = PHASES[phase]
    deadline = time.monotonic() + LIMIT
    while not begun(job):
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"{phase} did not begin: {job.read('out')}")
        time.sleep(0.001)
    time.sleep(rng.random() * lasts)
    return process.poll() is None


def kill(job: Job, phase: str, rng: random.Random) -> dict[str, Any] | None:
    """Starts a job and kills it in a phase; None if it ended first."""
    process = job.start(compiles=phase == "compilation")
    try:
        reached = await_phase(job, process, phase, rng)
    finally:
        process.kill()
        process.wait()
    return {"phase": phase, "step": last_step(job)} if reached else None


def stop(job: Job, phase: str, name: str, rng: random.Random) -> dict[str, Any]:
    """Starts a job and sends it a signal in a phase; how it ended."""
    process = job.start(compiles=phase == "compilation")
    signum = getattr(signal, name)
    try:
        sent = await_phase(job, process, phase, rng)
        start = time.monotonic()
        if sent:
            process.send_signal(signum)
        code = process.wait(timeout=LIMIT)
    finally:
        process.kill()
    seconds = round(time.monotonic() - start, 2)
    errors = job.read("err").splitlines()
    lines = [*job.read("out").splitlines()[-1:], *errors]
    said = [line for line in lines if "interrupted" in line or "saved step" in line]
    stopped = code == 128 + signum and len(said) == 1
    good = stopped or (code == 0 and job.finished)
    good = good and not any("Traceback" in line for line in errors)
    row = {"phase": phase, "signal": name, "code": code, "seconds": seconds}
    line = (said or [""])[-1].replace(str(job.folder), "FOLDER")[:60]
    return row | {"line": line, "sent": sent, "good": good, "step": last_step(job)}


def last_step(job: Job) -> int:
    """The last reported step."""
    return max((line["step"] for line in job.metrics()), default=0)


def finish(job: Job) -> None:
    """Resumes a job until it ends."""
    code = job.start().wait(timeout=LIMIT)
    if code != 0:
        raise RuntimeError(f"exit code {code}\n{job.read('err')}")


def outcome(job: Job) -> dict[str, Any]:
    """Everything that must be equal at the end: arrays as bytes, numbers, lines."""
    import jax
    import numpy as np

    from lra_jax import cli
    from lra_jax.training.session import Session

    config = cli.parse_config("soak", "", job.flags)
    with Session(config, quiet=True) as session:
        state, progress = session.trainer.checkpoints.restore(
            session.trainer.state, session.trainer.data
        )
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {jax.tree_util.keystr(k): np.asarray(x).tobytes() for k, x in leaves}
    result = json.loads((job.workdir / "result.json").read_text())
    latest = job.workdir / "checkpoints" / "latest" / str(STEPS) / "data"
    return {
        "arrays": arrays,
        "position": {p.name: p.read_text() for p in sorted(latest.glob("*.json"))},
        "progress": progress._replace(seconds=0.0),
        "metrics": [
            {name: value for name, value in line.items() if name not in TIMES}
            for line in job.metrics()
        ],
        "result": {n: v for n, v in result.items() if n not in VARYING},
    }


def make_plan(kills: int, stops: int, rng: random.Random) -> list[tuple[str, str]]:
    """Kills and stops in every phase, shuffled in bouts that begin with the data."""
    phases, both = list(PHASES), ("SIGTERM", "SIGINT")
    plan = [("kill", phases[i % len(phases)]) for i in range(kills)]
    plan += [(both[i % 2], phases[i // 2 % len(phases)]) for i in range(stops)]
    rng.shuffle(plan)
    order = {"data": 0, "start-up": 1, "end": 3}
    bouts = [plan[i : i + 12] for i in range(0, len(plan), 12)]
    return [x for bout in bouts for x in sorted(bout, key=lambda x: order.get(x[1], 2))]


def disturb(
    job: Job, plan: list[tuple[str, str]], rng: random.Random
) -> dict[str, Any]:
    """Kills and stops a job as planned, until it ends or needs a new one; takes what it
    did from the plan."""
    kills, stops = [], []
    while plan and not job.finished:
        what, phase = plan[0]
        if phase == "data" and any(job.folder.glob("data/*/*/[0-9]*")):
            break  # Only a new run makes data.
        plan.pop(0)
        if what != "kill":
            row = stop(job, phase, what, rng)
            stops.append(row)
        else:
            row = kill(job, phase, rng)
            if row is None:
                plan.append((what, phase))
            else:
                kills.append(row)
        print(what, phase, row, flush=True)
    return {"kills": kills, "stops": stops}


def soak(folder: Path, kills: int, stops: int, rng: random.Random) -> dict[str, Any]:
    """Disturbs runs until there are enough kills and stops; the log of all, and how
    each run differs from an undisturbed one."""
    undisturbed = Job(folder / "alone")
    finish(undisturbed)
    reference = outcome(undisturbed)
    plan, runs = make_plan(kills, stops, rng), []
    while plan:
        job = Job(folder / f"run{len(runs)}")
        log = disturb(job, plan, rng)
        finish(job)
        result = outcome(job)
        differ = [name for name in reference if result[name] != reference[name]]
        print("differs in", differ, flush=True)
        runs.append(log | {"differ": differ})
        shutil.rmtree(job.folder)
    stopped = [row for run in runs for row in run["stops"]]
    return {
        "kills": sum(len(run["kills"]) for run in runs),
        "runs": len(runs),
        "runs_equal": sum(not run["differ"] for run in runs),
        "stops": len(stopped),
        "stops_good": sum(row["good"] for row in stopped),
        "stops_longest_seconds": max((r["seconds"] for r in stopped), default=0.0),
        "log": runs,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        rng = random.Random(options.seed)
        report = soak(Path(folder), options.kills, options.stops, rng)
    print({name: value for name, value in report.items() if name != "log"})
    if options.out is not None:
        write(options.out, origin() | report)


if __name__ == "__main__":
    main()
