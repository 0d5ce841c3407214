"""Presets of Image: CIFAR-10 in grey, 1,024 pixels read row by row, ten classes.

45,000 / 5,000 / 10,000 images; chance is 10 %. No augmentation. LRA's code scores 9,984
of the test images, only whole batches; here all are scored. No accuracy of ours is
given, because none was measured.

official: LRA's config files (see ``families``), with the sizes of each mechanism in its
entry: an embedding for each of 256 values, black pixels as padding, learned positions,
batch 256, 35,000 steps (200 epochs), a cosine over the run from 5e-4 after 175 steps,
no weight decay, dropout 0.3. A mechanism without its own sizes has the Transformer's.
For cosFormer, its group's 200 epochs are also 35,000 steps.
  Command: python -m lra_jax.train --task=image --preset=official --attention=softmax
  Published: Transformer 42.44, Linear Transformer 42.34, Linformer 38.56 (LRA paper,
  Table 1); Flowformer 43.20 (Flowformer repository, figure); cosFormer 51.23 (S4's
  code, with batch norm).

compact: the PyTorch code bases' model, batch 256, 35,000 steps, warm-up 175, an
embedding for each value, no pixel masked.
  Command: python -m lra_jax.train --task=image
  Time: 32 hours on one CPU core, at the 80,000 tokens/s of a ListOps run (an estimate).
  Published: Nystromformer 41.58 (by its authors; table of the S4 paper).

modern: 6 layers, 128 wide, 4 heads, MLP 256, the pixel's value projected, a learned
vector for each row and each column, peak rate 1e-3, weight decay 0.05, batch 128,
35,000 steps (100 epochs).
  Command: python -m lra_jax.train --task=image --preset=modern
  Published by others: with two-dimensional relative positions 61.72 (LRA paper).
"""

from lra_jax.configs import families

_PIXELS = 1024


PRESETS = families.presets(
    "image",
    compact=families.Preset(
        train=families.compact_train(
            steps=35_000,
            batch_size=256,
            eval_batch_size=250,
            warmup=175,
            eval_every=875,
        ),
        model=families.encoder(max_length=_PIXELS),
    ),
    official=families.Preset(
        train=families.official_train(
            steps=35_000,
            batch_size=256,
            eval_batch_size=250,
            learning_rate=5e-4,
            warmup=175,
            eval_every=875,
            schedule="lra_cosine",
        ),
        model=families.official_model(
            num_layers=1,
            embed_dim=128,
            num_heads=8,
            qkv_dim=64,
            mlp_dim=128,
            max_length=_PIXELS,
            positions="learned",
            dropout=0.3,
        ),
    ),
    modern=families.Preset(
        train=families.modern_train(
            steps=35_000,
            batch_size=128,
            eval_batch_size=250,
            learning_rate=1e-3,
            eval_every=875,
        ),
        model=families.modern_model(
            num_layers=6,
            embed_dim=128,
            mlp_dim=256,
            max_length=_PIXELS,
            inputs="linear",
            positions="learned_2d",
        ),
    ),
)
