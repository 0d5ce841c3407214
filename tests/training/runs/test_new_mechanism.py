"""A mechanism is one file, one entry of the table, and its own formula in a test.

All three are added to a copy of the package and its tests, twice: once with a formula
that it does not follow. Nothing else is touched.
"""

import re
import shutil
from pathlib import Path

import helpers
import pytest

MODULE = '''
"""Attention by distance."""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, feature_maps, masking
from lra_jax.attention.call import Call, attention_of

__all__ = ["toy_attention", "toy_weights"]


def _run(call: Call, *, offset: float) -> tuple[jax.Array, None]:
    heads, dtype = call.query.shape[2], call.dtype
    query = masking.by_head(call.query, heads, None, dtype)
    key, value = (
        masking.by_head(x, heads, call.mask, dtype) for x in (call.key, call.value)
    )
    products = jnp.einsum("bnth,bnsh->bnts", query, key, precision=call.precision)
    squares = jnp.square(query).sum(-1)[..., None] + jnp.square(key).sum(-1)[:, :, None]
    scores = -jnp.log(offset + jnp.maximum(squares - 2 * products, 0))
    seen = None if call.mask is None else call.mask[:, None, None]
    if call.is_causal:
        past = jnp.tri(*scores.shape[2:], dtype=bool)[None, None]
        seen = past if seen is None else past & seen
    weights = feature_maps.masked_softmax(scores, seen)
    out = jnp.matmul(weights, value, precision=call.precision)
    return call.finish(jnp.swapaxes(out, 1, 2)), None


@attention_of(_run)
def toy_attention(
    query,
    key,
    value,
    mask=None,
    is_causal=False,
    *,
    offset=1.0,
    precision=None,
    **flax: Any,
) -> jax.Array:
    """Weights in proportion to ``1 / (offset + |q - k|^2)``."""
    ...


toy_weights = dense.weights_of(toy_attention, "Its rows sum to one.")
'''
ENTRY = """\
    Mechanism(
        name="toy",
        module="lra_jax.attention.toy",
        causal=True,
        cross=True,
        stream=False,
        cost="T S H",
        summary="weights that fall with the distance of query and key",
        source="this test",
    ),
"""
FORMULA = """
import numpy as np

from . import dense
from .mechanisms import Case


def formula(q, k, v, mask=None, causal=False) -> np.ndarray:
    def head(q, k, v, where):
        distance = np.square(q[:, None] - k[None]).sum(-1)
        weights = dense.seen(len(q), where, causal) / (1 + distance)
        total = weights.sum(-1, keepdims=True)
        return weights @ v / np.where(total, total, 1)

    return dense.each_head(q, k, v, mask, head)


CASE = Case(formula, mean=True, unordered=("query", "key"))
"""
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("lra_jax", "tests/attention"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=ignored)
    for file in ("pyproject.toml", "tests/conftest.py", "tests/helpers.py"):
        shutil.copy(REPOSITORY / file, root / file)
    wrong = FORMULA.replace("(1 + distance)", "(2 + distance)")
    table = root / "lra_jax/attention/table.py"
    for name, formula in (("toy", FORMULA), ("decoy", wrong)):
        module, entry = (text.replace("toy", name) for text in (MODULE, ENTRY))
        (root / f"lra_jax/attention/{name}.py").write_text(module)
        (root / f"tests/attention/test_{name}.py").write_text(formula)
        before, first, after = table.read_text().partition("_ENTRIES = (\n")
        table.write_text(before + first + entry + after)
    return root


def _python(copy: Path, *command: str):
    paths = {"PYTHONPATH": f"{copy}:{copy / 'tests'}", "PYTHONSAFEPATH": "1"}
    return helpers.run(*command, **paths)


def test_it_is_listed(copy: Path) -> None:
    end = _python(copy, "-m", "lra_jax.attention")
    assert end.returncode == 0, end.stderr
    row = [line for line in end.stdout.splitlines() if line.startswith("toy ")]
    assert len(row) == 1 and "this test" in row[0]


def test_it_trains(copy: Path, data_dir: Path, dataset, tmp_path: Path) -> None:
    train = {"steps": 4, "warmup": 2, "eval_every": 4, "log_every": 2}
    flags = helpers.flags(helpers.tiny(data_dir, tmp_path / "run", train=train))
    kept = [flag for flag in flags if not flag.startswith("--attention=")]
    end = _python(copy, "-m", "lra_jax.train", *kept, "--attention=toy")
    assert end.returncode == 0, end.stderr
    assert (tmp_path / "run" / "result.json").is_file()


def test_it_has_the_common_properties(copy: Path) -> None:
    """And one whose formula is another is noticed, else that would prove nothing."""
    properties = str(copy / "tests/attention/properties")
    tests = "toy and not decoy or decoy-full and masks_grouped and test_formulas"
    end = _python(
        copy, "-m", "pytest", properties, "-k", tests, "-q", "-n0", "--no-header"
    )
    *lines, last = end.stdout.splitlines()
    failures = [line for line in lines if line.startswith("FAILED")]
    assert len(failures) == 1 and "decoy" in failures[0], end.stdout[-5000:]
    counts = re.fullmatch(r"1 failed, (\d+) passed.*", last)
    assert counts is not None and int(counts[1]) >= 28, end.stdout[-5000:]
