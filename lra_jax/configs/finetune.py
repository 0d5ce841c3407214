"""Presets of fine-tuning: classification of texts, from a masked language model.

``--data.checkpoint`` names a finished run of ``--task=mlm``. Training starts from its
encoder, so attention and sizes must be those of that run; the texts use its vocabulary.
Without it the weights are random, which shows the benefit of pretraining, and each byte
is a token. The texts are the IMDb reviews, or any table.

tiny (default): for a model of mlm's preset tiny.
  Command: python -m lra_jax.train --task=finetune --data.checkpoint=runs/...
linformer: for RoBERTa-base; 10 epochs of IMDb's 22,500 reviews. The paper does not give
its fine-tuning rate: this one is similar to RoBERTa's.
  Command: python -m lra_jax.train --task=finetune --preset=linformer
  --attention=linformer --data.checkpoint=runs/...
"""

import dataclasses
from typing import ClassVar, Literal

from lra_jax.configs import families, mlm
from lra_jax.configs.base import StoredData
from lra_jax.errors import Count, Name, Size

RATES = {"tiny": (1e-4, 3e-4, 1e-3), "linformer": (1e-5, 3e-5, 5e-5)}


@dataclasses.dataclass(frozen=True)
class FinetuneData(StoredData):
    """Which texts and labels, and which checkpoint."""

    start_fields: ClassVar[tuple[str, ...]] = ("checkpoint",)

    path: Name | None = None
    """A .tsv or .csv table with the columns text and label, a folder of such tables, or
    an .npz file of token ids, see docs/own_data.md; or the IMDb reviews, whose archive
    is downloaded by default."""
    labels: Literal["classes", "multi", "numbers"] = "classes"
    """Labels of tables. classes: one class each. multi: any number of classes, as in
    `good,long`. numbers: numbers to predict. The arrays of an .npz file show which."""
    checkpoint: Name | None = None
    """A finished run of --task=mlm, or its model.safetensors; None = random weights."""
    seed: Count = 0
    """Seed for choosing the examples held out for validation and, from a single table,
    for the test."""
    max_length: Size = 512
    """Texts are truncated to this many tokens."""


def _train(**settings):
    return dataclasses.replace(
        mlm.TINY_TRAIN, batch_size=32, best_by="accuracy", **settings
    )


PRESETS = families.presets(
    "finetune",
    tiny=families.Preset(
        train=_train(steps=2_000, learning_rate=3e-4, eval_every=500),
        model=mlm.TINY_MODEL,
    ),
    linformer=families.Preset(
        train=_train(
            steps=7_000, learning_rate=3e-5, warmup=420, eval_every=700, log_every=50
        ),
        model=mlm.ROBERTA_MODEL,
    ),
)
