"""Presets of language modelling: the next token of a text.

tiny (default): the source of Python's standard library, byte by byte: 9.8 million
bytes, about an epoch. `--model.max_length`, cosFormer's M, is 8 rows, so that a model
can score and continue texts longer than a row.
  Command: python -m lra_jax.train --task=lm
  Expected: cosFormer 1.67 bits per byte in 13 minutes on 2 CPU cores
  (results/language/lm-cosformer-tiny-seed0.json).
flowformer: thuml/Flowformer, folder Flowformer_NLP, fairseq's `transformer_lm`. With
WikiText-103's 267,735 words and the mask token it has 156 million parameters. Its table
gives these perplexities: Flowformer 30.8, Transformer 33.0, cosFormer 34.1, Linear
Transformer 38.4, scored with 400 of 512 tokens of context; ours is scored with none and
with 256. The rows of other models come from an older paper: a Transformer of this size
has reached 29.6 on validation (TransNormer's authors).
  Command: python -m lra_jax.train --task=lm --preset=flowformer --attention=flow
  --data.path=wikitext-103-v1.zip
cosformer: Baevski & Auli's model as in cosFormer's Table 2, 73,728 tokens a step, 247
million parameters. Deviations: AdamW with one cosine instead of Nesterov's momentum
with several, rows of 512 (the length of cosFormer's runs was not found), no dropout in
attention and tails. Its table: cosFormer 23.5 on validation and 23.1 on the test,
Transformer 24.5 and 26.2; the other rows come from an older paper, and in later runs by
cosFormer's own group softmax is ahead.
  Command: python -m lra_jax.train --task=lm --preset=cosformer
  --data.path=wikitext-103-v1.zip

Perplexities are comparable only within one of these settings: words, sizes and the rule
for context differ. Neither of the two was run to the end here.
"""

import dataclasses
import functools
from typing import ClassVar, Literal

from lra_jax.configs import families
from lra_jax.configs.base import DataConfig, TrainConfig
from lra_jax.errors import Name, Size


@dataclasses.dataclass(frozen=True)
class LmData(DataConfig):
    """Which text, and how it is arranged in rows."""

    path: Name | None = None
    """A text file, a folder of text files, or WikiText's archive or folder; by default
    the source of Python's standard library. A folder is split by file, a single file
    into 94, 3 and 3 %."""
    pattern: Name = "*"
    """Names of the files to read in a folder, as in `*.md`; hidden files are
    skipped."""
    tokenizer: Literal["bytes", "words", "bpe"] = "bytes"
    """bytes. words: separated by whitespace, and line ends. bpe: byte pairs learned on
    the training text."""
    vocab_size: Size = 8_192
    """Vocabulary size of bpe."""
    max_length: Size = 512
    """Tokens in a row. Longer documents are split; short ones share a row and do not
    attend to each other."""

    source: ClassVar[str] = "Python's standard library"


tiny_train = functools.partial(
    TrainConfig,
    steps=1_200,
    batch_size=16,
    warmup=100,
    adam_b2=0.98,
    decay_vectors=False,
    eval_every=300,
    eval_batch_size=16,
    best_by="loss",
    log_every=20,
)
"""A few minutes on Python's standard library; settings override it."""

tiny_model = functools.partial(
    families.encoder, num_layers=4, embed_dim=128, num_heads=4, mlp_dim=512
)
"""A model that trains in a few minutes; settings override it."""

_published_train = functools.partial(
    TrainConfig,
    adam_b2=0.98,
    weight_decay=0.01,
    eval_batch_size=64,
    best_by="loss",
    log_every=100,
)
"""AdamW of the two published models, with the settings of one."""

_published_model = functools.partial(
    families.encoder,
    num_heads=8,
    max_length=512,
    positions="sinusoidal",
    scale_embeddings=True,
    activation="relu",
    is_causal=True,
)
"""A decoder for rows of 512, with sizes and settings of one of the two."""


RATES = {
    "tiny": (1e-3, 2e-3, 4e-3),
    "flowformer": (1e-3 * 6_000**0.5,),
    "cosformer": (5e-4,),
}

PRESETS = families.presets(
    "lm",
    tiny=families.Preset(
        train=tiny_train(learning_rate=2e-3, weight_decay=0.1),
        model=tiny_model(
            max_length=4_096,
            positions="none",
            short_conv=4,
            dropout=0.0,
            is_causal=True,
        ),
        rotary=True,
    ),
    flowformer=families.Preset(
        train=_published_train(
            steps=150_000,
            batch_size=64,
            # The base of LRA's inverse square root: its peak is 1e-3.
            learning_rate=1e-3 * 6_000**0.5,
            schedule="lra",
            warmup=6_000,
            clip_norm=0.0,
            eval_every=5_000,
        ),
        model=_published_model(
            num_layers=6,
            embed_dim=512,
            mlp_dim=2_048,
            mlp_dropout=0.0,
            embed_std=512**-0.5,
        ),
        data=LmData(tokenizer="words"),
    ),
    cosformer=families.Preset(
        train=_published_train(
            steps=286_000,
            batch_size=144,
            learning_rate=5e-4,
            warmup=16_000,
            clip_norm=0.1,
            eval_every=5_500,
        ),
        model=_published_model(
            num_layers=16,
            embed_dim=1_024,
            mlp_dim=4_096,
            cutoffs="20000,60000",
            dropout=0.3,
            mlp_dropout=0.1,
        ),
        data=LmData(tokenizer="words"),
    ),
)
