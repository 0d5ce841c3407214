"""Packed batches hold the same examples."""

import numpy as np
import pytest

from lra_jax.data.packing import pack


@pytest.mark.parametrize("multiple", [1, 3])
def test_every_example_is_there_once(multiple: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([3, 10, 4, 1, 6, 6, 10, 2], np.int32)
    real = np.arange(10) < lengths[:, None]
    tokens = np.where(real, rng.integers(1, 200, real.shape), 0).astype(np.uint8)
    labels = np.arange(8, dtype=np.int32)
    batch = {"tokens": tokens, "lengths": lengths, "labels": labels}
    made = pack(batch, 10, multiple)
    rows, examples = made["labels"].shape
    # 42 tokens in rows of 10, none of which is cut.
    assert rows == {1: 5, 3: 6}[multiple]
    assert examples % 4 == 0
    assert made["tokens"].shape == made["segment_ids"].shape == (rows, 10)
    documents = {}
    for row, number in np.argwhere(made["labels"] >= 0).tolist():
        inside = made["segment_ids"][row] == number + 1
        documents[int(made["labels"][row, number])] = made["tokens"][
            row, inside
        ].tolist()
    assert documents == {
        label: tokens[label, :size].tolist() for label, size in enumerate(lengths)
    }
    assert not made["tokens"][made["segment_ids"] == 0].any()
