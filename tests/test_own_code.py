"""A run with an attention of one's own: trained, kept with its code, scored by it."""

import importlib
import sys
from typing import Any

import helpers
import numpy as np
import pytest

from lra_jax import analyze, evaluate, own_code, runs
from lra_jax.configs import get_preset
from lra_jax.models import MultiHeadAttention, load
from lra_jax.training.restore import load_run
from lra_jax.training.session import Session

SOURCE = """
import jax.numpy as jnp

from parts import power


class Mine(power.Scaled):
    pass
"""
PART = "from helpers import Scaled\n"


def test_every_process_of_a_job_has_the_same_code(tmp_path, monkeypatch) -> None:
    """Each host may have a copy of its own; only process 0 keeps its."""
    file = tmp_path / "own_copy.py"
    file.write_text("from helpers import values_only\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    own_code.keep(run, {"--attention": "own_copy:values_only"})
    own_code.keep(run, {"--attention": "own_copy:values_only"}, writes=False)
    file.write_text("from helpers import values_only\nSCALE = 2\n")
    with pytest.raises(ValueError, match=r"^--attention: .*changes in own_copy\.py"):
        own_code.keep(run, {"--attention": "own_copy:values_only"}, writes=False)
    assert own_code.changed_files(run, {"--attention": "own_copy:values_only"}) == [
        "own_copy.py"
    ]


def test_code_that_was_not_imported_again_is_refused(tmp_path, monkeypatch) -> None:
    """As when the cell of a notebook that writes the file is run once more."""
    file = tmp_path / "own_stale.py"
    file.write_text("from helpers import values_only\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own_code.keep(tmp_path / "first", {"--attention": "own_stale:values_only"})
    file.write_text("from helpers import values_only\nSCALE = 2\n")
    with pytest.raises(ValueError, match=r"^--attention: .*own_stale\.py as this proc"):
        own_code.keep(tmp_path / "second", {"--attention": "own_stale:values_only"})
    assert not (tmp_path / "second").exists()
    importlib.reload(sys.modules["own_stale"])
    own_code.keep(tmp_path / "second", {"--attention": "own_stale:values_only"})
    kept = tmp_path / "second" / own_code.FOLDER / "own_stale.py"
    assert "SCALE" in kept.read_text()


@pytest.mark.parametrize(
    ("coding", "beginning"), [("utf-8-sig", ""), ("latin-1", "# coding: latin-1\n")]
)
def test_code_in_another_encoding_is_kept_as_it_is(
    coding, beginning, tmp_path, monkeypatch
) -> None:
    source = f"{beginning}from helpers import values_only\nNAME = 'caf\xe9'\n"
    name = f"own_{coding.replace('-', '_')}"
    file = tmp_path / f"{name}.py"
    file.write_text(source, coding)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = f"{name}:values_only"
    own_code.keep(tmp_path / "run", {"--attention": spec})
    kept = tmp_path / "run" / own_code.FOLDER / file.name
    assert kept.read_bytes() == file.read_bytes()
    assert own_code.changed_files(tmp_path / "run", {"--attention": spec}) == []
    file.write_text(source.replace("caf", "th"), coding)
    assert own_code.changed_files(tmp_path / "run", {"--attention": spec}) == [
        file.name
    ]


def test_a_module_is_trained_and_kept_with_its_code(tmp_path, monkeypatch) -> None:
    code = tmp_path / "code"
    (code / "parts").mkdir(parents=True)
    (code / "own_mine.py").write_text(SOURCE)
    (code / "parts" / "__init__.py").write_text("")
    (code / "parts" / "power.py").write_text(PART)
    monkeypatch.syspath_prepend(str(code))
    config = helpers.tiny(
        tmp_path / "data",
        tmp_path / "run",
        attention="own_mine:Mine",
        train={"steps": 4, "eval_every": 4, "warmup": 1},
        model={"attention_options": "scale=2.0"},
    )
    with Session(config, quiet=True) as session:
        result = session.run()
        module: Any = session.trainer.model_at(session.trainer.state.params)
        layer = module.encoder.blocks[0].attention
        assert isinstance(layer.module, helpers.Scaled)
        trained = np.asarray(layer.module.scale[...])
    assert 0 < np.abs(trained - 2).max() < 1

    kept = tmp_path / "run" / own_code.FOLDER
    files = sorted(str(x.relative_to(kept)) for x in kept.rglob("*.py"))
    assert files == ["own_mine.py", "parts/__init__.py", "parts/power.py"]
    plan = runs.Planned(config, tmp_path / "run", "")
    (code / "own_mine.py").write_text(f"# A comment.\n{SOURCE}")
    assert runs.finished_result(plan) == result
    (code / "parts" / "power.py").write_text(f"{PART}WIDTH = 3\n")
    assert runs.finished_result(plan) is None
    changed = r"--attention: expected the code that this run .*changes in parts/power"
    with pytest.raises(ValueError, match=changed), Session(config, quiet=True):
        pass
    late = r"^parts/power\.py is imported already in another version"
    with pytest.warns(UserWarning, match=late):
        evaluate.run(evaluate.EvaluateConfig(config.workdir, allow_code=True))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(kept)])

    # From another folder, with the code that it was trained with.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(code)])
    for name in ("own_mine", "parts", "parts.power"):
        monkeypatch.delitem(sys.modules, name)
    loaded: Any = load(config.workdir, allow_code=True).model
    assert type(loaded.encoder.blocks[0].attention.module).__module__ == "own_mine"
    assert str(kept) not in sys.path  # A module may be reloaded from elsewhere.
    again = evaluate.run(evaluate.EvaluateConfig(config.workdir, allow_code=True))
    assert again["accuracy"] == result.test_accuracy_best
    assert sys.modules["own_mine"].__file__ == str(kept / "own_mine.py")
    # A matrix without a function for it: what it gives for unit vectors.
    saved = load_run(config.workdir, allow_code=True)
    page = analyze.run(
        analyze.Maps(
            workdir=config.workdir, out=str(tmp_path / "maps"), allow_code=True
        )
    )
    assert saved.step == 4 and "map-matrices" in page.with_suffix(".md").read_text()


def test_an_attention_without_a_mask_says_so() -> None:
    import jax.numpy as jnp
    from flax import nnx

    layer = MultiHeadAttention(
        2, 8, mechanism=lambda query, key, value: value, rngs=nnx.Rngs(0)
    )
    x = jnp.zeros((1, 4, 8))
    assert layer(x).shape == x.shape
    with pytest.warns(UserWarning, match="takes no mask, and attends to padding"):
        layer(x, mask=jnp.ones((1, 4), bool))


def test_the_code_of_a_notebook_is_the_thing_itself(monkeypatch) -> None:
    monkeypatch.setattr(helpers.power_attention, "__module__", "__main__")
    monkeypatch.setattr(
        sys.modules["__main__"], "power_attention", helpers.power_attention, False
    )
    config = get_preset(attention=helpers.power_attention)
    assert config.attention == "__main__:power_attention"
    (text,) = own_code.sources(config.own_parts).values()
    assert text.startswith(b"def power_attention(")
