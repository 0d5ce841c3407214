"""The formula of the pattern; `test_patterns` has its tests besides the common ones."""

import functools

from ..mechanisms import Case
from . import patterns

CASE = Case(
    functools.partial(patterns.attention, "bigbird"),
    {"block": 1, "num_random": 1},
    mean=True,
)
