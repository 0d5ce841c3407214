"""The formula of the unit; `test_gated` has its tests besides the common ones."""

from ..mechanisms import Case
from . import units

CASE = Case(
    units.flash,
    lambda *sizes: units.arrays(4, *sizes) | {"chunk": 3},
    signed=True,
    paired=True,
    largest=1e9,  # Squares of products of queries.
)
