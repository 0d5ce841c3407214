"""Linear-complexity attention in JAX/Flax, and the Long-Range Arena that judges it.

``lra_jax.attention`` holds pure functions, ``lra_jax.models`` the Flax NNX modules
around them, ``python -m lra_jax.train --task=listops`` trains and scores one of them.
Importing the package alone imports neither jax nor flax, so that ``--help`` is quick.
"""

__version__ = "0.1.0"
