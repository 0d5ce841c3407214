"""The published efficiency tables that the views show with our figures.

Rows are named after our mechanisms; None is a cell that the paper leaves empty or marks
as out of memory.
"""

from typing import NamedTuple

Cells = tuple[float | None, ...]


class Published(NamedTuple):
    """One table; every row has a figure for each column."""

    source: str
    columns: tuple[int, ...]
    rows: dict[str, Cells]


_LENGTHS = (1024, 2048, 3072, 4096)
_LRA = (
    "LRA paper, arXiv:2011.04006, Table 2: byte-level text, batch 32, 4 x 4 TPU v3, "
    "memory of each device"
)
_COSFORMER = (
    "cosFormer paper, arXiv:2202.08791, Table 5: byte-level text with the LRA "
    "configuration, steps/s"
)
_LINFORMER = (
    "Linformer paper, arXiv:2006.04768, Table 3: inference on a 16 GB V100, layerwise "
    "sharing, over the Transformer"
)

LRA_STEPS = Published(
    f"{_LRA}; training steps/s",
    _LENGTHS,
    {
        "softmax": (8.1, 4.9, 2.3, 1.4),
        "local": (9.2, 8.4, 7.4, 7.4),
        "linformer": (9.3, 9.1, 8.5, 7.7),
        "reformer": (4.4, 2.2, 1.5, 1.1),
        "sinkhorn": (9.1, 7.9, 6.6, 5.3),
        "synthesizer": (8.7, 5.7, 6.6, 1.9),
        "bigbird": (7.4, 3.9, 2.7, 1.5),
        "linear": (9.1, 9.3, 8.6, 7.8),
        "performer": (9.5, 9.4, 8.7, 8.0),
    },
)
LRA_MEMORY = Published(
    f"{_LRA}; peak memory, GB",
    _LENGTHS,
    {
        "softmax": (0.85, 2.65, 5.51, 9.48),
        "local": (0.42, 0.76, 1.06, 1.37),
        "linformer": (0.37, 0.55, 0.99, 0.99),
        "reformer": (0.48, 0.99, 1.53, 2.28),
        "sinkhorn": (0.47, 0.83, 1.13, 1.48),
        "synthesizer": (0.65, 1.98, 4.09, 6.99),
        "bigbird": (0.77, 1.49, 2.18, 2.88),
        "linear": (0.37, 0.57, 0.80, 1.03),
        "performer": (0.37, 0.59, 0.82, 1.06),
    },
)
COSFORMER_INFERENCE = Published(
    f"{_COSFORMER}, inference",
    _LENGTHS,
    {
        "softmax": (25.37, 7.83, None, None),
        "local": (57.73, 33.19, 23.36, 17.79),
        "linformer": (70.09, 39.1, 27.05, 20.62),
        "reformer": (44.21, 21.58, 12.74, 8.37),
        "sinkhorn": (43.29, 23.58, 16.53, 12.7),
        "synthesizer": (20.89, 6.24, None, None),
        "bigbird": (20.96, 11.5, 8.12, 6.15),
        "linear": (67.85, 38.24, 26.28, 19.98),
        "performer": (74.15, 42.31, 29.5, 22.44),
        "longformer": (22.99, 6.72, None, None),
        "sparse": (24.87, 7.5, None, None),
        "cosformer": (58.82, 33.45, 22.77, 17.42),
    },
)
COSFORMER_TRAINING = Published(
    f"{_COSFORMER}, training",
    _LENGTHS,
    {
        "softmax": (6.95, 2.23, None, None),
        "local": (13.45, 6.71, 4.32, 3.09),
        "linformer": (14.75, 7.09, 4.52, 3.21),
        "reformer": (11.58, 4.98, 2.94, 1.95),
        "sinkhorn": (11.09, 5.57, 3.68, 2.68),
        "synthesizer": (6.36, 2.01, None, None),
        "bigbird": (6.46, 3.2, 2.13, 1.53),
        "linear": (11.86, 5.54, 3.53, 2.56),
        "performer": (14.0, 6.49, 4.1, 2.94),
        "longformer": (4.4, 1.3, None, None),
        "sparse": (6.77, 2.2, None, None),
        "cosformer": (12.27, 5.72, 3.62, 2.64),
    },
)

FEATURES = (128, 256, 512, 1024, 2048)
# Here rows are lengths, and columns are Linformer's K.
LINFORMER_TIME = Published(
    f"{_LINFORMER}; times faster",
    FEATURES,
    {
        "512": (1.5, 1.3, None, None, None),
        "1024": (1.7, 1.6, 1.3, None, None),
        "2048": (2.6, 2.4, 2.1, 1.3, None),
        "4096": (3.4, 3.2, 2.8, 2.2, 1.3),
        "8192": (5.5, 5.0, 4.4, 3.5, 2.1),
        "16384": (8.6, 7.8, 7.0, 5.6, 3.3),
        "32768": (13, 12, 11, 8.8, 5.0),
        "65536": (20, 18, 16, 14, 7.9),
    },
)
LINFORMER_MEMORY = Published(
    f"{_LINFORMER}; memory saved, as the ratio of the largest batches",
    FEATURES,
    {
        "512": (1.7, 1.5, None, None, None),
        "1024": (3.0, 2.9, 1.8, None, None),
        "2048": (6.1, 5.6, 3.6, 2.0, None),
        "4096": (14, 13, 8.3, 4.3, 2.3),
        "8192": (28, 26, 17, 8.5, 4.5),
        "16384": (56, 48, 32, 16, 8),
        "32768": (56, 48, 36, 18, 16),
        "65536": (60, 52, 40, 20, 18),
    },
)

OF_VIEWS = {
    "lra": (LRA_STEPS, LRA_MEMORY),
    "linformer": (LINFORMER_TIME, LINFORMER_MEMORY),
    "cosformer": (COSFORMER_INFERENCE, COSFORMER_TRAINING),
}
"""The tables that a view shows with ours."""
