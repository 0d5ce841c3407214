"""ListOps expressions with the arguments of every operator in another order.

Minimum, maximum, median and sum do not depend on the order of their arguments, so an
expression keeps its value: a training example becomes as many as it has orderings.

Source: permuted arguments as training data for ListOps, in the discussion of
arXiv:2501.14850.
"""

import numpy as np

from lra_jax.data.listops_language import CLOSE, MIN, PAD, SM

# The product of the numbers of places whose combinations one integer can tell apart.
_ROOM = 1 << 62


def permute(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A reordered expression of the same value; all orderings are equally likely.

    At every level of the tree, each token has the random place of its subtree among its
    siblings, with an operator's brackets before and after all of them. The new order is
    that of the tokens sorted by these places, upper levels first.

    Args:
      tokens: ids of one complete expression, `[length]`; padding may follow.
      rng: draws the orders.

    Returns:
      The ids in their new order, with the same padding.
    """
    length = int(np.count_nonzero(tokens != PAD))
    ids = tokens[:length]
    opens, closes = (ids >= MIN) & (ids <= SM), ids == CLOSE
    inside = np.cumsum(opens.astype(np.int32) - closes, dtype=np.int32)
    # The level of the node that a token is or belongs to, from 1 for the root.
    level = inside + closes + ~(opens | closes)
    begins = np.where(closes, 0, level)
    counts = np.bincount(begins, minlength=2)[2:]
    if not len(counts):
        return tokens
    drawn = np.zeros((len(counts), int(counts.max()) + 1), np.int32)
    for row, count in zip(drawn, counts.tolist(), strict=True):
        row[1 : count + 1] = 1 + rng.permutation(count)
    # A row for each level; the nodes of a level are numbered from left to right.
    levels = np.arange(2, 2 + len(counts), dtype=np.int32)[:, None]
    number = np.cumsum(begins == levels, axis=1, dtype=np.int32)
    last = counts[:, None].astype(np.int32) + 1
    brackets = np.where(opens, 0, last)
    inner = np.take_along_axis(drawn, number, axis=1)
    places = np.where(level < levels, brackets, inner)
    order = np.lexsort(_keys(places, last[:, 0].tolist()))
    return np.concatenate([ids[order], tokens[length:]])


def _keys(places: np.ndarray, last: list[int]) -> list[np.ndarray]:
    """Few integers for each token that sort as its places do, for `np.lexsort`.

    Args:
      places: `[levels, length]`, from the highest level to the lowest.
      last: the largest place of each level; the smallest is 0.
    """
    keys: list[np.ndarray] = []
    room = 0
    for row, largest in zip(places, last, strict=True):
        room //= largest + 1
        if room:
            keys[0] = keys[0] * (largest + 1) + row
        else:
            keys.insert(0, row.astype(np.int64))
            room = _ROOM // (largest + 1)
    return keys
