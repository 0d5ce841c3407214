"""ListOps expressions with the arguments of every operator in another order.

Minimum, maximum, median and sum do not depend on the order of their arguments, so an
expression keeps its value: a training example becomes as many as it has orderings.

Source: permuted arguments as training data for ListOps, in the discussion of
arXiv:2501.14850.
"""

import numpy as np

from lra_jax.data.listops_language import CLOSE, MIN, PAD, SM


def permuted(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
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
    inside = np.cumsum(opens.astype(np.int32) - closes)
    # The level of the node that a token is or belongs to, from 1 for the root.
    level = inside + closes + (~opens & ~closes)
    places = []
    for depth in range(2, int(level.max(initial=1)) + 1):
        begins = (level == depth) & ~closes
        drawn = rng.permutation(int(begins.sum()))
        place = np.concatenate([[0], drawn])[np.cumsum(begins)]
        place = np.where(level < depth, np.where(opens, -1, len(drawn)), place)
        places.append(place)
    if not places:
        return tokens
    order = np.lexsort(places[::-1])
    return np.concatenate([ids[order], tokens[length:]])
