"""Models whose blocks take several mechanisms in turn."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_rejects
from flax import nnx

from lra_jax import models
from lra_jax.analysis.spectra import run_spectra, spectrum_section
from lra_jax.configs import get_preset
from lra_jax.models import ModelConfig, TransformerEncoder, decoding, saved
from lra_jax.tasks.base import encoder_config

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "max_length": 12,
    "dropout": 0.0,
}


def _encoder(*hybrid: Any, mechanism: str = "cosformer", **settings) -> Any:
    settings = SIZES | {"hybrid": hybrid, "mechanism": mechanism} | settings
    return TransformerEncoder(11, rngs=nnx.Rngs(params=0), **settings)


def _names(encoder: TransformerEncoder) -> list[str]:
    return [block.attention.mechanism.name for block in encoder.blocks]


def test_the_blocks_take_the_mechanisms_in_turn() -> None:
    assert _names(_encoder()) == ["cosformer"] * 3
    names = _names(_encoder("cosformer", "hgrn"))
    assert names == ["cosformer", "hgrn", "cosformer"]
    names = _names(_encoder("hgrn", "hgrn", "cosformer", num_layers=5))
    assert names == ["hgrn", "hgrn", "cosformer", "hgrn", "hgrn"]


def test_every_block_computes_its_own_mechanism() -> None:
    """Each block does what it would in a model that has its mechanism throughout."""
    hybrid = _encoder("cosformer", "linear", "flow")
    tokens = np.random.default_rng(0).integers(0, 11, (2, 9))
    mask = jnp.arange(9)[None] < jnp.array([[9], [6]])
    of_hybrid = nnx.to_flat_state(nnx.state(hybrid, nnx.Param))
    x: Any = None
    for index, name in enumerate(("cosformer", "linear", "flow")):
        alone = _encoder(mechanism=name)
        assert [path for path, _ in nnx.to_flat_state(nnx.state(alone, nnx.Param))] == [
            path for path, _ in of_hybrid
        ]
        nnx.update(alone, nnx.state(hybrid, nnx.Param))
        if x is None:
            x = alone.embed(jnp.asarray(tokens))
            x = x + alone.positions[...][:9].astype(x.dtype)[None]
        x = alone.blocks[index](x, mask)
    got = hybrid(jnp.asarray(tokens), mask)
    real = np.asarray(mask)
    np.testing.assert_allclose(
        np.asarray(got)[real], np.asarray(hybrid.norm(x))[real], rtol=1e-5, atol=1e-5
    )


def test_options_are_those_of_the_mechanism_alone() -> None:
    options = {"feature_map": "elu"}
    config = _encoder("linear", "cosformer", attention_options=options).config
    assert config.block_options == [{}, options, {}]
    # They are checked as without a hybrid.
    wrong = {"feature_maps": "elu"}
    assert_rejects(
        lambda: _encoder("linear", "cosformer", attention_options=wrong), "feature_map"
    )


def test_how_long_a_hybrid_can_go_on() -> None:
    def longest(*hybrid: str) -> int | None:
        sizes = SIZES | {"positions": "none", "mechanism": hybrid[0], "hybrid": hybrid}
        model = models.CausalLM(11, rngs=nnx.Rngs(params=0), **sizes)
        return decoding.longest(model)

    assert longest("hgrn", "linear") is None
    assert longest("hgrn", "cosformer") == 12


def test_code_in_a_hybrid_is_not_imported_unasked() -> None:
    described = saved.describe(
        models.SequenceClassifier(11, 3, rngs=nnx.Rngs(params=0), **SIZES)
    )
    described["encoder"]["hybrid"] = ["cosformer", "no_such_module:attention"]
    assert_rejects(lambda: saved.maker(described), "allow_code", "no_such_module")


SHARED = {"mechanism": "linformer", "attention_options": {"sharing": "layerwise"}}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"hybrid": ("hgrn",)}, "'cosformer' among them"),
        ({"hybrid": ("hgrn", "cosformer", "flow", "linear")}, "3 blocks"),
        ({"hybrid": ("hgrm", "cosformer")}, "'hgrn'"),
        ({"hybrid": ("luna", "cosformer")}, "'luna'"),
        ({"hybrid": ("linformer", "cosformer"), "is_causal": True}, "'linformer'"),
        ({"hybrid": ("linformer", "hgrn"), **SHARED}, "sharing"),
    ],
)
def test_what_cannot_be_mixed(settings: Any, word: str) -> None:
    settings = SIZES | {"mechanism": "cosformer"} | settings
    rngs = nnx.Rngs(params=0)
    assert_rejects(
        lambda: TransformerEncoder(11, **settings, rngs=rngs), "hybrid", word
    )


def test_only_softmax_throughout_can_be_the_source_of_others() -> None:
    settings = SIZES | {"mechanism": "softmax", "hybrid": ("softmax", "linear")}
    model = models.SequenceClassifier(11, 3, rngs=nnx.Rngs(params=0), **settings)
    change = functools.partial(models.from_softmax, model, "cosformer")
    assert_rejects(change, "source", "softmax", "'linear'")
    plain = settings | {"hybrid": ("softmax",)}
    model = models.SequenceClassifier(11, 3, rngs=nnx.Rngs(params=0), **plain)
    changed = models.from_softmax(model, "cosformer")
    assert _names(changed.encoder) == ["cosformer"] * 3


def test_an_attention_of_ones_own_in_a_hybrid(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "def plain(query, key, value):\n    return value\n"
    (tmp_path / "mine_in_a_hybrid.py").write_text(code)
    spec = "mine_in_a_hybrid:plain"
    config = get_preset("listops", attention=spec).replace(
        model={"hybrid": f"hgrn,{spec}"}
    )
    encoder = TransformerEncoder(
        11, config=encoder_config(config), rngs=nnx.Rngs(params=0)
    )
    assert _names(encoder) == ["hgrn", spec]
    other = config.replace(model={"hybrid": f"hgrn,{spec},another_module:plain"})
    assert_rejects(lambda: encoder_config(other), "--model.hybrid", "another_module")


def test_an_attention_of_ones_own_is_not_taken_for_one_of_the_same_name() -> None:
    def hgrn(query: Any, key: Any, value: Any) -> Any:
        return value

    spec = functools.partial(_encoder, "hgrn", "cosformer", mechanism=hgrn)
    assert_rejects(spec, "hybrid")
    encoder = _encoder(hgrn, "cosformer", mechanism=hgrn)
    assert encoder.blocks[0].attention.mechanism.foreign


def test_a_config_can_be_a_static_value() -> None:
    lists = {"hybrid": ["hgrn", "cosformer"], "cutoffs": [3], "grid": [3, 4]}
    config = ModelConfig(**SIZES, **lists)
    assert config.hybrid == ("hgrn", "cosformer")
    assert hash(config) == hash(ModelConfig(**SIZES, **lists))


def test_spaces_do_not_make_another_run() -> None:
    one, other = (
        get_preset("listops").replace(model={"hybrid": names})
        for names in ("hgrn,cosformer", " hgrn, cosformer")
    )
    assert one == other and one.mixers == "hgrn / cosformer"


def test_spectra_of_layers_with_different_numbers_of_heads() -> None:
    settings = SIZES | {"mechanism": "cosformer", "hybrid": ("hgrn", "cosformer")}
    model = models.SequenceClassifier(11, 3, rngs=nnx.Rngs(params=0), **settings)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 9)))
    lengths = jnp.array([9, 7])
    run = SimpleNamespace(model=model, run=lambda batch: model(*batch))
    spectra = run_spectra(run, (tokens, lengths))
    heads = np.isfinite(spectra.ranks).sum(1)
    assert heads[0] == heads[2] != heads[1] == 2
    for name in ("projected", "factors", "nearest", "worst"):
        assert np.isfinite(getattr(spectra, name)).all()
    section: Any = spectrum_section({"hybrid": spectra}, "A hybrid.")
    chart, table = section.parts
    assert "Blue cells are heads" in chart.caption and len(table.rows) == 3
    assert len(chart.draw().axes) == 3
