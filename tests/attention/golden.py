"""Reads the golden cases: outputs and gradients of public reference implementations.

They lie outside the repository, in the folder that ``LRA_JAX_GOLDEN`` names, by default
``../shared/golden`` beside it. Arrays of layout "b h l d" are turned to `[B, T, N, H]`.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

_DEFAULT = Path(__file__).parents[3] / "shared" / "golden"
FOLDER = Path(os.environ.get("LRA_JAX_GOLDEN", _DEFAULT))
AVAILABLE = (FOLDER / "index.json").is_file()
REASON = f"no golden cases in {FOLDER}; LRA_JAX_GOLDEN names their folder"

# Arrays with heads and positions, in the order b h l ...
_PER_POSITION = {"q", "k", "v", "out", "cotangent", "dq", "dk", "dv"}


def select(family: str) -> list[dict[str, Any]]:
    """The index entries of one family, told by the first word of their names."""
    if not AVAILABLE:
        return []
    cases = json.loads((FOLDER / "index.json").read_text())["cases"]
    return [case for case in cases if case["name"].split("_")[0] == family]


def load(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a case in this library's layout."""
    with np.load(FOLDER / case["file"]) as stored:
        arrays = {name: stored[name] for name in stored.files if name != "meta"}
    if case["layout"] != "b h l d":
        return arrays
    return {
        name: np.swapaxes(array, 1, 2)
        if name in _PER_POSITION or name.startswith("aux_")
        else array
        for name, array in arrays.items()
    }
