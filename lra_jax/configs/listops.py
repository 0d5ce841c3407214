"""ListOps presets.

Task: 96,000 / 2,000 / 2,000 nested expressions of 501 to 1999 tokens, ten classes. A
reader of nothing scores 17.05 %, of the root operator alone 36.6 %.

compact: the small model that the PyTorch LRA code bases share (mlpen/Nystromformer and
pkuzengqi/Skyformer, folder LRA): 2 layers, 64 wide, 2 heads, MLP 128, mean pooling,
learned positions, dropout 0.1, batch 32, 5,000 steps. Three things are ours: those code
bases run AdamW at 1e-4 with a linear one-cycle schedule, at which 5,000 steps end at
the majority rate, so the peak is 1e-3 with 500 steps of warm-up and a cosine, and the
second moment decays with 0.98, as in the LRA code, which leaves that rate at step 550
instead of 900; and gradients are clipped to a global norm of 1 (Skyformer clips values
at 1). Linformer has 128 features, as in Skyformer.
  Command: python -m lra_jax.train --task=listops
  Expected: results/listops/ holds the measured accuracies and times, cosFormer 36.1 %.
  Its validation loss falls from the labels' entropy (2.26) after about 900 steps and
  stays at that of the root operator, 1.737 nats, from step 1,500 to the end. In the
  data of seed 0 a reader of that one token scores 36.1 % on the test split (36.6 in the
  distribution), one that also reads the digits right after it 36.6 %, and with those
  before the last bracket 41.1 %.
  Tried, to get beyond, one run each, most of them stopped early and all beside other
  work: token embeddings of standard deviation 1 beside positions of 0.02 had not left
  the majority rate by step 1,600 (with 0.02 for both it is left at 900); rates of 3e-3
  and 6e-3 without dropout had not by step 800. On trees of 100 to 300 tokens these
  settings left the second plateau before step 1,000 and ended, after 2,500, at a
  validation loss of 1.61 and 37.1 %. There, 3e-3 without dropout was still on it at
  1,500; no dropout, and embeddings and positions of 0.1, were level with these settings
  at 1,000; 0.5 and positions that begin as sinusoids were behind when stopped (1,200
  and 1,800); 5e-4 was stopped at 800, too early to tell.

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
        train=TrainConfig(adam_b2=0.98),
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
