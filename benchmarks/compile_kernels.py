"""Compiles the Pallas kernels with the devices' own compilers, without a device.

    pip install libtpu        # of the version that jax[tpu] asks for
    python benchmarks/compile_kernels.py tpu --out=results/tpu_compile.json
    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python benchmarks/compile_kernels.py gpu --out=results/gpu_compile.json

The tests only lower the kernels. They stop before the compiler that assigns registers
and memory. This script compiles output and gradients, with a mask, and with arrays as a
dense projection returns them; it says nothing about speed or results on a device.

tpu: the seconds, the temporary memory, and the copies that XLA puts around the kernels
  of linear attention and cosFormer. On four chips of one generation, each has a quarter
  of the batch; the script counts the messages between them.
gpu: for an H100, and also of Flow, not causal; the registers of each kernel, of which a
  thread has 255, and the bytes that a thread spills into local memory.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from common import flags, origin, write

GENERATIONS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# The device as the compiler sees it; from the data sheet and CUDA occupancy tables.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FORMS = tuple(itertools.product(("linear", "cosformer"), (True, False)))
# Dtype, B, T, N, H, Hv.
TPU_SHAPES = (
    ("bfloat16", 2, 1000, 8, 64, 64),
    ("float32", 2, 1000, 8, 64, 64),
    ("bfloat16", 2, 1000, 4, 16, 16),
    ("bfloat16", 2, 1000, 4, 128, 128),
    ("bfloat16", 2, 1000, 2, 256, 256),
    ("float32", 2, 1000, 2, 256, 256),
    ("bfloat16", 2, 1000, 6, 48, 48),
    ("float32", 2, 1000, 3, 20, 36),
)
# One head per processor, segments of heads, padded heads.
GPU_SHAPES = (
    ("bfloat16", 16, 4096, 8, 64, 64),
    ("bfloat16", 1, 16384, 8, 64, 64),
    ("bfloat16", 2, 1000, 4, 48, 40),
)
MESSAGES = r" (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-\w+)[-(]"

Case = dict[str, Any]


def cases(target: str) -> Iterator[Case]:
    """All forms and shapes; for TPUs all shapes on one generation, the usual one on the
    others and on four chips."""
    devices: list[tuple[Case, tuple[Any, ...]]] = [({"chips": 1}, GPU_SHAPES)]
    forms = (*FORMS, ("flow", False))
    if target == "tpu":
        forms = FORMS
        devices = [({"generation": x, "chips": 1}, TPU_SHAPES[:1]) for x in GENERATIONS]
        devices[1] = (devices[1][0], TPU_SHAPES)
        devices.append(({"generation": "v5e", "chips": 4}, TPU_SHAPES[:1]))
    for device, shapes in devices:
        for (mechanism, causal), shape in itertools.product(forms, shapes):
            sizes = zip(("dtype", "B", "T", "N", "H", "Hv"), shape, strict=True)
            form = {"mechanism": mechanism, "causal": causal}
            yield {"target": target, **device, **form, **dict(sizes)}


def compile_apart(case: Case) -> Case:
    """Compiles in a process of its own, since ptxas does not write through Python."""
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"}
    if case["target"] == "tpu":
        import libtpu

        environment |= {"TPU_SKIP_MDS_QUERY": "1"}
        environment["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
    start = time.perf_counter()
    end = subprocess.run(
        [sys.executable, __file__, case["target"], f"--case={json.dumps(case)}"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    *lines, last = end.stdout.strip().splitlines() or [""]
    if end.returncode:
        return {"error": last[:300]}
    figures = {"seconds": round(time.perf_counter() - start, 1), **json.loads(last)}
    if case["target"] == "gpu":
        patterns = {"registers": r"Used (\d+) registers"}
        patterns["spilled_bytes"] = r"bytes stack frame, (\d+) bytes spill stores"
        text = "\n".join(lines)
        for name, pattern in patterns.items():
            figures[name] = [int(x) for x in re.findall(pattern, text)]
    return figures


def compile_here(case: Case) -> Case:
    """Compiles for an absent device."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from lra_jax import attention
    from lra_jax.kernels import selection

    target, heads = case["target"], case["N"]
    jax.devices()  # Loads the plug-ins.
    place: Case = {"platform": "cuda", "target_config": H100, "topology": "1x1x1"}
    name = ""
    if target == "tpu":
        place, name = {"platform": "tpu"}, GENERATIONS[case["generation"]]
    devices = topologies.get_topology_desc(name, **place).devices
    mesh = Mesh(np.array(devices[: case["chips"]]), ("data",))
    by_sample = NamedSharding(mesh, PartitionSpec("data"))
    # As if the default device were the absent one.
    selection._own_target = lambda: target

    def slope(*arrays: Any) -> Any:
        *flat, mask = arrays

        def attend(*flat: Any) -> Any:
            parts = [x.reshape(*x.shape[:2], heads, -1) for x in flat]
            function = getattr(attention, f"{case['mechanism']}_attention")
            more = {"is_causal": case["causal"], "implementation": "pallas"}
            return function(*parts, mask, **more).reshape(flat[2].shape)

        out, pullback = jax.vjp(attend, *flat)
        return out, pullback(out)

    rows = (case["B"] * case["chips"], case["T"])
    arrays = [
        jax.ShapeDtypeStruct((*rows, heads * case[width]), case["dtype"])
        for width in ("H", "H", "Hv")
    ]
    arrays += [jax.ShapeDtypeStruct(rows, bool)]
    places: Any = {"in_shardings": by_sample, "out_shardings": by_sample}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(slope, **places).lower(*arrays).compile()
    memory: Any = compiled.memory_analysis()
    figures: Case = {"temporary_bytes": memory.temp_size_in_bytes}
    if target == "tpu":
        text = compiled.as_text() or ""
        figures["kernels"] = text.count('custom_call_target="tpu_custom_call"')
        figures["copies"] = text.count(" copy(")
        figures["messages"] = len(re.findall(MESSAGES, text))
    return figures


def main() -> int:
    """The command line; 1 if the compiler refused anything."""
    parser = flags((__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=("tpu", "gpu"))
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        figures = compile_here(options.case)
        sys.stderr.flush()
        print(json.dumps(figures), flush=True)
        return 0
    records = []
    for case in cases(options.target):
        records.append(case | compile_apart(case))
        print(records[-1], flush=True)
    package = "libtpu" if options.target == "tpu" else "jax-cuda12-plugin"
    write(options.out, {"compiled": records, **origin(package, device=False)})
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
