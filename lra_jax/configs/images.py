"""Presets of images with a class each; their data: `lra_jax.data.images`.

Both are the hierarchical Flowformer with any mechanism: square patches, stages of twice
the width after a convolution over 2 x 2 positions, learned positions in the first stage
only, the same number of heads in all, norms before attention and MLP, LayerScale on the
MLP, and a linear layer after the mean over positions and its norm.

small (default): the digits, 64 positions and then 16 of 8 x 8 pixels; two blocks 32
wide and two of 64, 4 heads; AdamW at 2e-3 with a cosine, 500 steps of 64, 28 epochs.
  Command: python -m lra_jax.train --task=images --attention=flow
official: thuml/Flowformer, folder Flowformer_CV, on the code of DeiT: images of 224 in
patches of 4, stages of 3, 3, 10 and 3 blocks, 96 to 768 wide, 12 heads; 43,311,304
parameters with 1,000 classes. AdamW at 7.5e-4 for batches of 768, weight decay 0.05 on
matrices only, 5 epochs of warm-up and a cosine, 300 epochs of ImageNet's 1,281,167
images (1,668 steps each), gradients clipped at 1, drop path 0.2, label smoothing 0.1,
mixup 0.8, cutmix 1, DeiT's average of the parameters (0.99996), bfloat16. Deviations:
no random crops, flips, RandAugment or colour jitter: the middle of each picture is
shown; the average is what is scored; the cosine ends at 0 and the warm-up begins there,
where that code has 1e-5 and 1e-6; positions are decayed, too. ImageNet's validation
images belong in a folder ``test``; without a folder ``valid``, a fifth of each class of
the training split is held out.
  Command: python -m lra_jax.train --task=images --preset=official --attention=flow \
  --data.path=imagenet
"""

import dataclasses
import functools
from typing import Any, ClassVar

from lra_jax.configs import families
from lra_jax.configs.base import DataConfig, TrainConfig
from lra_jax.errors import Count, Name, Size


@dataclasses.dataclass(frozen=True)
class ImagesData(DataConfig):
    """Where the images come from."""

    path: Name | None = None
    """A folder with a folder of PNG or JPEG files for each class, alone or in train/,
    valid/ and test/; or CIFAR-10's archive or folder; by default scikit-learn's digits,
    which need the extra images."""
    size: Size | None = None
    """Rows and columns to which images are scaled; by default 8 for the digits and 32
    for others."""
    seed: Count = 0
    """Seed for choosing the examples held out for validation."""

    length_fields: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[str] = "digits of scikit-learn"

    @property
    def image_shape(self) -> tuple[int, int]:
        side = self.size or (8 if self.is_own else 32)
        return side, side

    @property
    def reader_arguments(self) -> dict[str, Any]:
        return super().reader_arguments | {"size": self.image_shape[0]}


_train = functools.partial(TrainConfig, weight_decay=0.05, decay_vectors=False)
_model = functools.partial(
    families.encoder, inputs="linear", head="linear", layer_scale=1e-5, dropout=0.0
)

PRESETS = families.presets(
    "images",
    small=families.Preset(
        train=_train(
            steps=500,
            batch_size=64,
            eval_batch_size=64,
            learning_rate=2e-3,
            warmup=50,
            eval_every=50,
        ),
        model=_model(
            num_layers=4,
            stages="2,2",
            embed_dim=32,
            num_heads=4,
            mlp_dim=128,
            drop_path=0.1,
        ),
    ),
    official=families.Preset(
        train=_train(
            steps=500_400,
            batch_size=768,
            eval_batch_size=768,
            learning_rate=7.5e-4,
            warmup=8_340,
            dtype="bfloat16",
            eval_every=1_668,
            mixup=0.8,
            cutmix=1.0,
            label_smoothing=0.1,
            ema=0.99996,
        ),
        model=_model(
            num_layers=19,
            stages="3,3,10,3",
            embed_dim=96,
            num_heads=12,
            mlp_dim=384,
            patch=4,
            drop_path=0.2,
        ),
        data=ImagesData(size=224),
    ),
)
