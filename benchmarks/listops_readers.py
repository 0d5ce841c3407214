"""Measures how much the first tokens of a ListOps expression say about its value.

    python benchmarks/listops_readers.py --out=results/listops_readers.json

Uses the default data (seed 0). For each root operator a logistic regression on the
first k tokens, by position, is fitted to the 96,000 training expressions by 300
full steps of Adam in float32. With k = 1 it is the distribution of labels for each
operator, the best that a reader of the root alone can do. Losses are in nats,
accuracies in percent, with a standard error of 1.1 over 2,000 examples. More tokens
overfit.
"""

import argparse

import numpy as np
from common import origin, write

from lra_jax.data import listops
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.listops_language import VOCAB_SIZE

COUNTS = (1, 2, 4, 8, 16)
STEPS, RATE, CLASSES = 300, 0.05, 10

Split = tuple[np.ndarray, np.ndarray]  # tokens [n, k], labels [n]


def read(dataset: SequenceDataset, split: str) -> Split:
    """The first tokens and the labels of a split."""
    source, tokens, labels = dataset.source(split), [], []
    for start in range(0, len(source), 1000):
        ids = list(range(start, min(start + 1000, len(source))))
        for example in source.__getitems__(ids):
            tokens.append(np.asarray(example["tokens"][: max(COUNTS)]))
            labels.append(int(example["label"]))
    return np.array(tokens), np.array(labels)


def features(tokens: np.ndarray, count: int) -> np.ndarray:
    """One column for each token at each position after the root, and one of ones."""
    columns = np.eye(VOCAB_SIZE, dtype=np.float32)[tokens[:, 1:count]]
    ones = np.ones((len(tokens), 1), np.float32)
    return np.concatenate([columns.reshape(len(tokens), -1), ones], 1)


def log_shares(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logarithms of the softmax of ``x @ weights``."""
    logits = x @ weights
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def fit(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Weights of the regression, by Adam with a rate that falls to 0."""
    target = np.eye(CLASSES, dtype=np.float32)[labels]
    weights, mean, square = np.zeros((3, x.shape[1], CLASSES), np.float32)
    for step in range(1, STEPS + 1):
        slope = x.T @ (np.exp(log_shares(x, weights)) - target) / len(x)
        mean = 0.9 * mean + 0.1 * slope
        square = 0.98 * square + 0.02 * slope**2
        move = mean / (1 - 0.9**step)
        move = move / (np.sqrt(square / (1 - 0.98**step)) + 1e-8)
        weights = weights - RATE * (1 - step / (STEPS + 1)) * move
    return weights


def score(train: Split, splits: dict[str, Split], count: int) -> dict[str, float]:
    """Accuracy and loss of the reader of ``count`` tokens."""
    sums = {name: np.zeros(2) for name in splits}
    for root in np.unique(train[0][:, 0]):
        own = train[0][:, 0] == root
        weights = fit(features(train[0][own], count), train[1][own])
        for name, (tokens, labels) in splits.items():
            own_here = tokens[:, 0] == root
            shares = log_shares(features(tokens[own_here], count), weights)
            right = labels[own_here]
            sums[name] += (
                (shares.argmax(1) == right).sum(),
                -shares[np.arange(len(right)), right].sum(),
            )
    row: dict[str, float] = {}
    for name, (hits, loss) in sums.items():
        size = len(splits[name][1])
        row |= {f"{name}_accuracy": round(100 * hits / size, 2)}
        row |= {f"{name}_loss": round(loss / size, 4)}
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    dataset = listops.prepare(None, seed=0)
    train = read(dataset, "train")
    splits = {split: read(dataset, split) for split in ("valid", "test")}
    rows = {}
    for count in COUNTS:
        rows[str(count)] = score(train, splits, count)
        print(count, rows[str(count)], flush=True)
    if options.out:
        found = {"data_fingerprint": dataset.fingerprint, "by_first_tokens": rows}
        write(options.out, origin("pillow") | found)


if __name__ == "__main__":
    main()
