"""Times the parts of a block other than attention, and the forms that they replaced.

    python benchmarks/mixer_parts.py --out=results/mixer_parts.json

Forward and gradient, batch 32, 1,024 positions, 128 columns, float32, minimum of
--repeats runs, with the forms in turns. A ratio is a time divided by that of our form.

short_conv: the convolution of size 5, as used here (`convolved`), with the gradient
  that XLA derives from the same sum of shifts, and as a grouped convolution of XLA.
scan: the recurrence of hgrn over 128 heads of one column, as used here
  (`scan_columns`), and over an array that keeps the axis of one column.
norm: hgrn's norm over all heads, on one axis, and over two.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import origin, write

from lra_jax.attention.feature_maps import normalised
from lra_jax.attention.recurrent import columns
from lra_jax.models import short_conv

BATCH, LENGTH, COLUMNS, TAPS = 32, 1024, 128, 5


def derived(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The sum of shifts, with its gradient left to XLA."""
    before = TAPS // 2
    padded = jnp.pad(x, ((0, 0), (before, TAPS - 1 - before), (0, 0)))
    rows = kernel[:, None, None]
    taps = (padded[:, tap : tap + LENGTH] * rows[tap] for tap in range(TAPS))
    return sum(taps, start=jnp.zeros((), x.dtype))


def grouped(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """XLA's convolution with a group for each column."""
    return jax.lax.conv_general_dilated(
        x,
        kernel[:, None],
        window_strides=(1,),
        padding="SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=COLUMNS,
    )


def last_axis(factors: jax.Array, values: jax.Array) -> jax.Array:
    """The scan over `[T, B, N, 1]`."""
    factors, values = (jnp.swapaxes(x, 0, 1)[..., None] for x in (factors, values))
    states: Any = columns._scan(False, factors, values, jnp.zeros_like(values[0]))
    return jnp.swapaxes(states[..., 0], 0, 1)


FORMS: dict[str, dict[str, Callable[..., jax.Array]]] = {
    "short_conv": {
        "ours": lambda x, k: short_conv.convolved(x, k, TAPS // 2),
        "derived gradient": derived,
        "grouped convolution": grouped,
    },
    "scan": {
        "ours": lambda a, x: columns.scan_columns(a, x[..., None])[0][..., 0],
        "axis of one column": last_axis,
    },
    "norm": {
        "ours": lambda x: normalised(x, "rms", (2,), 1e-6),
        "two axes": lambda x: normalised(x[..., None], "rms", (2, 3), 1e-6)[..., 0],
    },
}


def inputs(part: str) -> tuple[jax.Array, ...]:
    """The arrays of a part."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, COLUMNS)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(TAPS, COLUMNS)), jnp.float32)
    return {
        "short_conv": (x, kernel),
        "scan": (jax.nn.sigmoid(x), x),
        "norm": (x,),
    }[part]


def timed(part: str, repeats: int) -> dict[str, float]:
    """Milliseconds of each form, minimum of its runs, after a check that they agree."""
    arrays = inputs(part)
    runs = {}
    for name, form in FORMS[part].items():

        def both(*arrays: jax.Array, form: Callable[..., jax.Array] = form) -> Any:
            out, pull = jax.vjp(form, *arrays)
            return out, pull(jnp.flip(arrays[0], 0))

        runs[name] = jax.jit(both)
    made = {name: jax.block_until_ready(run(*arrays)) for name, run in runs.items()}
    for one in made.values():
        for got, wanted in zip(
            jax.tree.leaves(one), jax.tree.leaves(made["ours"]), strict=True
        ):
            error = jnp.abs(got - wanted).max() / jnp.abs(wanted).max()
            if not error < 1e-4:
                raise ValueError(f"{part}: expected equal forms, got error {error}")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * min(found) for name, found in seconds.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    parts = {}
    for part in FORMS:
        found = timed(part, options.repeats)
        parts[part] = {
            name: {"ms": round(ms, 2), "ratio": round(ms / found["ours"], 2)}
            for name, ms in found.items()
        }
        print(part, parts[part])
    report = origin() | {"shape": [BATCH, LENGTH, COLUMNS], "parts": parts}
    write(options.out, report)


if __name__ == "__main__":
    main()
