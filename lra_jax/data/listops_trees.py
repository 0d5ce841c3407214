"""ListOps trees in bulk: the Long-Range Arena grammar in numpy.

The distribution is that of Tay et al., "Long Range Arena" (arXiv:2011.04006), as
defined by its released generator (the paper's text gives slightly different operators):

* a node above `max_depth` is a digit with probability 3/4, else an operator; a node at
  `max_depth` (the root has depth 1) is a digit, uniform over 0..9;
* an operator is uniform over MIN, MAX, MED and SM and has 2..`max_args` arguments,
  uniform; MED is the median truncated down, SM the sum modulo 10;
* a tree counts one token per digit and two per operator (the closing bracket), and is
  kept when `min_length < length < max_length`;
* trees are distinct.

A chunk of attempts grows level by level, operators only; then nine attempts in ten are
dropped, and digits, values and positions are computed for the others. Each chunk has
its own random stream, keyed by (seed, chunk), so that the trees are byte-identical for
any number of processes. (The released generator has no seed.)
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lra_jax.data import workers
from lra_jax.data.listops_language import (
    CLOSE,
    DIGIT_0,
    MAX,
    MED,
    MIN,
    SHORTEST_OPERATOR,
    SM,
    Grammar,
)
from lra_jax.errors import expected

CHUNK_ATTEMPTS = 8192
"""Roots generated per chunk. Changing it would change the trees of every seed."""

# Settings that accept a smaller share of attempts are refused; LRA's accept 1 in 12.
_MAX_ATTEMPTS_PER_TREE = 4096
_MAX_ATTEMPTS_WITHOUT_NEW_TREE = 1 << 20
_TREES_PER_PROCESS = 8192


class Trees(NamedTuple):
    """Trees stored back to back.

    Attributes:
      tokens: `uint8 [sum of lengths]`, ids of `listops_language.TOKENS`.
      lengths: `int32 [n]`.
      labels: `uint8 [n]`, the value of each tree, 0..9.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def split(self) -> list[np.ndarray]:
        """The tokens of each tree, as views."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1])


class _Level(NamedTuple):
    """The operators of one depth, ordered by tree and by position."""

    tree: np.ndarray  # [n] which tree
    parent: np.ndarray  # [n] index in the level above
    args: np.ndarray  # [n] number of arguments
    operators: np.ndarray  # [n] bit i is set where argument i is an operator


class _Layout(NamedTuple):
    """A level, with a column per operator and a row per argument, `[max_args, n]`."""

    present: np.ndarray  # the argument exists
    lengths: np.ndarray  # its tokens; 0 where it does not exist
    slot: np.ndarray  # [children] which argument of its parent each child operator is
    parent: np.ndarray  # [children] index of that parent in this level


def sample_chunk(grammar: Grammar, seed: int, chunk: int) -> Trees:
    """Grows `CHUNK_ATTEMPTS` roots and returns the accepted trees, in order.

    The result depends only on the arguments. Trees may repeat.
    """
    entropy = np.random.SeedSequence((seed, chunk))
    rng = np.random.Generator(np.random.Philox(entropy))
    levels, lengths = _grow(rng, grammar)
    accepted = (lengths > grammar.min_length) & (lengths < grammar.max_length)
    return _fill(rng, grammar, _keep(levels, accepted), lengths[accepted])


def iterate(
    seed: int, count: int, grammar: Grammar, processes: int | None = None
) -> Iterator[Trees]:
    """Yields `count` distinct trees in batches of a few hundred.

    Args:
      seed: any non-negative integer; fixes every byte of the result.
      count: number of trees, at least 1.
      grammar: which trees.
      processes: worker processes; 1 = in this process, None = as many as the machine
        has cores. The trees do not depend on it.

    Raises:
      ValueError: the grammar yields too few distinct trees.
    """
    if processes is None:
        processes = min(workers.available_cpus(), -(-count // _TREES_PER_PROCESS))
    sample = functools.partial(sample_chunk, grammar, seed)
    seen: set[bytes] = set()
    stalled = 0
    with contextlib.closing(workers.map_in_order(sample, processes)) as chunks:
        for used, trees in enumerate(chunks, start=1):
            fresh = _drop_repeated(trees, seen, count)
            if len(seen) == count:
                # A consumer of the last batch may never come back to end the workers.
                chunks.close()
            stalled = 0 if len(fresh.labels) else stalled + 1
            if not stalled:
                yield fresh
            if len(seen) == count:
                return
            _check_progress(grammar, count, len(seen), used, stalled)


def _grow(rng, grammar: Grammar) -> tuple[list[_Level], np.ndarray]:
    """Generates the shapes: which arguments are operators, level by level.

    Returns:
      The levels, and the length of each tree (at least `max_length` for a tree that was
      abandoned because it had grown too long).
    """
    # A root that is a digit is too short for any window, so it is only counted.
    num_trees = int(rng.binomial(CHUNK_ATTEMPTS, 0.25))
    lengths = np.zeros(num_trees, np.int64)
    tree = parent = np.arange(num_trees, dtype=np.int32)
    levels = []
    for depth in range(1, grammar.max_depth):
        n = len(tree)
        args = rng.integers(2, grammar.max_args + 1, n, dtype=np.uint8)
        # Two fair bits are both set with probability 1/4, that of an operator.
        bits = rng.integers(0, 1 << grammar.max_args, (2, n), dtype=np.uint32)
        operators = bits[0] & bits[1] & ((np.uint64(1) << args) - np.uint64(1))
        operators = operators.astype(np.uint32)
        if depth == grammar.max_depth - 1:
            operators[:] = 0
        levels.append(_Level(tree, parent, args, operators))
        children = np.bitwise_count(operators)
        lengths += _sum_by_tree(tree, 2 + args - children, num_trees)
        pending = _sum_by_tree(tree, children, num_trees)
        too_long = lengths + SHORTEST_OPERATOR * pending >= grammar.max_length
        lengths[too_long] = grammar.max_length
        children[too_long[tree]] = 0
        parent = np.repeat(np.arange(n, dtype=np.int32), children)
        tree = tree[parent]
        if not len(tree):
            break
    return levels, lengths


def _keep(levels: list[_Level], accepted: np.ndarray) -> list[_Level]:
    """Drops the operators of the trees that were not accepted."""
    kept = []
    index_above = np.cumsum(accepted) - 1
    for level in levels:
        chosen = accepted[level.tree]
        tree, parent, args, operators = (column[chosen] for column in level)
        kept.append(_Level(tree, index_above[parent], args, operators))
        index_above = np.cumsum(chosen) - 1
    return kept


def _fill(rng, grammar, levels: list[_Level], lengths: np.ndarray) -> Trees:
    """Draws digits and operators of accepted shapes; lays them out and evaluates."""
    layouts, spans = _measure(levels, grammar.max_args)
    # One spare cell receives the digits of arguments that do not exist.
    tokens = np.zeros(int(lengths.sum()) + 1, np.uint8)
    starts = np.cumsum(lengths) - lengths
    drawn = []
    for level, layout, span in zip(levels, layouts, spans, strict=True):
        names = rng.integers(MIN, SM + 1, len(level.args), dtype=np.uint8)
        digits = rng.integers(0, 10, layout.present.shape, dtype=np.uint8)
        drawn.append((names, digits))
        positions = np.cumsum(layout.lengths, axis=0) - layout.lengths + (starts + 1)
        # Operators overwrite, one level down, the digits written in their places.
        tokens[np.where(layout.present, positions, -1)] = digits + DIGIT_0
        tokens[starts] = names
        tokens[starts + span - 1] = CLOSE
        starts = positions[layout.slot, layout.parent]
    return Trees(tokens[:-1], lengths.astype(np.int32), _evaluate(layouts, drawn))


def _measure(levels, max_args) -> tuple[list[_Layout], list[np.ndarray]]:
    """Lays out each level and computes the tokens below each operator, bottom up."""
    layouts, spans = [], []
    child_spans = np.zeros(0, np.int32)
    rows = np.arange(max_args, dtype=np.uint32)
    for level in reversed(levels):
        parent, slot = np.nonzero(level.operators[:, None] & (np.uint32(1) << rows))
        present = rows[:, None] < level.args
        lengths = present.astype(np.int32)
        lengths[slot, parent] = child_spans
        child_spans = lengths.sum(axis=0, dtype=np.int32) + 2
        layouts.append(_Layout(present, lengths, slot, parent))
        spans.append(child_spans)
    return layouts[::-1], spans[::-1]


def _evaluate(layouts: list[_Layout], drawn) -> np.ndarray:
    """The values of the first level's operators, computed from the last level up."""
    results = np.zeros(0, np.uint8)
    for layout, (names, values) in zip(reversed(layouts), reversed(drawn), strict=True):
        values[layout.slot, layout.parent] = results
        zero_filled = np.where(layout.present, values, 0)
        total = zero_filled.sum(axis=0, dtype=np.uint16) % 10
        least = np.where(layout.present, values, 9).min(axis=0, initial=9)
        results = np.where(names == MIN, least, total.astype(np.uint8))
        most = zero_filled.max(axis=0, initial=0)
        results = np.where(names == MAX, most, results)
        chosen = np.flatnonzero(names == MED)
        present = layout.present[:, chosen]
        results[chosen] = _median(values[:, chosen], present)
    return results


