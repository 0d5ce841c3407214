"""The formula and its gates; `test_recurrence` has tests besides the common ones."""

import functools

from ..mechanisms import Case
from . import formulas

CASE = Case(
    formulas.gated_delta,
    gates=functools.partial(formulas.gates, "gated_delta"),
    signed=True,
    normalised=True,
    level={"norm": "rms"},
)
