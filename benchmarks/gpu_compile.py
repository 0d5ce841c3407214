"""Compiles the Hopper kernels with NVIDIA's own assembler, without a GPU.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python benchmarks/gpu_compile.py --out=results/gpu_compile.json

The tests only lower the kernels. They stop before ptxas, which gives each thread its
255 registers and spills the rest into local memory. This script compiles output and
gradients of `linear_attention` and `cosformer_attention`, and of `flow_attention`, not
causal, for an H100.
It records the registers of each kernel, in the order of compilation, and the bytes that
a thread spills. It says nothing about speed or results on a device.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from typing import Any

from common import origin, write

# The device as the compiler sees it; from the data sheet and CUDA occupancy tables.
TARGET = """
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
FORMS = (
    *itertools.product(("linear", "cosformer"), (True, False)),
    ("flow", False),
)
# B, T, N, H, Hv: one head per processor, segments of heads, padded heads.
SHAPES = (
    (16, 4096, 8, 64, 64),
    (1, 16384, 8, 64, 64),
    (2, 1000, 4, 48, 40),
)
_SPILLS = re.compile(r"bytes stack frame, (\d+) bytes spill stores")
_REGISTERS = re.compile(r"Used (\d+) registers")


def main() -> int:
    """The command line; 1 if the compiler refused anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, causal, *sizes = options.worker
        compile_here(name, causal == "True", [int(size) for size in sizes])
        return 0
    found = []
    for (name, causal), shape in itertools.product(FORMS, SHAPES):
        record: dict[str, Any] = {"mechanism": name, "causal": causal}
        record |= dict(zip(("B", "T", "N", "H", "Hv"), shape, strict=True))
        record |= compiled(name, causal, shape)
        print(record, flush=True)
        found.append(record)
    if options.out:
        report = {
            "dtype": "bfloat16",
            "compiled": found,
            **origin(device=False),
        }
        write(options.out, report)
    return int(any("error" in record for record in found))


def compiled(name: str, causal: bool, shape: tuple[int, ...]) -> dict[str, Any]:
    """The figures of ptxas. It does not write through Python, hence the subprocess."""
    arguments = ["--worker", name, str(causal), *map(str, shape)]
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"}
    begun = time.perf_counter()
    end = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if end.returncode:
        return {"error": end.stdout.strip().splitlines()[-1][:300]}
    registers = [int(x) for x in _REGISTERS.findall(end.stdout)]
    return {
        "seconds": round(time.perf_counter() - begun, 1),
        "registers": registers,
        "spilled_bytes": [int(x) for x in _SPILLS.findall(end.stdout)],
        "temporary_bytes": int(end.stdout.strip().splitlines()[-1]),
    }


def compile_here(name: str, causal: bool, sizes: list[int]) -> None:
    """Compiles for an absent GPU; the last line printed is the temporary bytes."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from lra_jax import attention
    from lra_jax.kernels import selection

    jax.devices()  # Loads the plug-ins.
    given = {"target_config": TARGET, "topology": "1x1x1"}
    found = topologies.get_topology_desc("", platform="cuda", **given)
    mesh = Mesh(np.array(found.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    # As if the default device were a GPU.
    selection._own_target = lambda: "gpu"

    def slope(*arrays: Any) -> Any:
        def attend(*arrays: Any) -> Any:
            more = {"is_causal": causal, "implementation": "pallas"}
            return getattr(attention, f"{name}_attention")(*arrays, **more)

        out, pullback = jax.vjp(attend, *arrays)
        return out, pullback(out)

    batch, length, heads, width, value_width = sizes
    arrays = [
        jax.ShapeDtypeStruct((batch, length, heads, x), "bfloat16", sharding=whole)
        for x in (width, width, value_width)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        memory: Any = jax.jit(slope).lower(*arrays).compile().memory_analysis()
    sys.stderr.flush()
    print(memory.temp_size_in_bytes, flush=True)


if __name__ == "__main__":
    sys.exit(main())
