"""Kills runs at random moments, resumes them, and compares them with undisturbed ones.

    python benchmarks/soak.py --kills=50 --stops=14 --out=results/soak.json

A small run on generated ListOps is trained again and again. Each time it gets a SIGKILL
at a random moment of one phase (start-up, data, compilation, step, evaluation,
checkpoint, end); then the same command resumes.
Parameters, optimizer, metric sums, position in the data, metrics and result at the end
must equal those of an undisturbed run, bit for bit. Stops are SIGINT and SIGTERM in the
same phases: the run must end with their exit code and one line. The log lists each of
them.

    python benchmarks/soak.py --kills=0 --stops=0 --pairs=4 --out=results/pairs.json

Starts two language models at a time, each of which is scored on two splits, as many
times for 2, 4 and 8 CPU devices. XLA ends a process whose programs wait for each other
for 40 seconds.
"""

import contextlib
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

from common import ROOT, flags, origin, write

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
VARYING = {
    *("seconds", "steps_per_second", "steps_per_second_kind", "command", "warm"),
    *("data_wait", "peak_memory_bytes", "seal"),
}
"""The values of a report or a result that differ from run to run."""
LIMIT = 600  # Seconds.


class Job:
    """One run: its folder, and when and as which process it was last started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workdir = folder, folder / "run"
        self.flags = [*FLAGS, f"--data.dir={folder / 'data'}"]
        self.flags += [f"--workdir={self.workdir}"]
        self.start_time, self.pid = 0.0, 0

    @property
    def is_finished(self) -> bool:
        """Whether it has a result."""
        return (self.workdir / "result.json").exists()

    def start(self, compiles: bool = False) -> subprocess.Popen[bytes]:
        """Starts it; its output goes to files. All jobs share compiled programs, unless
        this one compiles its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        cache = self.folder.parent / "cache"
        if compiles:
            cache = self.folder / f"cache-{time.time_ns()}"
        self.start_time = time.time()
        out, err = (self.folder / f"{name}.txt" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "lra_jax.train", *self.flags],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
                stdout=stdout,
                stderr=stderr,
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


def _handles_signals(job: Job) -> bool:
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
            return any(
                x.stat().st_ctime > job.start_time for x in job.folder.glob(pattern)
            )
        return False

    return condition


def _evaluates(job: Job) -> bool:
    last = (job.metrics() or [{"step": 1, "split": ""}])[-1]
    due = last["split"] == "train" and last["step"] % EVAL_EVERY == 0
    return due and "loss" in job.read("out")


# How to detect that a phase has begun, and about how many seconds it lasts.
PHASES: dict[str, tuple[Callable[[Job], bool], float]] = {
    "start-up": (_handles_signals, 4.0),
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
    begins, lasts = PHASES[phase]
    deadline = time.monotonic() + LIMIT
    while not begins(job):
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"{phase} did not begin: {job.read('out')}")
        time.sleep(0.001)
    time.sleep(rng.random() * lasts)
    return process.poll() is None


def strike(job: Job, name: str, phase: str, rng: random.Random) -> dict[str, Any]:
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
    row = {"phase": phase, "signal": name, "sent": sent, "code": code}
    row |= {"step": max((line["step"] for line in job.metrics()), default=0)}
    if name == "SIGKILL":
        return row
    errors = job.read("err").splitlines()
    lines = [*job.read("out").splitlines()[-1:], *errors]
    messages = [line for line in lines if "interrupted" in line or "saved step" in line]
    stopped = code == 128 + signum and len(messages) == 1
    good = stopped or (code == 0 and job.is_finished)
    good = good and not any("Traceback" in line for line in errors)
    line = (messages or [""])[-1].replace(str(job.folder), "FOLDER")[:60]
    return row | {"seconds": seconds, "line": line, "good": good}


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
    latest = job.workdir / "checkpoints" / "latest" / str(STEPS) / "data"
    result = json.loads((job.workdir / "result.json").read_text())
    *metrics, result = (
        {name: x for name, x in values.items() if name not in VARYING}
        for values in (*job.metrics(), result)
    )
    return {
        "arrays": {jax.tree_util.keystr(k): np.asarray(x).tobytes() for k, x in leaves},
        "position": {p.name: p.read_text() for p in sorted(latest.glob("*.json"))},
        "progress": progress._replace(seconds=0.0),
        "metrics": metrics,
        "result": result,
    }


