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
  Expected: cosFormer 37.45 % in 17 minutes on 2 CPU cores (results/listops/ has this
  run and those of softmax, linear, Linformer and Flow).

official: google-research/long-range-arena, lra_benchmarks/listops/configs: 4 layers,
512 wide, 8 heads, MLP 1024, CLS pooling, sinusoidal positions, no biases in the
attention projections, dropout 0.1, Adam (0.9, 0.98, 1e-9) with decoupled weight decay
0.1, base rate 0.05 with inverse square-root decay after 1,000 steps, batch 32, 5,000
steps, fixed length 2,000; each mechanism's constants and sizes are in its entry, with
their sources in ``families``.
  Command: python -m lra_jax.train --task=listops --preset=official
  Published accuracy: Transformer 36.37, Linear Transformer 16.13, Linformer 35.70 (LRA
  paper, Table 1); cosFormer 37.90, Flowformer 38.70 (Flowformer repository, figure).
  About 40 times the arithmetic of compact: meant for an accelerator.

modern: our best guess, not a published recipe, and not measured: 4 layers, 256 wide, 4
heads, MLP 1024, mean pooling, rotary positions where scores are inner products of
queries and keys, else learned ones, peak rate 5e-4, weight decay 0.05 on matrices
alone, batch 32, 30,000 steps (10 epochs).
  Command: python -m lra_jax.train --task=listops --preset=modern --attention=softmax
"""

import dataclasses
from typing import ClassVar

from lra_jax.configs import families
from lra_jax.configs.base import Config, GeneratedData, ModelConfig, TrainConfig
from lra_jax.errors import positive


@dataclasses.dataclass(frozen=True)
class ListOpsData(GeneratedData):
    """Where trees come from, how many are generated and how they are batched."""

    min_length: int = 500
    """Accepted trees are longer than this."""
    max_length: int = 2000
    """Accepted trees are shorter than this."""
    max_depth: int = 10
    """Deepest level of a tree."""
    max_args: int = 10
    """Most arguments of an operator."""
    permute: bool = False
    """Show the arguments of every operator in a new random order each time; of the
    training split alone. Values do not change."""

    of_batches: ClassVar[tuple[str, ...]] = (*GeneratedData.of_batches, "permute")

    @property
    def augments(self) -> bool:
        """See the base class."""
        return self.permute

    def check(self) -> None:
        """See the base class."""
        super().check()
        positive("--data.max_length", self.max_length)

    @property
    def longest(self) -> int | None:
        """See the base class; batches of generated trees may be padded to it."""
        return self.max_length if self.path is None else None


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
        ),
        data=ListOpsData(buckets="none"),
    )


def modern(attention: str) -> Config:
    """A larger model, positions that suit the mechanism, a cosine."""
    return Config(
        task="listops",
        attention=attention,
        preset="modern",
        train=families.modern_train(steps=30_000, eval_every=1_000),
        model=ModelConfig(
            num_layers=4,
            embed_dim=256,
            num_heads=4,
            qkv_dim=256,
            mlp_dim=1024,
            positions=families.modern_positions(attention),
        ),
    )


PRESETS = {"compact": compact, "official": official, "modern": modern}
