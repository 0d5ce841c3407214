"""The behaviour of attention: rank collapse, paths, spectra, maps.

Pure functions of arrays, in float64 on the host, for the matrices and hidden states of
any network. `lra_jax.analysis.capture` extracts them from a model, `...networks` builds
the papers' networks, and ``python -m lra_jax.analyze`` draws the figures.
"""

from lra_jax.analysis.bound import collapse_beta, collapse_bound
from lra_jax.analysis.paths import (
    Paths,
    path_decomposition,
    path_length_distribution,
)
from lra_jax.analysis.projection import (
    projection_bound,
    projection_error,
    truncation_errors,
)
from lra_jax.analysis.residual import composite_norm, relative_residual, residual
from lra_jax.analysis.spectrum import cumulative_spectrum, effective_rank

__all__ = [
    "Paths",
    "collapse_beta",
    "collapse_bound",
    "composite_norm",
    "cumulative_spectrum",
    "effective_rank",
    "path_decomposition",
    "path_length_distribution",
    "projection_bound",
    "projection_error",
    "relative_residual",
    "residual",
    "truncation_errors",
]
