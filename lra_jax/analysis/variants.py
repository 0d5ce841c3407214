"""Which parts of a network run: the switches of the rank-collapse figure."""

from typing import NamedTuple


class Variant(NamedTuple):
    """The parts that a network has.

    Attributes:
      skip: the skip connection around attention.
      mlp: the MLP, with its own skip connection.
      norm: layer normalisation in the blocks.
    """

    skip: bool
    mlp: bool
    norm: bool = True


VARIANTS = {
    "attention": Variant(skip=False, mlp=False),
    "attention + MLP": Variant(skip=False, mlp=True),
    "attention + skip": Variant(skip=True, mlp=False),
    "transformer": Variant(skip=True, mlp=True),
}
"""The four of Dong, Cordonnier and Loukas 2021, Figure 2; all keep the norms."""
