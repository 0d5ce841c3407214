"""The formula of the unit; `test_gated` has its tests besides the common ones."""

from ..mechanisms import Case
from . import units

# Squares of products of queries.
CASE = Case(units.gau, lambda *sizes: units.arrays(2, *sizes), largest=1e9)
