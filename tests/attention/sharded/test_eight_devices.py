"""Batches and sequences split over eight simulated devices give one device's numbers.

Their exchanges are read from the compiled programs' text.
"""

import json

import helpers
import numpy as np
import pytest

CASES = ["linear", "linear causal", "cosformer", "cosformer causal", "flow"]


@pytest.fixture(scope="module")
def measured() -> dict:
    flags = "--xla_force_host_platform_device_count=8 "
    flags += "--xla_backend_optimization_level=0"
    program = str(helpers.Path(__file__).with_name("eight_devices.py"))
    end = helpers.run(program, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert end.returncode == 0, end.stderr
    return json.loads(end.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_split_sequence_gives_what_a_whole_one_gives(measured, case) -> None:
    """Output and gradients, with padding; slices of 8 of 32 positions."""
    assert measured["attention"][case]["difference"] < 1e-5


@pytest.mark.parametrize("case", CASES[2:])
def test_documents_over_the_edges_of_devices(measured, case) -> None:
    """The bytes exchanged do not depend on the length."""
    short, long = (measured["attention"][f"{case} packed"][n] for n in ("32", "64"))
    assert short["difference"] < 1e-5
    assert short["collectives"] == long["collectives"]


@pytest.mark.parametrize("case", CASES[:4])
def test_one_exchange_forward_and_one_backward(measured, case) -> None:
    """Of N M (Hv + 1) numbers a sample, from each of four devices."""
    size = 2 * (8 if "cosformer" in case else 4) * 5
    exchanges = [["all-reduce", size], ["all-reduce", size]]
    if "causal" in case:
        exchanges = [["all-gather", 4 * size], ["reduce-scatter", size]]
    collectives = measured["attention"][case]["collectives"]
    # cosFormer's M, from the mask, is one integer.
    assert [x for x in collectives if x[1] > 1] == exchanges


def test_flow_exchanges_sums(measured) -> None:
    collectives = measured["attention"]["flow"]["collectives"]
    assert {name for name, _ in collectives} == {"all-reduce"}
    # Less than a device's slice of any of the arrays, 8 positions of 2 heads of 4.
    assert max(size for _, size in collectives) < 8 * 2 * 4


@pytest.mark.parametrize("split", ["data", "sequence"])
def test_training_gives_the_losses_of_one_device(measured, split) -> None:
    one = measured["training"]["one device"]["losses"]
    assert one[0] > one[-1] > 0
    np.testing.assert_allclose(measured["training"][split]["losses"], one, rtol=2e-5)


def test_a_training_step_holds_and_sends_its_share(measured) -> None:
    training = measured["training"]
    assert training["data"]["tokens_on_a_device"] == [1, 256]
    assert training["sequence"]["tokens_on_a_device"] == [4, 64]
    assert training["sequence, shorter"]["tokens_on_a_device"] == [4, 16]
    short, long = (training[x] for x in ("sequence, shorter", "sequence"))
    assert short["collectives"] == long["collectives"]
    for split in (long, training["data"]):
        assert {name for name, _ in split["collectives"]} == {"all-reduce"}
    # A device needs an eighth of what one alone needs, and the states.
    alone = training["one device"]["temporary_bytes"]
    assert long["temporary_bytes"] < alone / 4
