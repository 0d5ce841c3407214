"""ListOps presets.

Task: 96,000 / 2,000 / 2,000 nested expressions of 501 to 1999 tokens, ten classes. A
reader of nothing scores 17.05 %, of the root operator alone 36.6 %.

compact: the small model that the PyTorch LRA code bases share (mlpen/Nystromformer and
pkuzengqi/Skyformer, folder LRA): 2 layers, 64 wide, 2 heads, MLP 128, mean pooling,
learned positions, dropout 0.1, batch 32, 5,000 steps. Those code bases run AdamW at
1e-4 with a linear one-cycle schedule, at which 5,000 steps end at the majority rate.
Ours: 500 steps of warm-up to 1e-3, then a cosine; the first 128 tokens of each training
sequence for 2,000 steps, the first 512 for 500, then all of it (``length_warmup``); a
second moment that decays with 0.98, as in the LRA code; weight decay of 0.3 on matrices
and tables; gradients clipped to a global norm of 1 (Skyformer clips values at 1).
Linformer has 128 features, as in Skyformer. The best checkpoint is the one with the
lowest validation loss (the code bases: highest accuracy): accuracy hardly moves here
while the loss still falls.
  Command: python -m lra_jax.train --task=listops
  Expected: the table of README.md, from results/listops/: cosFormer 37.45 % in 17
  minutes on 2 CPU cores.

  How it learns (cosFormer, seed 0; results/listops/): on 128 tokens the training loss
  leaves the labels' entropy (2.26 nats) at step 200, stands at that of the root
  operator (1.737) from 450 to 800, then falls to 1.65 at 2,000, as the tokens behind
  the root are read. On whole sequences the model is worse than the root operator alone
  until 512 tokens were seen (validation 1.863 at 2,000, 1.686 at 2,500), and then
  better (1.638 at 3,000, 1.624 at the end). What there is to gain, by logistic
  regressions of the first k tokens (python benchmarks/listops_readers.py,
  results/listops_readers.json), on the test split of seed 0: the root alone 36.1 % and
  1.735 nats (36.6 % in the distribution), two tokens 36.3 % and 1.662, four 36.3 % and
  1.632, eight 37.0 % and 1.639; the run ended at 37.45 % and 1.611. So most of what the
  second plateau hides is certainty and not accuracy: a maximum stays 9 whether the next
  token says so or not. The digits before the last bracket are worth more (41.1 % by
  count tables), but learned positions count from the front, and sequences end at any of
  1,500 places.

  Why sequences grow: with whole sequences from the start the root is found at step 750
  to 900, in 4 minutes in place of half of one, and few runs get beyond it. One did at
  2,000, of a rate of 5e-4 held until 4,000 and a weight decay of 1.0 (36.95 % on one
  device, after 42 minutes); the same on two devices, which round otherwise, had not by
  3,000. There one head had put 98 % of its weight on the root by pushing all other keys
  below zero, where ReLU passes no gradient. A peak of 1e-3 left the plateau in one run
  of two, 2e-3 not by 2,250; Flow attention had not even found the root by 3,000, nor
  linear attention by 1,080. On 128 tokens a rate of 1e-3 gets beyond the root by step
  1,200 to 1,400 with weight decays of 0.05 and 0.3 alike, Flow and linear attention by
  1,500, and a rate of 2e-3 by 2,350.

  Without weight decay no run on whole sequences left it: once the root is read, its
  vector grows to a norm of 70 beside token and position embeddings of 0.4, so that
  nothing behind the first attention can see a token. A second moment of 0.98 shortens
  the first wait (0.999 left 2.26 at step 900 in place of 700, at 1e-3). What lengthens
  it: positions that begin as sinusoids, fixed sinusoids, embeddings of standard
  deviation 0.5 and 1 in place of 0.02, a peak of 3e-3.

  What these two paragraphs say is from single runs, most of them stopped early, whose
  records were not kept: hints for the next try, not results.

official: google-research/long-range-arena, lra_benchmarks/listops/configs: 4 layers,
512 wide, 8 heads, MLP 1024, CLS pooling, sinusoidal positions, no biases in the
attention projections, dropout 0.1, Adam (0.9, 0.98, 1e-9) with decoupled weight decay
0.1, base rate 0.05 with inverse square-root decay after 1,000 steps, batch 32, 5,000
steps, fixed length 2,000; each mechanism's constants as in that code (``families``).
  Command: python -m lra_jax.train --task=listops --preset=official
  Published accuracy: Transformer 36.37, Linear Transformer 16.13, Linformer 35.70 (LRA
  paper, Table 1); cosFormer 37.90, Flowformer 38.70 (Flowformer repository, figure).
  About 40 times the arithmetic of compact: meant for an accelerator.

modern: our best guess, not a published recipe, and not measured: 4 layers, 256 wide, 4
heads, MLP 1024, mean pooling, rotary positions where scores are inner products of
queries and keys, else learned ones, peak rate 5e-4, weight decay 0.05 on matrices
alone, batch 32, 30,000 steps (10 epochs).
  Command: python -m lra_jax.train --task=listops --preset=modern --attention=softmax
  Published, of a larger model of this kind: a Transformer with rotary positions trained
  from scratch 47.90 ("Never Train from Scratch", arXiv:2310.02980; quoted from memory).
"""

from lra_jax.configs import families
from lra_jax.configs.base import Config, DataConfig, ModelConfig, TrainConfig

_COMPACT_OPTIONS = {"linformer": "features=128"}


def compact(attention: str) -> Config:
    """The PyTorch code bases' small model: 2 layers of width 64."""
    return Config(
        task="listops",
        attention=attention,
        preset="compact",
        train=TrainConfig(
            length_warmup="128:0.4,512:0.5",
            adam_b2=0.98,
            weight_decay=0.3,
            decay_vectors=False,
            best_by="loss",
        ),
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
            attention_options=families.official_options(attention),
        ),
        data=DataConfig(buckets="none"),
    )


def modern(attention: str) -> Config:
    """A larger model, positions that suit the mechanism, a cosine."""
    return Config(
        task="listops",
        attention=attention,
        preset="modern",
        train=families.modern_train(steps=30_000, eval_every=1_000),
        model=families.modern_model(
            attention,
            num_layers=4,
            embed_dim=256,
            num_heads=4,
            qkv_dim=256,
            mlp_dim=1024,
        ),
    )


PRESETS = {"compact": compact, "official": official, "modern": modern}
