"""The tests of state tracking."""

from typing import Any

from lra_jax.configs import state
from lra_jax.tasks.published import rows_of
from lra_jax.tasks.task import Task, rate_sweeps, synthetic

_SOURCE = "Grazzi et al. 2024, arXiv:2411.12537, Table 3"

# Scaled accuracies as printed. Rows of DeltaNet have eigenvalues in [0, 1], the default
# of delta, and in [-1, 1], which is beta_range=2.
_MODELS = (
    ("Transformer", "softmax"),
    ("mLSTM", None),
    ("sLSTM", None),
    ("Mamba, eigenvalues in [0, 1]", None),
    ("Mamba, eigenvalues in [-1, 1]", None),
    ("DeltaNet, eigenvalues in [0, 1]", "delta"),
    ("DeltaNet, eigenvalues in [-1, 1]", None),
)
_PUBLISHED = {
    "parity": (0.022, 0.087, 1.0, 0.0, 1.0, 0.017, 1.0),
    "modular": (0.031, 0.040, 0.787, 0.095, 0.241, 0.314, 0.971),
    "modular-brackets": (0.067, 0.114, 0.178, 0.123, 0.116, 0.194, 0.260),
}


def _task(name: str, vocab_size: int, num_classes: int) -> Task:
    chance = 100 / num_classes
    rows: Any = zip(_MODELS, _PUBLISHED.get(name, ()), strict=False)
    sizes = {"vocab_size": vocab_size, "num_classes": num_classes}
    return synthetic(
        name,
        data=state.StateData,
        presets=state.presets(name),
        reader="lra_jax.data.suites.state:prepare",
        reader_settings={"task": name, **sizes},
        suite="state",
        is_scaled=True,
        variants=dict.fromkeys(("delta", "gated_delta"), ("beta_range=2",))
        | {"hgrn": ("rotates=true",)},
        sweeps=rate_sweeps(state.rates(name)),
        chance=lambda data: chance,
        is_official=lambda data, _: (
            data.reader_arguments == state.official_data(name).reader_arguments
        ),
        published=rows_of(
            _SOURCE,
            (
                (model, chance + (100 - chance) * scaled, attention)
                for (model, attention), scaled in rows
            ),
        ),
    )


PARITY = _task("parity", 3, 2)
MODULAR = _task("modular", 10, 5)
MODULAR_BRACKETS = _task("modular-brackets", 12, 5)
S5 = _task("s5", 120, 120)
A5 = _task("a5", 60, 60)
