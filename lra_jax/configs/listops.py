"""ListOps presets.

Task: 96,000 / 2,000 / 2,000 nested expressions of 501 to 1999 tokens, ten classes. A
reader of nothing scores 17.05 %, of the root operator alone 36.6 %.

compact: the small model that the PyTorch LRA code bases share (mlpen/Nystromformer and
pkuzengqi/Skyformer, folder LRA): 2 layers, 64 wide, 2 heads, MLP 128, mean pooling,
learned positions, dropout 0.1, batch 32, 5,000 steps. Those code bases run AdamW at
1e-4 with a linear one-cycle schedule, at which 5,000 steps end at the majority rate.
Ours: peak 1e-3 with 500 steps of warm-up and a cosine; a second moment that decays with
0.98, as in the LRA code; weight decay of 1.0 on matrices and tables; gradients clipped
to a global norm of 1 (Skyformer clips values at 1). Linformer has 128 features, as in
Skyformer.
  Command: python -m lra_jax.train --task=listops
  Expected: results/listops/ holds the measured accuracies and times.

  How it learns (cosFormer, seed 0): the validation loss leaves the labels' entropy
  (2.26 nats) at step 700 and stands at that of the root operator (1.737) from 900 on.
  In the data of seed 0 a reader of the root alone scores 36.1 % on the test split
  (36.6 in the distribution), one that also reads the digits right after it 36.6 %,
  and with those before the last bracket 41.1 %. A second moment of 0.98 shortens the
  first wait (0.999 left it at step 900). Without weight decay no run left the second
  plateau: once the root is read, its vector grows to a norm of 70 beside token and
  position embeddings of 0.4, so that nothing behind the first attention can see a
  token, and the position table walks at random. With it the norm is 6 to 10, beside
  0.15. Of two runs with decay that differ in rounding alone (one and two devices) one
  left the plateau at step 1,800, the first head now reading the next tokens too, and
  stood at a validation loss of 1.697 at 2,500, where it was stopped; the other had
  not left it by 3,300, nor had a third with a rate of 2e-3 by 2,250. Tried without
  decay, one run each, most of them stopped on one of the two plateaus: rates of 2e-3
  and 3e-3 (validation loss 1.76 at step 1,500; not left 2.26 at 950), no dropout
  (slower to leave 2.26), Adam's eps of 1e-5, positions that begin as sinusoids (both
  still at 1.74 at 1,300 and 2,100), embeddings of standard deviation 0.5 and 1 in
  place of 0.02 (not left 2.26 at 1,350 and 1,600).

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
        train=TrainConfig(adam_b2=0.98, weight_decay=1.0, decay_vectors=False),
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
