"""The formula of the pattern; `test_patterns` has its tests besides the common ones."""

import functools

from ..mechanisms import Case
from . import patterns

CASE = Case(
    functools.partial(patterns.attention, "longformer"),
    {"window": 1, "global_tokens": 2},
    mean=True,
)
