"""The attention of one's own that the README shows."""

import re
from pathlib import Path

import helpers

from lra_jax import train

README = Path(__file__).parents[3] / "README.md"


def test_the_readmes_own_attention_trains(data_dir, tmp_path, monkeypatch, recwarn):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "def squared(" in block)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert "--attention=mine:squared" in README.read_text()
    config = helpers.tiny(
        *(data_dir, tmp_path / "run"),
        attention="mine:squared",
        train={"steps": 4, "eval_every": 4, "warmup": 1},
    )
    result = train.run(config, quiet=True)
    assert result["attention"] == "mine:squared"
    assert result["steps"] == config.train.steps
