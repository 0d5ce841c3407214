"""The formula of the pattern; `test_patterns` has its tests besides the common ones."""

import functools

from ..mechanisms import Case
from . import patterns

CASE = Case(functools.partial(patterns.attention, "local"), {"window": 2}, mean=True)
