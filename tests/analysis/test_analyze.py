"""The command line: pages of real runs, and one clear line for what cannot work."""

import json

import jax.numpy as jnp
import numpy as np
import originals
import pytest

from lra_jax import analyze
from lra_jax.analysis import relative_residual
from lra_jax.analysis.networks import zipf_tokens
from lra_jax.models import from_softmax

SMALL = ["--layers=1", "--length=8", "--examples=1", "--draws=1"]


def test_rank_collapse_makes_a_page(tmp_path, capsys, small_networks):
    out = tmp_path / "out"
    analyze.main(
        [
            "rank-collapse",
            f"--out={out}",
            "--network=albert",
            *SMALL,
            "--attention=softmax,linear",
        ]
    )
    assert str(out / "index.html") in capsys.readouterr().out
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "http" not in page
    assert "](rank-collapse.png)" in (out / "index.md").read_text()
    stored = json.loads((out / "rank-collapse.json").read_text())
    assert len(stored["data"]["ours"]["albert"]["transformer"]["mean"]) == 2
    assert stored["command"].startswith("python -m lra_jax.analyze")
    stored = json.loads((out / "rank-collapse-mechanisms.json").read_text())
    assert set(stored["data"]) == {"softmax", "linear"}


def test_what_is_stopped_leaves_no_empty_folder(tmp_path, monkeypatch):
    def stopped(line: str) -> None:
        assert (tmp_path / "new" / "out").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(analyze.progress, "say", stopped)
    settings = analyze.Spectrum(out=str(tmp_path / "new" / "out"))
    with pytest.raises(KeyboardInterrupt):
        analyze.run(settings)
    assert not (tmp_path / "new").exists()


BERT = {
    **{"model_type": "bert", "vocab_size": 20, "max_position_embeddings": 16},
    **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 8},
    **{"num_attention_heads": 4, "hidden_act": "gelu_new", "type_vocab_size": 2},
}
GPT2 = {
    **{"model_type": "gpt2", "vocab_size": 20, "n_positions": 16, "n_layer": 2},
    **{"n_embd": 128, "n_inner": 8, "n_head": 4},
}


@pytest.mark.parametrize(
    ("name", "config", "title"),
    [("", BERT, "BERT"), ("model.safetensors", GPT2, "GPT-2")],
)
def test_rank_collapse_of_weights(name, config, title, tmp_path):
    """With all parts, the curve of the encoder's own hidden states."""
    originals.hugging_face(tmp_path, config)
    out = tmp_path / "out"
    settings = analyze.RankCollapse(
        out=str(out), weights=str(tmp_path / name), length=16, examples=1, seed=3
    )
    analyze.run(settings)
    stored = json.loads((out / "rank-collapse-bert.json").read_text())
    curves = stored["data"]["ours"][f"{title} of 2 layers"]
    tokens = jnp.asarray(zipf_tokens(20, 1, 16, 3))
    states = from_softmax(tmp_path).hidden_states(tokens)
    expected = relative_residual(np.stack(states)[:, 0])
    np.testing.assert_allclose(curves["transformer"]["mean"], expected, rtol=1e-3)
    assert len({curve["mean"][-1] for curve in curves.values()}) == 4


def test_a_file_that_is_no_safetensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    settings = analyze.RankCollapse(out=str(tmp_path / "out"), weights=str(tmp_path))
    with pytest.raises(ValueError, match=r"^--weights: expected the config of a BERT"):
        analyze.run(settings)
