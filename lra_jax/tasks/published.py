"""Published test accuracies of the Long-Range Arena, in percent, with their sources.

Two averages are in use, and a table must say which one it shows: avg5 is the mean
without Path-X; avg6 includes Path-X and counts a failure as 50 %. Neither is stored
here; both are computed from a row.

Rows differ in more than the mechanism: in data splits, lengths, model sizes and whether
the best or the last checkpoint was scored. The rows of the LRA paper are from the last
checkpoint of small models at LRA's settings; from the S4 paper on, models are tuned.

`official` is the mechanism for which the preset official follows the row's own
protocol, as far as this library can; a row is shown only next to such a run.
cosFormer's row of 2022 has none, because its settings were not published; other rows
have none because the model, or its recipe, is not in this library.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

FAILED = "failed"
"""Path-X at chance."""


class Row(NamedTuple):
    """One model's accuracies; None where none was published."""

    model: str
    listops: float | None
    text: float | None
    retrieval: float | None
    image: float | None
    pathfinder: float | None
    pathx: float | str | None
    source: str
    official: str | None = None

    @property
    def avg5(self) -> float | None:
        """Mean without Path-X; None if a task is missing."""
        five = self[1:6]
        numbers = [x for x in five if isinstance(x, float)]
        return sum(numbers) / 5 if len(numbers) == 5 else None

    @property
    def avg6(self) -> float | None:
        """Mean of all six, a failed Path-X counted as 50; None if one is missing."""
        five, last = self.avg5, 50.0 if self.pathx == FAILED else self.pathx
        return (5 * five + last) / 6 if five and isinstance(last, float) else None


class Published(NamedTuple):
    """A published test accuracy, in percent, and its source."""

    model: str
    accuracy: float
    source: str
    official: str | None = None


_LRA = "LRA paper, arXiv:2011.04006, Table 1"
_S4_TABLE = "table of the S4 paper, arXiv:2111.00396"
_FLOWFORMER = "figure of the thuml/Flowformer repository"
_HGRN = "re-run in S4's code base, table of the SiMBA repository from the HGRN paper"
_SIMBA = "table of the SiMBA repository"
_B2S6 = "B2S6 paper, arXiv:2505.09022"
_LRA_README = "README of google-research/long-range-arena"

ROWS: tuple[Row, ...] = (
    Row("Transformer", 36.37, 64.27, 57.46, 42.44, 71.40, FAILED, _LRA, "softmax"),
    Row("Local Attention", 15.82, 52.98, 53.39, 41.46, 66.63, FAILED, _LRA, "local"),
    Row(
        "Sparse Transformer", 17.07, 63.58, 59.59, 44.24, 71.71, FAILED, _LRA, "sparse"
    ),
    Row("Longformer", 35.63, 62.85, 56.89, 42.22, 69.71, FAILED, _LRA, "longformer"),
    Row("Linformer", 35.70, 53.94, 52.27, 38.56, 76.34, FAILED, _LRA, "linformer"),
    Row("Reformer", 37.27, 56.10, 53.40, 38.07, 68.50, FAILED, _LRA, "reformer"),
    Row("Sinkhorn", 33.67, 61.20, 53.83, 41.23, 67.45, FAILED, _LRA, "sinkhorn"),
    Row("Synthesizer", 36.99, 61.68, 54.67, 41.61, 69.45, FAILED, _LRA, "synthesizer"),
    Row("BigBird", 36.05, 64.02, 59.29, 40.83, 74.87, FAILED, _LRA, "bigbird"),
    Row(
        "Linear Transformer", 16.13, 65.90, 53.09, 42.34, 75.30, FAILED, _LRA, "linear"
    ),
    Row("Performer", 18.01, 65.40, 53.82, 42.77, 77.05, FAILED, _LRA, "performer"),
    Row("FNet", 35.33, 65.11, 59.61, 38.67, 77.80, FAILED, _S4_TABLE),
    Row("Nystromformer", 37.15, 65.52, 79.56, 41.58, 70.94, FAILED, _S4_TABLE),
    Row("Luna-256", 37.25, 64.57, 79.29, 47.38, 77.72, FAILED, _S4_TABLE),
    Row("cosFormer", 37.90, 63.41, 61.36, 43.17, 70.33, None, _FLOWFORMER),
    Row("cosFormer", 36.50, 67.70, 83.15, 51.23, 71.96, None, _HGRN, "cosformer"),
    Row("Flowformer", 38.70, 64.29, 62.24, 43.20, 73.95, None, _FLOWFORMER, "flow"),
    Row("TLB", 37.05, 81.88, 76.91, 57.51, 79.06, FAILED, _LRA_README),
    Row("H-Transformer-1D", 49.53, 78.69, 63.99, 46.05, 68.78, FAILED, _SIMBA),
    Row("S4 (updated)", 59.60, 86.82, 90.90, 88.65, 94.20, 96.35, "S4 paper, v3"),
    Row("S5", 62.15, 89.31, 91.40, 88.00, 95.33, 98.58, "S5 paper"),
    Row("MEGA", 63.14, 90.43, 91.25, 90.44, 96.01, 97.98, "MEGA paper"),
    Row("MEGA-chunk", 58.76, 90.19, 90.97, 85.80, 94.41, 93.81, "MEGA paper"),
    Row("TNN", 61.04, 87.90, 90.97, 88.24, 93.00, 96.10, _SIMBA),
    Row("HGRN", 59.95, 88.14, 94.23, 88.69, 92.92, 97.50, _SIMBA),
    Row("Mamba (S6)", 38.02, 82.98, 72.14, 69.82, 69.26, 67.32, _B2S6),
    Row("B2S6", 63.85, 88.32, 91.44, 88.81, 95.93, 97.90, _B2S6),
)


def rows_of(source: str, rows: Iterable[tuple[Any, ...]]) -> tuple[Published, ...]:
    """Rows of one source: model, accuracy and perhaps the mechanism."""
    return tuple(
        Published(model, accuracy, source, *mechanism)
        for model, accuracy, *mechanism in rows
    )


SIX = Row._fields[1:7]
"""The tasks of avg6."""


def published(task: str) -> tuple[Published, ...]:
    """The rows of one task, except failures on Path-X.

    Args:
      task: listops, text, retrieval, image, pathfinder or pathx.
    """
    rows = [(row, getattr(row, task)) for row in ROWS]
    return tuple(
        Published(row.model, value, row.source, row.official)
        for row, value in rows
        if isinstance(value, float)
    )