def make_plan(kills: int, stops: int, rng: random.Random) -> list[tuple[str, str]]:
    """Signals in every phase, shuffled in bouts that begin with the data."""
    phases, both = list(PHASES), ("SIGTERM", "SIGINT")
    plan = [("SIGKILL", phases[i % len(phases)]) for i in range(kills)]
    plan += [(both[i % 2], phases[i // 2 % len(phases)]) for i in range(stops)]
    rng.shuffle(plan)
    order = {"data": 0, "start-up": 1, "end": 3}
    bouts = [plan[i : i + 12] for i in range(0, len(plan), 12)]
    return [x for bout in bouts for x in sorted(bout, key=lambda x: order.get(x[1], 2))]


def disturb(
    job: Job, plan: list[tuple[str, str]], rng: random.Random
) -> list[dict[str, Any]]:
    """Sends a job the signals of a plan, and takes them from it, until the job ends or
    a new one is needed."""
    rows = []
    while plan and not job.is_finished:
        name, phase = plan[0]
        if phase == "data" and any(job.folder.glob("data/*/*/[0-9]*")):
            break  # Only a new run makes data.
        row = strike(job, name, phase, rng)
        rows.append(row)
        print(row, flush=True)
        plan.pop(0)
        if name == "SIGKILL" and not row["sent"]:
            plan.append((name, phase))
    return rows


def train_pairs(folder: Path, pairs: int) -> list[dict[str, float]]:
    """Exit codes and seconds of language models trained two at a time."""
    job = ("--task=lm", "--train.steps=5", "--train.warmup=1", "--train.batch_size=8")
    rows = []
    for number, devices in ((n, d) for n in range(pairs) for d in (2, 4, 8)):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LRA_JAX_CPU_DEVICES": f"{devices}",
            "PYTHONPATH": str(ROOT),
        }
        places = [folder / f"pair{number}-{devices}-{which}" for which in "ab"]
        start = time.monotonic()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "lra_jax.train", *job, f"--workdir={place}"],
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            for place in places
        ]
        for process in processes:
            row = {"devices": devices, "code": process.wait(timeout=LIMIT)}
            rows.append(row | {"seconds": round(time.monotonic() - start, 1)})
            print(rows[-1], flush=True)
    return rows


def soak(folder: Path, kills: int, stops: int, rng: random.Random) -> dict[str, Any]:
    """Disturbs runs until there are enough kills and stops; the log of all, and how
    each run differs from an undisturbed one."""
    undisturbed = Job(folder / "alone")
    finish(undisturbed)
    reference = outcome(undisturbed)
    plan, runs = make_plan(kills, stops, rng), []
    while plan:
        job = Job(folder / f"run{len(runs)}")
        rows = disturb(job, plan, rng)
        finish(job)
        result = outcome(job)
        differ = [name for name in reference if result[name] != reference[name]]
        print("differs in", differ, flush=True)
        runs.append({"signals": rows, "differ": differ})
        shutil.rmtree(job.folder)
    rows = [row for run in runs for row in run["signals"]]
    stopped = [row for row in rows if "good" in row]
    return {
        "kills": sum(row["sent"] for row in rows if row["signal"] == "SIGKILL"),
        "runs": len(runs),
        "runs_equal": sum(not run["differ"] for run in runs),
        "stops": len(stopped),
        "stops_good": sum(row["good"] for row in stopped),
        "stops_longest_seconds": max((r["seconds"] for r in stopped), default=0.0),
        "log": runs,
    }


def main() -> None:
    """The command line."""
    options = flags(__doc__, kills=50, stops=14, pairs=0, seed=0).parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        if options.pairs:
            rows = train_pairs(Path(folder), options.pairs)
            good = sum(row["code"] == 0 for row in rows)
            report |= {"paired": len(rows), "paired_good": good, "pairs": rows}
        if options.kills or options.stops:
            os.environ |= ENVIRONMENT
            rng = random.Random(options.seed)
            report |= soak(Path(folder), options.kills, options.stops, rng)
    print({name: x for name, x in report.items() if name not in ("log", "pairs")})
    write(options.out, origin() | report)


if __name__ == "__main__":
    main()
