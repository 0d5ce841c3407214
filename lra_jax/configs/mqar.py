"""Presets of multi-query associative recall; the task: `lra_jax.data.suites.mqar`.

official: HazyResearch/zoology, zoology/experiments/arxiv24_based_figure2/configs.py, 32
epochs. Every mixer there alternates with a gated convolution of size 3; here queries,
keys and values of each layer pass through a convolution of size 3, and the embedding is
not shared with the logits. The embeddings and softmax's weights have no dropout here,
0.1 there; there, a block without MLP adds a norm of its own sum, and training stops
above 99 %. Batches are shuffled and mix kinds of one length, so those with more pairs
weigh more; there, each batch holds one kind, always in the same order. Accuracy over
all kinds is a mean over queries here, half of them in the longest sequences, and over
sequences there; that of one kind is the same.
  Command: python -m lra_jax.train --task=mqar --preset=official

figure2: .../iclr24_zoology_figure2/configs.py, 64 epochs. Other sizes are
``--data.train=128/8:100000 --data.test=128/8:3000`` and so on, up to 512/64, with
batches of 256 at 256 tokens and 128 at 512. It is intended for softmax, which has 2
layers there; others have 4.
  Command: python -m lra_jax.train --task=mqar --preset=figure2 --attention=softmax

quick (default): a small vocabulary and token 0 between the queries, where random tokens
would often be keys; tested on each kind; one rate.
  Command: python -m lra_jax.train --task=mqar --attention=softmax
"""

import dataclasses

from lra_jax.configs import families, synthetic
from lra_jax.errors import Positive, Size


@dataclasses.dataclass(frozen=True)
class MqarData(synthetic.DrawnData):
    """Settings of the generated sequences."""

    train: str = "64/4:8000,64/8:8000,64/16:8000"
    """Training sequences: LENGTH/PAIRS:COUNT,..."""
    test: str = "64/4:400,64/8:400,64/16:400"
    """Test sequences, in the same form; validation has equally many of each kind."""
    num_valid: Size = 300
    """Validation sequences, of all kinds together."""
    vocab_size: Size = 256
    """Number of tokens: the lower half are keys, the upper half values."""
    power: Positive = 0.01
    """A query comes i positions after the pairs with probability ~ i^(power - 1)."""
    noise: bool = False
    """Random tokens between the queries, instead of token 0."""


OFFICIAL = MqarData(
    train="64/4:100000,128/8:20000,256/16:20000,256/32:20000,256/64:20000",
    test=(
        "64/4:1000,64/8:1000,64/16:1000,128/32:1000,256/64:1000,512/128:1000,"
        "1024/256:1000"
    ),
    num_valid=700,
    vocab_size=8_192,
    noise=True,
)
FIGURE2 = MqarData(
    train="64/4:100000", test="64/4:3000", num_valid=500, vocab_size=8_192
)
RATES = {
    "official": (1e-3, 10**-2.5, 1e-2, 10**-1.5),
    "figure2": (1e-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2),
    "quick": (1e-2,),
}
_DECAY = {"weight_decay": 0.1, "decay_vectors": True}


PRESETS = families.presets(
    "mqar",
    quick=families.Preset(
        train=synthetic.quick_train(learning_rate=1e-2),
        model=synthetic.quick_model(mlp="none", max_length=64),
    ),
    official=families.Preset(
        train=synthetic.official_train(
            steps=22_500,
            batch_size=256,
            learning_rate=1e-2,
            **_DECAY,
            eval_every=750,
            eval_batch_size=32,
        ),
        model=synthetic.official_model(
            num_heads=1, mlp="none", short_conv=3, max_length=1_024
        ),
        data=OFFICIAL,
    ),
    figure2=families.Preset(
        train=synthetic.official_train(
            steps=12_500,
            batch_size=512,
            learning_rate=10 ** (-8 / 3),
            **_DECAY,
            eval_every=250,
            eval_batch_size=32,
        ),
        model=synthetic.official_model(
            num_heads=1, mlp="none", positions="learned", max_length=512
        ),
        data=FIGURE2,
    ),
)
