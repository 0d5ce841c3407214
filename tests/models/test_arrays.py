"""Arrays in files: every dtype, name and shape comes back, or is refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax

from lra_jax import attention, models


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a.b": np.ones(2), "a": {"b": np.zeros(2)}}, "tree: expected another name"),
        ({"a": np.full(2, 1 + 1e-12)}, "a: expected a dtype .* got float64"),
        ({"a": "text"}, "tree: expected arrays, got a, a str"),
        ({"a": np.ones(2, ">f4")}, "tree: expected arrays, got a, an ndarray of >f4"),
        ({"a": jax.random.key(0)}, "tree: expected arrays of numbers, got a of key<"),
        (
            {"a": jnp.ones(2, jnp.float8_e4m3fn)},
            "tree: expected arrays of other dtypes, got a of float8_e4m3fn",
        ),
    ],
)
def test_no_array_is_lost_or_narrowed(tmp_path: Path, tree: Any, words: str) -> None:
    """Two arrays of one name would become one, float64 would become float32, and what
    cannot be read again would be lost."""
    if "another name" in words:
        tree = jax.tree.map(lambda x: x.astype(np.float32), tree)
    with pytest.raises(ValueError, match=f"^{words}"):
        models.save_arrays(tmp_path / "one.safetensors", tree)
    assert not list(tmp_path.iterdir())


def test_dtypes_and_numbers_come_back(tmp_path: Path) -> None:
    kinds = ("bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64")
    tree = {kind: jnp.ones(2, kind) for kind in kinds} | {"number": 3, "switch": True}
    file = tmp_path / "all.safetensors"
    models.save_arrays(file, tree)
    loaded = models.load_arrays(file, tree)
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)
    assert {kind: loaded[kind].dtype.name for kind in kinds} == {
        kind: kind for kind in kinds
    }
    with pytest.raises(ValueError, match=r"expected number of float32\[\], got int32"):
        models.load_arrays(file, tree | {"number": 3.0})


def test_dtypes_that_numpy_lacks(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    file.write_bytes(safetensors.flax.save({"a": jnp.ones(2, jnp.float8_e4m3fn)}))
    with pytest.raises(ValueError, match="expected arrays of dtypes that numpy has"):
        models.load_arrays(file, {"a": jnp.ones(2)})


def test_states_are_written_down(tmp_path: Path) -> None:
    """Read into shapes alone; another state's file is refused."""
    query = jax.random.normal(jax.random.key(0), (2, 3, 2, 4))
    _, state = attention.cosformer_prefill(query, query, query, max_length=8)
    file = tmp_path / "state.safetensors"
    models.save_arrays(file, state)
    like = jax.eval_shape(lambda: state)
    jax.tree.map(np.testing.assert_array_equal, models.load_arrays(file, like), state)
    _, other = attention.linear_prefill(query, query, query)
    with pytest.raises(
        ValueError, match="expected LinearState, Sums, got CosformerState"
    ):
        models.load_arrays(file, other)
    _, other = attention.cosformer_prefill(*(query[:1],) * 3, max_length=8)
    with pytest.raises(ValueError, match=r"sums.summary of float32\[1, 2, 8, 4\]"):
        models.load_arrays(file, other)
    # The same names and shapes.
    models.save_arrays(file, attention.linear_init(1, 2, 4))
    with pytest.raises(ValueError, match="expected LightningState, Sums, got Linear"):
        models.load_arrays(file, attention.lightning_init(1, 2, 4))


def test_arrays_of_64_bits_are_not_rounded_in_silence(tmp_path) -> None:
    file = tmp_path / "x.safetensors"
    with jax.enable_x64(True):
        models.save_arrays(file, {"a": jnp.ones(2, "float64")})
        assert models.load_arrays(file, {"a": jnp.zeros(2)})["a"].dtype == "float64"
    with pytest.raises(ValueError, match=r"a of float32\[2\], got F64; set jax_enab"):
        models.load_arrays(file, {"a": jnp.zeros(2)})
