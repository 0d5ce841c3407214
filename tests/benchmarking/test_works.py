"""The functions of a case: calls, gates and parameters, decoding."""

import jax
import jax.numpy as jnp
import pytest

from benchmarking.small import case, run
from lra_jax.benchmarking.works import Unsupported, make_work


def test_options_that_only_set_widths_are_not_passed_over() -> None:
    with pytest.raises(Unsupported, match="expansion sets the widths of a layer"):
        make_work(case("gau[expansion=4]"))
    make_work(case("gau[activation=laplace]"))


def test_decoding_has_gates_and_a_cache_of_its_dtype() -> None:
    arrays = make_work(case("gla", "decode")).make()[1]
    assert arrays["log_decay"].shape == arrays["gate"].shape == (2, 2, 4)
    state = make_work(case("softmax", "decode", dtype="bfloat16")).make()[0]
    assert state.key.dtype == state.value.dtype == jnp.bfloat16
    (row,) = run([case("gla", "decode")]).rows
    assert row["status"] == "measured"


@pytest.mark.parametrize(
    ("attention", "learned"),
    [
        ("linear", set()),
        ("gla", {"log_decay", "gate"}),
        ("linformer[features=8]", {"key_projection", "value_projection"}),
        ("performer", set()),
    ],
)
def test_gates_and_parameters_have_gradients(attention: str, learned: set[str]) -> None:
    """But not Performer's random features, which are not trained."""
    work = make_work(case(attention, "forward+backward"))
    _, (parameters, *inputs) = jax.eval_shape(work.function, *work.make())
    assert set(parameters) == learned
    assert len(inputs) == 3


def test_every_work_of_a_linear_mechanism() -> None:
    works = ("forward", "forward+backward", "decode", "inference", "train")
    rows = run([case("flow", work) for work in works]).rows
    assert {row["work"]: row["status"] for row in rows} == dict.fromkeys(
        works, "measured"
    )
    for row in rows:
        assert 0 < row["fastest_ms"] <= row["median_ms"] <= row["slowest_ms"]
        tokens = 2 * (1 if row["work"] == "decode" else 16)
        assert row["tokens_per_second"] == pytest.approx(
            1e3 * tokens / row["median_ms"]
        )
        assert row["peak_bytes"] > 0 and row["roofline_share"] > 0


def test_what_cannot_run_is_said() -> None:
    cases = [case("fnet", "decode"), case("linformer", causal=True), case("linear")]
    rows = {row["attention"]: row for row in run(cases).rows}
    assert rows["fnet"]["reason"] == "no stream to decode with"
    assert rows["linformer"]["reason"] == "no causal form"
    assert rows["linear"]["status"] == "measured"
