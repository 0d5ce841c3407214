"""ListOps presets.

Task: 96,000 / 2,000 / 2,000 nested expressions of 501 to 1999 tokens, ten classes. A
reader of nothing scores 17.05 %, of the root operator alone 36.6 %.

compact: the small model that the PyTorch LRA code bases share (mlpen/Nystromformer and
pkuzengqi/Skyformer, folder LRA): 2 layers, 64 wide, 2 heads, MLP 128, mean pooling,
learned positions, dropout 0.1, batch 32, 5,000 steps. Two things are ours: those code
bases run AdamW at 1e-4 with a linear one-cycle schedule, at which 5,000 steps end at
the majority rate, so the peak is 1e-3 with 500 steps of warm-up and a cosine; and
gradients are clipped to a global norm of 1 (Skyformer clips values at 1). Linformer has
128 features, as in Skyformer.
  Command: python -m lra_jax.train --task=listops
  Measured accuracy and time on 2 CPU cores: see results/listops.json.

official: google-research/long-range-arena, lra_benchmarks/listops/configs: 4 layers,
512 wide, 8 heads, MLP 1024, CLS pooling, sinusoidal positions, no biases in the
attention projections, dropout 0.1, Adam (0.9, 0.98, 1e-9) with decoupled weight decay
0.1, base rate 0.05 with inverse square-root decay after 1,000 steps, batch 32, 5,000
steps, fixed length 2,000. Linformer has 16 features there.
  Command: python -m lra_jax.train --task=listops --preset=official
  Published accuracy: Transformer 36.37, Linear Transformer 16.13, Linformer 35.70 (LRA
  paper, Table 1); cosFormer 37.90, Flowformer 38.70 (Flowformer repository, figure).
  About 40 times the arithmetic of compact: meant for an accelerator.
"""

from lra_jax.configs.base import Config, DataConfig, ModelConfig, TrainConfig

_COMPACT_OPTIONS = {"linformer": "features=128"}
_OFFICIAL_OPTIONS = {"linformer": "features=16"}


def compact(attention: str) -> Config:
    """The PyTorch code bases' small model: 2 layers of width 64."""
    return Config(
        task="listops",
        attention=attention,
        preset="compact",
        model=ModelConfig(attention_options=_COMPACT_OPTIONS.get(attention, "")),
    )


def official(attention: str) -> Config:
    """Google's config files: 4 layers of width 512, CLS pooling."""
    return Config(
        task="listops",
        attention=attention,
        preset="official",
        train=TrainConfig(
            learning_rate=0.05,
            schedule="lra",
            warmup=1000,
            weight_decay=0.1,
            adam_b2=0.98,
            adam_eps=1e-9,
            clip_norm=0.0,
        ),
        model=ModelConfig(
            num_layers=4,
            embed_dim=512,
            num_heads=8,
            qkv_dim=512,
            mlp_dim=1024,
            pooling="cls",
            positions="sinusoidal",
            embed_std=1.0,
            qkv_bias=False,
            attention_options=_OFFICIAL_OPTIONS.get(attention, ""),
        ),
        data=DataConfig(buckets="none"),
    )


PRESETS = {"compact": compact, "official": official}
