"""Presets of Image: CIFAR-10 in grey, 1,024 pixels read row by row, ten classes.

45,000 / 5,000 / 10,000 images; chance is 10 %. No augmentation. LRA's code scores 9,984
of the test images, only whole batches; here all are scored. No accuracy of ours is
given, because none was measured.

official: LRA's config files, 200 epochs (see ``families``). A mechanism without its own
sizes has the Transformer's; cosFormer has its group's 200,000 steps of 50 images.
  Command: python -m lra_jax.train --task=image --preset=official --attention=softmax

compact: the PyTorch code bases' model, no pixel masked.
  Command: python -m lra_jax.train --task=image
  Time: 32 hours on one CPU core, at the 80,000 tokens/s of a ListOps run (an estimate).

modern: the pixel's value projected, a learned vector for each row and each column, 100
epochs.
  Command: python -m lra_jax.train --task=image --preset=modern
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
