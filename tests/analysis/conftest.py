"""The published networks in small, for tests of what is done with them."""

import dataclasses

import pytest

from lra_jax.analysis.networks import SHAPES

SIZES = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_dim": 16, "embed_dim": 16}


@pytest.fixture
def small_networks(monkeypatch):
    """BERT, ALBERT and XLNet of the same build and names."""
    for name, shape in SHAPES.items():
        small = dataclasses.replace(shape, vocab_size=50, **SIZES)
        monkeypatch.setitem(SHAPES, name, small)
