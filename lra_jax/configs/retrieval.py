"""Presets of Retrieval: does one of two papers cite the other? 4,000 bytes of each.

147,086 / 18,090 / 17,437 pairs of the ACL Anthology Network, balanced: chance is 50 %.
No accuracy of ours is given, because none was measured.

official: LRA's config files (see ``families``), one epoch. The warm-up is longer than
the run, so the rate never reaches its peak. cosFormer's entry has 50,000 steps.
  Command: python -m lra_jax.train --task=retrieval --preset=official

compact: the PyTorch code bases' model, best checkpoint on validation. Their head has
one hidden layer, ours two.
  Command: python -m lra_jax.train --task=retrieval
  Time: at most 27 hours on one CPU core, at the 80,000 tokens/s of a ListOps run (an
  estimate).

modern: the block of ``families``, 6.5 epochs.
  Command: python -m lra_jax.train --task=retrieval --preset=modern --attention=softmax
"""

import dataclasses

from lra_jax.configs import families
from lra_jax.configs.base import BytesData


@dataclasses.dataclass(frozen=True)
class RetrievalData(BytesData):
    """Where the papers come from and how they are batched."""


PRESETS = families.presets(
    "retrieval",
    compact=families.Preset(
        train=families.compact_train(steps=30_000, warmup=800, eval_every=1_000),
        model=families.encoder(max_length=4_000),
    ),
    official=families.Preset(
        train=families.official_train(
            steps=5_000, learning_rate=0.05, warmup=8_000, weight_decay=0.1
        ),
        model=families.official_model(
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            mlp_dim=512,
            max_length=4_000,
            interaction="concat",
            pooling="first",
        ),
        data=RetrievalData(buckets="none"),
    ),
    modern=families.Preset(
        train=families.modern_train(steps=30_000, eval_every=1_000),
        model=families.modern_model(embed_dim=128, mlp_dim=512, max_length=4_000),
        rotary=True,
    ),
)
