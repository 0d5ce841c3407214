"""Kills runs at random moments, resumes them, and compares them with undisturbed ones.

    python benchmarks/soak.py --kills=50 --stops=20 --out=results/soak.json

A small run on generated ListOps is trained repeatedly, in one process and in two. Each
time a phase is chosen (start-up, data, compilation, step, evaluation, checkpoint, end),
and at a random moment of it the run's processes, or sometimes only one of two, get a
SIGKILL; then the same command resumes. Parameters, optimiser, metric sums, position in
the data, metrics and result at the end must equal those of an undisturbed run, bit for
bit. Stops are SIGINT and SIGTERM in the same phases: the run must end with their exit
code and one line. The log lists every one of them, with its phase, and for stops the
seconds until the process was gone.

Kills during start-up use new commands. The other processes are forks of this one, which
has imported everything, and find their programs already compiled, except for those
killed in a compilation: so each takes two seconds instead of ten.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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
    # A fork cannot restart itself.
    "LRA_JAX_ALLOCATOR": "system",
}
FORK = multiprocessing.get_context("fork")
# In a report: whether all its steps were compiled depends on where a session began.
TIMES = ("seconds", "steps_per_second", "warm", "data_wait")
# In a result: whatever differs from run to run, and the seal over it.
VARYING = (
    *("seconds", "steps_per_second", "steps_per_second_kind", "command"),
    *("data_wait", "peak_memory_bytes", "seal"),
)
# Seconds; also those of a phase.
LIMIT = 600
IMPORTS = (
    *("lra_jax.train", "lra_jax.training.session", "lra_jax.data.listops", "tyro"),
    *("lra_jax.attention.linear.cosformer", "lra_jax.tasks.checks", "grain"),
)


@dataclasses.dataclass
class Job:
    """One run: its place, and its number of processes."""

    folder: Path
    processes: int
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
    def output(self) -> Path:
        return self.folder / "output.txt"

    def start(self, phase: str = "") -> list["Process"]:
        """Starts its processes, to be ended in a phase.

        The output of process 0 goes to `output`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        port, started = free_port(), []
        cache = self.folder.parent / "cache"
        if phase == "compilation":
            cache = self.folder / f"cache-{time.time_ns()}"
        for index in range(self.processes):
            job = []
            if self.processes > 1:
                job = ["--distributed=True", f"--coordinator=127.0.0.1:{port}"]
                job += [f"--num_processes={self.processes}", f"--process_id={index}"]
            name = self.output if index == 0 else self.folder / f"output{index}.txt"
            environment = {
                "LRA_JAX_CPU_DEVICES": str(2 // self.processes),
                "JAX_COMPILATION_CACHE_DIR": str(cache),
            }
            name.write_bytes(b"")  # Phases are detected in it.
            start = _command if phase == "start-up" else _fork
            started.append(start([*self.flags, *job], environment, name))
        self.begun, self.pid = time.time(), started[0].pid
        return started

    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of its metrics."""
        with contextlib.suppress(OSError, ValueError):
            text = (self.workdir / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines()]
        return []

    def printed(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


class Process(Protocol):
    """The parts of `subprocess.Popen` that are used."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


class Fork:
    """A process that is a copy of this one and calls a function."""

    def __init__(self, function: Callable[..., None], *args: Any):
        self._process = FORK.Process(target=function, args=args)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _fork(flags: list[str], environment: dict[str, str], output: Path) -> Process:
    return Fork(_train, flags, environment, output)


def _command(flags: list[str], environment: dict[str, str], output: Path) -> Process:
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "lra_jax.train", *flags]
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(command, env=variables, stdout=out, stderr=err)


