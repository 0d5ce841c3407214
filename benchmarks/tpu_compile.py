"""Compiles the TPU kernels with the TPUs' own compiler, without a TPU.

    pip install libtpu        # of the version that jax[tpu] asks for
    python benchmarks/tpu_compile.py --out=results/tpu_compile.json

The tests only lower the kernels. They stop before the compiler that assigns registers
and VMEM. This script compiles output and gradients of `linear_attention` and
`cosformer_attention`, causal and not, with arrays as a dense projection returns them.
It records the seconds, the temporary memory and the copies that XLA puts around the
kernels. On four chips of one generation, each has a quarter of the batch; the script
counts the messages between them. It says nothing about speed or results on a device.
"""

import argparse
import itertools
import os
import re
import sys
import time
from typing import Any

from common import origin, write

GENERATIONS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# dtype, heads N, H, Hv.
SHAPES = (
    ("bfloat16", 8, 64, 64),
    ("float32", 8, 64, 64),
    ("bfloat16", 4, 16, 16),
    ("bfloat16", 4, 128, 128),
    ("bfloat16", 2, 256, 256),
    ("float32", 2, 256, 256),
    ("bfloat16", 6, 48, 48),
    ("float32", 3, 20, 36),
)
MECHANISMS = ("linear", "cosformer")
MESSAGES = r" (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-\w+)[-(]"


def main() -> int:
    """The command line; 1 if the compiler refused anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1000, help="positions T")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    try:
        import libtpu
    except ImportError:
        print("libtpu: expected to be installed (pip install libtpu), got none")
        return 2
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    os.environ["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
    found = []
    cases = [(name, 1, SHAPES if name == "v5e" else SHAPES[:1]) for name in GENERATIONS]
    # All shapes for one generation, the usual one for the others and for four chips.
    for generation, chips, shapes in (*cases, ("v5e", 4, SHAPES[:1])):
        device = _Chips(GENERATIONS[generation], chips)
        length = options.length
        forms = itertools.product(MECHANISMS, (True, False), shapes, (length,))
        for name, causal, shape, length in forms:
            record = {"generation": generation, "chips": chips}
            record |= {"mechanism": name, "causal": causal, "T": length}
            record |= dict(zip(("dtype", "N", "H", "Hv"), shape, strict=True))
            record |= device.compile(name, causal, length, *shape)
            print(record, flush=True)
            found.append(record)
    if options.out:
        report = {
            "batch_per_chip": 2,
            "compiled": found,
            **origin("libtpu", device=False),
        }
        write(options.out, report)
    return int(any("error" in record for record in found))


class _Chips:
    """Chips of an absent topology, between which the batch is split."""

    def __init__(self, topology: str, count: int):
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        self.mesh = Mesh(np.array(found.devices[:count]), ("data",))
        self.sharding = NamedSharding(self.mesh, PartitionSpec("data"))

    def compile(
        self, name: str, causal: bool, length: int, dtype: str, *sizes: int
    ) -> dict[str, Any]:
        """Compiles output and gradients; if the compiler refuses, its message."""
        import jax

        from lra_jax.kernels import selection

        heads, width, value_width = sizes
        # As if the default device were a TPU.
        selection._own_target = lambda: "tpu"
        rows = (2 * self.mesh.size, length)
        flat = [
            jax.ShapeDtypeStruct((*rows, heads * x), dtype)
            for x in (width, width, value_width)
        ]
        mask = jax.ShapeDtypeStruct(rows, bool)
        where: Any = {"in_shardings": self.sharding, "out_shardings": self.sharding}
        begun = time.perf_counter()
        try:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                slope = jax.jit(_slope(name, causal, heads), **where)
                compiled = slope.lower(*flat, mask).compile()
        except Exception as error:
            return {"error": str(error)[:300]}
        text = compiled.as_text() or ""
        memory: Any = compiled.memory_analysis()
        return {
            "seconds": round(time.perf_counter() - begun, 1),
            "temporary_bytes": memory.temp_size_in_bytes,
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "copies": text.count(" copy("),
            "messages": len(re.findall(MESSAGES, text)),
        }


def _slope(name: str, causal: bool, heads: int) -> Any:
    """Output and gradients of arrays `[B, T, N H]`."""
    import jax

    from lra_jax import attention

    def run(*arrays: Any) -> Any:
        *flat, mask = arrays

        def attend(*flat: Any) -> Any:
            parts = [x.reshape(*x.shape[:2], heads, -1) for x in flat]
            function = getattr(attention, f"{name}_attention")
            more = {"is_causal": causal, "implementation": "pallas"}
            out = function(*parts, mask, **more)
            return out.reshape(flat[2].shape)

        out, pullback = jax.vjp(attend, *flat)
        return out, pullback(out)

    return run


if __name__ == "__main__":
    sys.exit(main())
