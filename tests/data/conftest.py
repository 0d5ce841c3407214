"""Small datasets that the tests of this folder share."""

import pytest

from lra_jax.data import listops

SMALL = {
    "num_train": 600,
    "num_valid": 70,
    "num_test": 50,
    "min_length": 20,
    "max_length": 300,
    "processes": 1,
}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def dataset(data_dir):
    return listops.prepare(data_dir, seed=0, **SMALL)
