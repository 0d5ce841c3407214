"""Presets of Text: IMDb reviews byte by byte, two classes, 25,000 to test on.

Chance is 50 %. The archive has no validation split. Published accuracies are for
lengths from 1,000 to 4,000 bytes (the LRA paper: the best of these), and mostly of the
best checkpoint on the test split. No accuracy of ours is given: none was measured.

official: LRA's config files (see ``families``). Validation is on the test split, as in
LRA: read the accuracy of the last checkpoint, which its authors report. The paper's
nominal length is ``--data.max_length=4000 --model.max_length=4000``. cosFormer's
50,000 steps of 16 are its 32 epochs.
  Command: python -m lra_jax.train --task=text --preset=official --attention=softmax

compact: the PyTorch code bases' model; a tenth of the training reviews held out to
choose the checkpoint.
  Command: python -m lra_jax.train --task=text
  Time: at most 9 hours on one CPU core, at the 80,000 tokens/s of a ListOps run (an
  estimate).

modern: the block of ``families``, a tenth held out.
  Command: python -m lra_jax.train --task=text --preset=modern --attention=softmax
"""

import dataclasses
from typing import Literal

from lra_jax.configs import families
from lra_jax.configs.base import BytesData
from lra_jax.errors import Count


@dataclasses.dataclass(frozen=True)
class TextData(BytesData):
    """Where the reviews come from and how they are batched."""

    seed: Count = 0
    """Seed for choosing the reviews held out for validation."""
    validation: Literal["holdout", "test"] = "holdout"
    """The archive has no validation split. holdout: a tenth of the training examples,
    or the validation split of files that have one. test: the test split itself, as in
    LRA's code; the best checkpoint is then chosen on the test labels, and only the
    accuracy of the last one is valid."""


PRESETS = families.presets(
    "text",
    compact=families.Preset(
        train=families.compact_train(steps=20_000, warmup=8_000, eval_every=1_000),
        model=families.encoder(max_length=4_000),
    ),
    official=families.Preset(
        train=families.official_train(
            steps=20_000,
            learning_rate=0.05,
            warmup=8_000,
            weight_decay=0.1,
            eval_every=1_000,
        ),
        model=families.official_model(
            num_layers=4, embed_dim=256, num_heads=4, mlp_dim=1024, max_length=1_000
        ),
        data=TextData(max_length=1_000, buckets="none", validation="test"),
    ),
    modern=families.Preset(
        train=families.modern_train(steps=20_000, eval_every=1_000),
        model=families.modern_model(embed_dim=256, mlp_dim=1024, max_length=4_000),
        rotary=True,
    ),
)
