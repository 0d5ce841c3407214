"""Several examples in each row of a batch, instead of padding.

The examples of a batch stay the same, so a step has the same loss as without packing.
They are placed in rows, longest first, each in the first row with enough room. Batches
differ in how many rows they need; the numbers of rows and of examples per row are
rounded up, so that there are few shapes to compile.
"""

import numpy as np

# The number of examples per row is rounded up to a multiple of this.
_EXAMPLES = 4


def pack(
    batch: dict[str, np.ndarray], length: int, multiple: int = 1
) -> dict[str, np.ndarray]:
    """Arranges the examples of a batch in rows.

    Args:
      batch: ``tokens`` `[B, L]` or `[B, L, C]`, ``lengths`` `[B]`, and ``labels``
        `[B]` or `[B, classes]`.
      length: T of a row, at least that of the longest example.
      multiple: the number of rows is rounded up to a multiple of this.

    Returns:
      ``tokens`` `[R, T]` or `[R, T, C]` and ``segment_ids`` `[R, T]`, the latter 1, 2,
      ... for the examples of a row and 0 for padding; ``labels`` `[R, D]` or
      `[R, D, classes]`, -1 (of numbers, NaN) where a row has fewer than D.
    """
    tokens, lengths, labels = (batch[x] for x in ("tokens", "lengths", "labels"))
    rows: list[list[int]] = []
    room: list[int] = []
    for example in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[example])
        row = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(example)
        room[row] -= size
    count = -(-len(rows) // multiple) * multiple
    most = -(-max(map(len, rows)) // _EXAMPLES) * _EXAMPLES
    no_label = np.nan if labels.dtype.kind == "f" else -1
    arrays = {
        "tokens": np.zeros((count, length, *tokens.shape[2:]), tokens.dtype),
        "segment_ids": np.zeros((count, length), np.int32),
        "labels": np.full((count, most, *labels.shape[1:]), no_label, labels.dtype),
    }
    for row, examples in enumerate(rows):
        place = 0
        for number, example in enumerate(examples):
            end = place + int(lengths[example])
            arrays["tokens"][row, place:end] = tokens[example, : end - place]
            arrays["segment_ids"][row, place:end] = number + 1
            arrays["labels"][row, number] = labels[example]
            place = end
    return arrays
