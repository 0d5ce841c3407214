"""The six tests of MAD."""

from typing import Any

from lra_jax.configs import mad
from lra_jax.tasks.published import rows_of
from lra_jax.tasks.task import Task, synthetic

_SOURCE = "mean over 6 to 14 settings of each test; blog on DeltaNet by its authors"

# Not shown next to a run of the preset official, which has the basic setting of a test:
# MAD's score is a mean over that and harder ones.
_MODELS = ("Transformer", "Mamba", "GLA", "DeltaNet")
_PUBLISHED = {
    "mad-compress": (51.6, 52.7, 38.8, 42.2),
    "mad-fuzzy-recall": (29.8, 6.7, 6.9, 35.7),
    "mad-recall": (94.1, 90.4, 80.8, 100.0),
    "mad-memorise": (85.2, 89.5, 63.3, 52.8),
    "mad-noisy-recall": (86.8, 90.1, 81.6, 100.0),
    "mad-selective-copy": (99.6, 86.3, 88.6, 100.0),
}


def _half(data: mad.MadData) -> float:
    """Chance among the values of a recall."""
    real = data.vocab_size - getattr(data, "noise_vocab", 0)
    return 100 / (real - real // 2)


def _compress(data: mad.MadData) -> float:
    """The last token is always the same, the others are equally likely."""
    return 100 * (1 + (data.length - 1) / (data.vocab_size - 1)) / data.length


def _task(name: str, **settings: Any) -> Task:
    rates = {
        "official": {
            "train.learning_rate": mad.RATES["official"],
            "train.weight_decay": mad.WEIGHT_DECAYS,
        },
        "quick": {"train.learning_rate": mad.RATES["quick"]},
    }
    return synthetic(
        name,
        data=type(mad.DATA[name]),
        presets=mad.presets(name),
        reader="lra_jax.data.suites.mad:prepare",
        reader_settings={"task": name},
        suite="mad",
        sweeps=rates,
        is_official=lambda data, _: (
            data.reader_arguments == mad.DATA[name].reader_arguments
        ),
        published=rows_of(_SOURCE, zip(_MODELS, _PUBLISHED[name], strict=True)),
        is_causal=name.endswith("recall"),
        **settings,
    )


COMPRESS = _task(
    "mad-compress", model="lra_jax.tasks.base:make_auto_encoder", chance=_compress
)
FUZZY_RECALL = _task(
    "mad-fuzzy-recall",
    # Which of the value tokens comes next; where values end has to be known too.
    chance=lambda data: 100 / (data.vocab_size - 1 - (data.vocab_size - 1) // 2),
)
RECALL = _task("mad-recall", chance=_half)
MEMORISE = _task("mad-memorise", chance=lambda data: 100 / ((data.vocab_size - 1) // 2))
NOISY_RECALL = _task("mad-noisy-recall", chance=_half)
SELECTIVE_COPY = _task(
    "mad-selective-copy", chance=lambda data: 100 / (data.vocab_size - 2)
)