def _median(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """The median down each column, truncated; `[max_args, n]` to `[n]`."""
    ranked = np.sort(np.where(present, values, 255), axis=0)
    count = present.sum(axis=0)
    column = np.arange(len(count))
    return (ranked[(count - 1) // 2, column] + ranked[count // 2, column]) // 2


def _sum_by_tree(tree, amounts, num_trees) -> np.ndarray:
    return np.bincount(tree, amounts, num_trees).astype(np.int64)


def _drop_repeated(trees: Trees, seen: set[bytes], count: int) -> Trees:
    """The trees not seen before, until `count` are seen; adds them to `seen`."""
    tokens, kept = [], []
    for i, tree in enumerate(trees.split() if len(trees.lengths) else []):
        key = hashlib.blake2b(tree.tobytes(), digest_size=16).digest()
        if key not in seen and len(seen) < count:
            seen.add(key)
            tokens.append(tree)
            kept.append(i)
    if len(kept) == len(trees.lengths):
        return trees
    tokens = np.concatenate(tokens or [trees.tokens[:0]])
    return Trees(tokens, trees.lengths[kept], trees.labels[kept])


def _check_progress(grammar, count, distinct, chunks, stalled):
    """Gives up on settings for which generation would never finish."""
    allowed = _MAX_ATTEMPTS_WITHOUT_NEW_TREE + _MAX_ATTEMPTS_PER_TREE * count
    if (
        stalled * CHUNK_ATTEMPTS < _MAX_ATTEMPTS_WITHOUT_NEW_TREE
        and chunks * CHUNK_ATTEMPTS < allowed
    ):
        return
    raise expected(
        "num_train + num_valid + num_test",
        f"at most as many distinct trees as {grammar} gives in reasonable time",
        f"{count}, of which {chunks * CHUNK_ATTEMPTS} attempts found {distinct}; widen "
        "min_length..max_length, or ask for fewer",
    )
