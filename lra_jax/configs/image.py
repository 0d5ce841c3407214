"""Presets of Image: CIFAR-10 in grey, 1,024 pixels read row by row, ten classes.

45,000 / 5,000 / 10,000 images; chance is 10 %. No augmentation. LRA's code scores
9,984 of the test images, whole batches alone; here all are scored.

official: LRA's config files (see ``families``), with the sizes of each mechanism
(below): an embedding for each of 256 values, black pixels as padding, learned
positions, batch 256, 35,000 steps (200 epochs), a cosine over the run from 5e-4 after
175 steps, no weight decay, dropout 0.3. Mechanisms that LRA does not have get the sizes
of the Transformer.
  Command: python -m lra_jax.train --task=image --preset=official --attention=softmax
  Published: Transformer 42.44, Linear Transformer 42.34, Linformer 38.56 (LRA paper,
  Table 1); cosFormer 43.17, Flowformer 43.20 (Flowformer repository, figure).

compact: the PyTorch code bases' model, batch 256, 35,000 steps, warm-up 175, an
embedding for each value, all pixels seen.
  Command: python -m lra_jax.train --task=image
  Time: 32 hours on one CPU core, at the 80,000 tokens/s of a ListOps run (an estimate).
  Published: Nystromformer 41.58 (by its authors; table of the S4 paper).

modern: 6 layers, 128 wide, 4 heads, MLP 256, the pixel's value projected, a learned
vector for each row and each column, peak rate 1e-3, weight decay 0.05, batch 128,
35,000 steps (100 epochs).
  Command: python -m lra_jax.train --task=image --preset=modern
  Published, of others: with two-dimensional relative positions 61.72 (LRA paper); a
  Transformer with rotary positions from scratch 75.04 ("Never Train from Scratch",
  arXiv:2310.02980; quoted from memory).

No accuracy of ours stands here: none was measured.
"""

from typing import Any

from lra_jax.configs import families
from lra_jax.configs.base import Config, DataConfig

_PIXELS = 1024
_DATA = DataConfig(max_length=_PIXELS)

_BASE = {"embed_dim": 32, "qkv_dim": 32, "mlp_dim": 64, "num_heads": 1}
_LARGE = {"embed_dim": 128, "qkv_dim": 64, "mlp_dim": 128, "num_heads": 8}
# Sizes that LRA's config files give to single mechanisms; Sinkhorn has the base sizes,
# with a weight decay and a dropout of its own. BigBird's heads are one because of a
# misspelt key there.
_OFFICIAL: dict[str, dict[str, Any]] = {
    "bigbird": _LARGE | {"num_heads": 1},
    "local": _LARGE | {"num_heads": 2, "pooling": "mean"},
    "longformer": _LARGE | {"num_heads": 4, "num_layers": 4, "pooling": "mean"},
    "reformer": {
        **{"embed_dim": 64, "qkv_dim": 32, "mlp_dim": 64, "num_heads": 8},
        "num_layers": 4,
    },
    "sinkhorn": _BASE | {"dropout": 0.1},
    # Not in LRA. It has no projections, so that all widths are one.
    "fnet": _LARGE | {"qkv_dim": 128},
}


def official(attention: str) -> Config:
    """LRA's config files, with each mechanism's own sizes."""
    sizes = {"num_layers": 1, "dropout": 0.3, "positions": "learned"}
    sizes |= _OFFICIAL.get(attention, _LARGE)
    return Config(
        task="image",
        attention=attention,
        preset="official",
        train=families.official_train(
            steps=35_000,
            batch_size=256,
            eval_batch_size=250,
            learning_rate=5e-4,
            warmup=175,
            weight_decay=0.7 if attention == "sinkhorn" else 0.0,
            eval_every=875,
            schedule="lra_cosine",
        ),
        model=families.official_model(
            attention, max_length=_PIXELS, images=True, **sizes
        ),
        data=_DATA,
    )


def compact(attention: str) -> Config:
    """The PyTorch code bases' small model."""
    return Config(
        task="image",
        attention=attention,
        preset="compact",
        train=families.compact_train(
            steps=35_000,
            batch_size=256,
            eval_batch_size=250,
            warmup=175,
            eval_every=875,
        ),
        model=families.compact_model(attention, max_length=_PIXELS),
        data=_DATA,
    )


def modern(attention: str) -> Config:
    """Projected values and two-dimensional positions."""
    return Config(
        task="image",
        attention=attention,
        preset="modern",
        train=families.modern_train(
            steps=35_000,
            batch_size=128,
            eval_batch_size=250,
            learning_rate=1e-3,
            eval_every=875,
        ),
        model=families.modern_model(
            attention,
            num_layers=6,
            embed_dim=128,
            num_heads=4,
            qkv_dim=128,
            mlp_dim=256,
            max_length=_PIXELS,
            inputs="linear",
            positions="learned_2d",
        ),
        data=_DATA,
    )


PRESETS = {"compact": compact, "official": official, "modern": modern}
