"""Times our training step and the same model in PyTorch, in turns, on the CPU.

    python benchmarks/pytorch_step.py --torch-python=/venv/bin/python --length=1216

Both train ListOps' compact model (2 layers of 64, 2 heads, MLP 128, dropout 0.1, mean
pooling) on one random batch of 32 with padding: forward, backward, gradients clipped,
AdamW. PyTorch runs in its own process, under any Python that has torch (no other
package), with as many threads as there are cores. Its softmax is
``scaled_dot_product_attention``; its linear attention and cosFormer are the usual two
batched products. ``--compile`` runs it through ``torch.compile``, which needs a C++
compiler. The processes take turns, so a slow spell of the machine affects both.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("softmax", "linear", "cosformer")
BATCH, VOCAB, CLASSES, WIDTH, HEADS, HIDDEN, LONGEST = 32, 16, 10, 64, 2, 128, 2000


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default=",".join(NAMES))
    parser.add_argument("--length", type=int, default=1216, help="tokens")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.attention.split(",")
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"--attention: expected some of {','.join(NAMES)}, got {unknown}")
    if options.worker:
        work(names, options.length, options.compile)
    else:
        compare(options, names)


def compare(options: Any, names: list[str]) -> None:
    """Times both and prints the figures; writes them with ``--out``."""
    from lra_jax import runtime

    runtime.tune_allocator()
    runtime.configure_jax()
    from train_step import _Step

    from lra_jax.training.session import commit, describe_devices, versions

    with Worker(options) as worker:
        steps = {name: _Step(name, "compact", options.length) for name in names}
        times: dict[str, dict[str, list[float]]] = {
            name: {"ours": [], "pytorch": []} for name in names
        }
        for turn in range(options.repeats + 1):
            for name in names:
                both = {"ours": steps[name].time(), "pytorch": worker.time(name)}
                for side, seconds in both.items():
                    if turn:  # The first one warms up.
                        times[name][side].append(seconds)
        torch_version = worker.version
    report: dict[str, Any] = {"length": options.length, "batch_size": BATCH}
    report["cores"] = len(os.sched_getaffinity(0))
    report["mechanisms"] = {name: _row(times[name]) for name in names}
    for name, row in report["mechanisms"].items():
        print(name, row)
    if options.out:
        report |= {
            "command": shlex.join(["python", *_public(sys.argv)]),
            "commit": commit(),
            "device": describe_devices(),
            "versions": versions() | {"torch": torch_version},
        }
        Path(options.out).write_text(json.dumps(report, indent=2) + "\n")


def _public(arguments: list[str]) -> list[str]:
    """The command without a path of this machine."""
    return [x for x in arguments if not x.startswith("--torch-python")]


def _row(times: dict[str, list[float]]) -> dict[str, float]:
    medians = {side: statistics.median(found) for side, found in times.items()}
    ratios = [b / a for a, b in zip(times["ours"], times["pytorch"], strict=True)]
    return {
        "ours_median_ms": round(1e3 * medians["ours"], 1),
        "ours_fastest_ms": round(1e3 * min(times["ours"]), 1),
        "pytorch_median_ms": round(1e3 * medians["pytorch"], 1),
        "pytorch_fastest_ms": round(1e3 * min(times["pytorch"]), 1),
        "pytorch_by_ours": round(statistics.median(ratios), 2),
    }


class Worker:
    """The process with torch: takes a mechanism's name, returns seconds."""

    def __init__(self, options: Any):
        flags = [f"--length={options.length}", f"--attention={options.attention}"]
        flags += ["--compile"] if options.compile else []
        self._process = subprocess.Popen(
            [options.torch_python, __file__, "--worker", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version: str = self._read()

    def time(self, name: str) -> float:
        """Seconds of one step."""
        print(name, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        stdout = self._process.stdout
        line = "" if stdout is None else stdout.readline()
        if not line:
            raise SystemExit(f"PyTorch's process ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def work(names: list[str], length: int, compiled: bool) -> None:
    """The worker's side; everything below needs torch."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(json.dumps(torch.__version__), flush=True)
    steps = {name: _torch_step(name, length, compiled) for name in names}
    for line in sys.stdin:
        begun = time.perf_counter()
        steps[line.strip()]()
        print(json.dumps(time.perf_counter() - begun), flush=True)


def _torch_step(name: str, length: int, compiled: bool) -> Any:
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    model = _torch_model(name)
    if compiled:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.98))
    tokens = torch.randint(1, VOCAB, (BATCH, length))
    lengths = torch.randint(length // 2, length, (BATCH,))
    labels = torch.randint(0, CLASSES, (BATCH,))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(tokens, lengths), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _torch_attention(name: str) -> Callable[..., Any]:
    import torch
    from torch.nn import functional

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        """`[B, N, T, H]` and a mask `[B, T]` to `[B, N, T, H]`."""
        if name == "softmax":
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask[:, None, None]
            )
        if name == "linear":
            query, key = functional.elu(query) + 1, functional.elu(key) + 1
        else:
            query, key = functional.relu(query), functional.relu(key)
            angles = torch.arange(query.shape[2])[:, None] * (math.pi / 2 / LONGEST)
            query, key = (
                torch.cat([x * torch.cos(angles), x * torch.sin(angles)], -1)
                for x in (query, key)
            )
        key = key * mask[:, None, :, None]
        sums = (query * key.sum(2, keepdim=True)).sum(-1, keepdim=True)
        return query @ (key.transpose(2, 3) @ value) / sums.clamp_min(1e-6)

    return attend


def _torch_model(name: str) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    attend = _torch_attention(name)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
            self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.inner = nn.Linear(WIDTH, HIDDEN)
            self.outer = nn.Linear(HIDDEN, WIDTH)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Any, mask: Any) -> Any:
            normal = self.norms[0](x)
            query, key, value = (
                layer(normal).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for layer in self.maps[:3]
            )
            out = attend(query, key, value, mask).transpose(1, 2).flatten(2)
            x = x + self.dropout(self.maps[3](out))
            hidden = functional.gelu(self.inner(self.norms[1](x)), approximate="tanh")
            return x + self.dropout(self.outer(self.dropout(hidden)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, WIDTH)
            self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH) * 0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
            self.hidden = nn.Linear(WIDTH, HIDDEN)
            self.logits = nn.Linear(HIDDEN, CLASSES)
            self.dropout = nn.Dropout(0.1)

        def forward(self, tokens: Any, lengths: Any) -> Any:
            mask = torch.arange(tokens.shape[1]) < lengths[:, None]
            x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
            x = self.dropout(x)
            for block in self.blocks:
                x = block(x, mask)
            x = self.norm(x) * mask[..., None]
            mean = x.sum(1) / lengths[:, None]
            return self.logits(functional.relu(self.hidden(mean)))

    return Model().train()


if __name__ == "__main__":
    main()
