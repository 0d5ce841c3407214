"""Presets of time series; their data: `lra_jax.data.series`.

official: thuml/Flowformer, folder Flowformer_TimeSeries, the model of Zerveas et al.
(2021, arXiv:2010.02803): vectors projected to 512 and scaled by the root of that,
learned positions, two blocks of 8 heads with norms after the sums, an MLP of 2,048, a
final norm, and the rows of all steps flattened into one layer. RAdam at 1e-3, batches
of 16, gradients clipped at 4. 100 epochs are 1,700 steps of JapaneseVowels, scored
every two; for other sets, set --train.steps to 100 epochs and --train.eval_every to 2.
The published accuracy is that of the best epoch on the test split; with
--data.validation=holdout a fifth of the training split chooses instead. Deviations:
padding is exact, where that code lets attention see it; positions are drawn from a
normal distribution; softmax competition of flow is finite by clip=30.
  Command: python -m lra_jax.train --task=series --preset=official --attention=flow
quick (default): 2 blocks, 64 wide, 4 heads, and the same head; AdamW at 1e-3 with a
cosine, 600 steps of 16, chosen on a fifth of the training split.
  Command: python -m lra_jax.train --task=series --attention=flow
"""

import dataclasses
import functools
from typing import ClassVar, Literal

from lra_jax.configs import families
from lra_jax.configs.base import DataConfig, TrainConfig
from lra_jax.errors import Count, Name, Size


@dataclasses.dataclass(frozen=True)
class SeriesData(DataConfig):
    """Where the series come from and how they are batched."""

    path: Name | None = None
    """NAME_TRAIN.ts beside NAME_TEST.ts, their folder, or an .npz file; by default
    JapaneseVowels, which needs the extra series."""
    max_length: Size | None = None
    """Series are cut after this many steps; by default at the longest for training."""
    validation: Literal["holdout", "test"] = "holdout"
    """holdout: a fifth of the training split, or the validation split of files that
    have one. test: the test split itself, as in published results; the accuracy of the
    best checkpoint is then chosen on the test labels."""
    seed: Count = 0
    """Seed for choosing the examples held out for validation."""

    length_fields: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[str] = "JapaneseVowels of aeon"


_model = functools.partial(
    families.encoder, num_layers=2, inputs="vectors", pooling="flatten"
)

PRESETS = families.presets(
    "series",
    quick=families.Preset(
        train=TrainConfig(
            steps=600, batch_size=16, warmup=50, weight_decay=0.01, eval_every=50
        ),
        model=_model(num_heads=4),
    ),
    official=families.Preset(
        train=TrainConfig(
            steps=1_700,
            batch_size=16,
            optimizer="radam",
            learning_rate=1e-3,
            schedule="constant",
            warmup=0,
            clip_norm=4.0,
            eval_every=34,
        ),
        model=_model(
            embed_dim=512,
            num_heads=8,
            mlp_dim=2_048,
            scale_embeddings=True,
            post_norm=True,
            final_norm=True,
        ),
        data=SeriesData(validation="test"),
    ),
)
