"""Presets of masked language modelling: hidden tokens of a text.

15 % of the tokens of a batch are to be predicted: 80 % of them are replaced by the
mask, 10 % by a random token, and 10 % are shown (as in BERT; chosen afresh in every
step, as in RoBERTa).

tiny (default): the source of Python's standard library, byte by byte.
  Command: python -m lra_jax.train --task=mlm
linformer: RoBERTa-base as in facebookresearch/fairseq, examples/linformer and
examples/roberta, for Linformer's 250,000 steps. Its K is an option of the mechanism,
128 in the paper. Theirs is on BPE of books and Wikipedia, so perplexities do not
compare.
  Command: python -m lra_jax.train --task=mlm --preset=linformer --attention=linformer
  --model.attention_options=features=128,sharing=key_value --data.path=FOLDER
"""

import dataclasses

from lra_jax.configs import families, lm

RATES = {"tiny": (5e-4, 1e-3, 2e-3), "linformer": (5e-4,)}


TINY_TRAIN = lm.tiny_train(
    learning_rate=1e-3, schedule="linear", adam_eps=1e-6, weight_decay=0.01
)
TINY_MODEL = lm.tiny_model(max_length=512)
ROBERTA_MODEL = families.encoder(
    num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3_072, max_length=512
)

PRESETS = families.presets(
    "mlm",
    tiny=families.Preset(train=TINY_TRAIN, model=TINY_MODEL),
    linformer=families.Preset(
        train=dataclasses.replace(
            TINY_TRAIN,
            steps=250_000,
            batch_size=2_048,
            learning_rate=5e-4,
            warmup=24_000,
            eval_every=5_000,
            eval_batch_size=128,
            log_every=100,
        ),
        model=ROBERTA_MODEL,
    ),
)