def _train(flags: list[str], environment: dict[str, str], output: Path) -> None:
    """Does the work of `python -m lra_jax.train`, in a fork."""
    import jax

    from lra_jax import signals, train

    for stream, path in ((1, output), (2, output.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ |= environment
    faulthandler.dump_traceback_later(LIMIT / 2)  # Shows where it hangs, if it does.
    folder = environment["JAX_COMPILATION_CACHE_DIR"]
    jax.config.update("jax_compilation_cache_dir", folder)
    sys.argv = ["train", *flags]
    signals.watch()
    signals.run(train.main)


def in_fork(function: Callable[[], Any]) -> Any:
    """The result of a function that uses devices, which forks cannot share."""
    reading, writing = FORK.Pipe(duplex=False)
    process = Fork(lambda: writing.send(function()))
    writing.close()
    try:
        return reading.recv()
    finally:
        process.wait()


def _watching(job: Job) -> bool:
    """Whether it handles SIGTERM yet; before that, Python itself is starting."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{job.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _fresh(job: Job, pattern: str) -> bool:
    """Whether a folder was made after the start."""
    for path in job.folder.glob(pattern):
        with contextlib.suppress(OSError):
            if path.stat().st_ctime > job.begun:
                return True
    return False


def _data(job: Job) -> bool:
    return _fresh(job, "data/*/*/incomplete.*")


def _compilation(job: Job) -> bool:
    return str(job.workdir) in job.printed()


def _step(job: Job) -> bool:
    return "loss" in job.printed()


def _evaluation(job: Job) -> bool:
    last = (job.metrics() or [{"step": 1, "split": ""}])[-1]
    due = last["split"] == "train" and last["step"] % EVAL_EVERY == 0
    return due and _step(job)


def _checkpoint(job: Job) -> bool:
    return _fresh(job, "run/checkpoints/*/*.orbax-checkpoint-tmp*")


def _end(job: Job) -> bool:
    return "scoring the test split" in job.printed()


# How to detect that a phase has begun, and about how many seconds it lasts.
PHASES: dict[str, tuple[Callable[[Job], bool], float]] = {
    "start-up": (_watching, 4.0),
    "data": (_data, 1.0),
    "compilation": (_compilation, 2.0),
    "step": (_step, 1.0),
    "evaluation": (_evaluation, 0.5),
    "checkpoint": (_checkpoint, 0.1),
    "end": (_end, 1.0),
}


def await_phase(job: Job, process: Process, phase: str, rng: random.Random) -> bool:
    """Waits for a random moment of a phase; False if the process ended first."""
    begun, lasts = PHASES[phase]
    deadline = time.monotonic() + LIMIT
    while not begun(job):
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"{phase} did not begin: {job.printed()}")
        time.sleep(0.001)
    time.sleep(rng.random() * lasts)
    return process.poll() is None


def kill(job: Job, phase: str, rng: random.Random) -> dict[str, Any] | None:
    """Starts a job and kills it in a phase; None if it ended first."""
    processes = job.start(phase)
    try:
        if not await_phase(job, processes[0], phase, rng):
            return None
        alone = len(processes) > 1 and rng.random() < 0.5
        victims = [rng.choice(processes)] if alone else processes
        for victim in victims:
            victim.kill()
        if alone:  # The other one notices, or is killed likewise.
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(p for p in processes if p not in victims).wait(timeout=5)
        return {"phase": phase, "killed": len(victims), **progress(job)}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def stop(job: Job, phase: str, signum: int, rng: random.Random) -> dict[str, Any]:
    """Starts a job and sends it a signal in a phase; how it ended."""
    (process,) = job.start(phase)
    sent = await_phase(job, process, phase, rng)
    begun = time.monotonic()
    if sent:
        process.send_signal(signum)
    try:
        code = process.wait(timeout=LIMIT)
    finally:
        process.kill()
    seconds = time.monotonic() - begun
    errors = job.output.with_suffix(".err").read_text().splitlines()
    lines = [*job.printed().splitlines()[-1:], *errors]
    lines = [line.replace(str(job.folder), "FOLDER") for line in lines]
    told = [line for line in lines if "interrupted" in line or "saved step" in line]
    row = {"phase": phase, "signal": signal.Signals(signum).name, "code": code}
    row |= {"seconds": round(seconds, 2), "line": (told or [""])[-1][:60]}
    finished = code == 0 and (job.workdir / "result.json").exists()
    good = (code == 128 + signum and len(told) == 1) or finished
    good = good and not any("Traceback" in line for line in errors)
    return row | {"sent": sent, "good": good, **progress(job)}


def progress(job: Job) -> dict[str, int]:
    """The last reported step."""
    return {"step": max((line["step"] for line in job.metrics()), default=0)}


def finish(job: Job) -> None:
    """Resumes a job until it ends.

    If one process fails, the other may wait for it: it is killed, and the error has
    what both printed.
    """
    processes = job.start()
    deadline = time.monotonic() + LIMIT
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    if any(code != 0 for code in codes):
        said = [path.read_text() for path in sorted(job.folder.glob("*.err"))]
        raise RuntimeError("\n".join([f"exit codes {codes}", *said]))


def outcome(job: Job) -> dict[str, Any]:
    """Everything that must be equal at the end: arrays as bytes, numbers, lines."""
    from lra_jax import cli
    from lra_jax.training.session import Session

    config = cli.parse_config("soak", "", job.flags)
    with Session(config, quiet=True) as session:
        # Each process has its own positions in the data, which are compared as files.
        state, progress = session.trainer.checkpoints.restore(
            session.trainer.state, session.trainer.data if job.processes == 1 else None
        )
    import jax
    import numpy as np

    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {jax.tree_util.keystr(k): np.asarray(x).tobytes() for k, x in leaves}
    latest = job.workdir / "checkpoints" / "latest" / str(STEPS) / "data"
    assert session.result is not None
    return {
        "arrays": arrays,
        "progress": progress._replace(seconds=0.0),
        "position": {p.name: p.read_text() for p in sorted(latest.glob("*.json"))},
        "metrics": [
            {name: value for name, value in line.items() if name not in TIMES}
            for line in job.metrics()
        ],
        "result": {
            n: v for n, v in session.result.to_dict().items() if n not in VARYING
        },
    }


def soak(
    folder: Path,
    processes: int,
    kills: int,
    stops: int,
    rng: random.Random,
    log: dict[str, Any],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Kills and stops runs with this many processes until there are enough of each.

    Args:
      folder: folder for the runs; they are removed.
      processes: number of processes in each run.
      kills, stops: how many.
      rng: chooses phases and moments.
      log: receives every kill and stop, and the differences found in every completed
        run.
      keep: called after each run.
    """
    alone = Job(folder / "alone", processes)
    finish(alone)
    wanted = in_fork(lambda: outcome(alone))
    log |= {"processes": processes, "kills": [], "stops": [], "runs": []}
    plan = _plan(kills, stops, rng)
    number = 0
    while plan:
        number += 1
        job = Job(folder / f"run{number}", processes)
        rows = 0
        while plan and not (job.workdir / "result.json").exists():
            what, phase = plan[0]
            if phase == "data" and any(job.folder.glob("data/*/*/[0-9]*")):
                break  # Only a new run makes data.
            plan.pop(0)
            if what == "kill":
                row = kill(job, phase, rng)
                if row is None:
                    plan.append((what, phase))
                else:
                    log["kills"].append({"run": number, **row})
            else:
                row = stop(job, phase, getattr(signal, what), rng)
                log["stops"].append({"run": number, **row})
            rows += row is not None
            print(number, what, phase, row, flush=True)
        finish(job)
        found = in_fork(lambda job=job: outcome(job))
        differing = [name for name in wanted if found[name] != wanted[name]]
        log["runs"].append({"run": number, "disturbed": rows, "differ": differing})
        print(number, "differs in", differing, flush=True)
        shutil.rmtree(job.folder)
        keep()


def _plan(kills: int, stops: int, rng: random.Random) -> list[tuple[str, str]]:
    """Kills and stops in every phase, shuffled in bouts that begin with the data."""
    phases = list(PHASES)
    names = [("kill", phases[i % len(phases)]) for i in range(kills)]
    both = ("SIGTERM", "SIGINT")
    names += [(both[i % 2], phases[i // 2 % len(phases)]) for i in range(stops)]
    rng.shuffle(names)
    bout = 12
    order = {name: index for index, name in enumerate(["data", "start-up", "other"])}
    parts = [names[i : i + bout] for i in range(0, len(names), bout)]
    for part in parts:
        part.sort(key=lambda x: order.get(x[1], 2))
        part.sort(key=lambda x: x[1] == "end")
    return [name for part in parts for name in part]


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--processes", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare()
    about = in_fork(origin)
    rng = random.Random(options.seed)
    begun = time.monotonic()
    logs: list[dict[str, Any]] = []

    def keep() -> None:
        minutes = round((time.monotonic() - begun) / 60, 1)
        if options.out is not None:
            write(options.out, summary(logs) | about | {"minutes": minutes})

    both = [(1, 0.6), (2, 0.4)]
    chosen = [(n, 1.0) for n, _ in both if n == options.processes] or both
    for processes, share in chosen:
        logs.append({})
        kills = round(options.kills * share)
        stops = options.stops if processes == 1 else 0
        with tempfile.TemporaryDirectory(prefix="soak") as folder:
            soak(Path(folder), processes, kills, stops, rng, logs[-1], keep)
    counted = {name: n for name, n in summary(logs).items() if name != "logs"}
    print(json.dumps(counted, indent=2))


def prepare() -> None:
    """Imports what a run needs, without initialising the devices."""
    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(ROOT))
    for name in IMPORTS:
        importlib.import_module(name)


def summary(logs: list[dict[str, Any]]) -> dict[str, Any]:
    """The outcome, in a few numbers, and the logs."""
    equal = [not run["differ"] for log in logs for run in log["runs"]]
    stopped = [row for log in logs for row in log["stops"]]
    return {
        "kills": sum(len(log["kills"]) for log in logs),
        "runs": len(equal),
        "runs_equal": sum(equal),
        "stops": len(stopped),
        "stops_good": sum(row["good"] for row in stopped),
        "stops_longest_seconds": max((r["seconds"] for r in stopped), default=0.0),
        "logs": logs,
    }


if __name__ == "__main__":
    main()
