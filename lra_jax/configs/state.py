"""Presets of the tests of state tracking; the tasks: `lra_jax.data.suites.state`.

official: automl/unlocking_state_tracking (Grazzi et al. 2024, arXiv:2411.12537), a
branch of NX-AI/xlstm: trained on lengths 3 to 40, validated and tested on 40 to 256.
Published numbers are those of the last step, in bfloat16, so compare
`test_accuracy_last`; the best checkpoint is chosen on lengths of 40 to 256 too.
s5, a5: the groups and targets of jopetty/word-problem, whose published results are
plots; words of up to 20 elements, its longest for A5, are tested on up to 256, with the
model and training of modular arithmetic.
  Command: python -m lra_jax.train --task=parity --preset=official --attention=delta
           --model.attention_options=beta_range=2

quick (default): tested on 40 to 128 and on single lengths (word problems: 12 to 40).
  Command: python -m lra_jax.train --task=parity --attention=delta

Test accuracy is rescaled in reports: 0 is chance and 1 is all correct.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from lra_jax.configs import families, synthetic
from lra_jax.configs.base import Config
from lra_jax.errors import Size


@dataclasses.dataclass(frozen=True)
class StateData(synthetic.SyntheticData):
    """Settings of the generated sequences."""

    min_length: Size = 3
    """Shortest training sequence, including its answer."""
    max_length: Size = 40
    """Longest training sequence."""
    test_min: Size = 40
    """Shortest validation and test sequence."""
    test_max: Size = 128
    """Longest validation and test sequence."""
    parts: str = "20,40,64,96,128"
    """Lengths that are tested separately."""

    length_fields: ClassVar[tuple[str, ...]] = ("max_length", "test_max")


STEPS = {
    "parity": 20_000,
    "modular": 100_000,
    "modular-brackets": 100_000,
    "s5": 100_000,
    "a5": 100_000,
}
_WORDS = ("s5", "a5")


def rates(task: str) -> dict[str, tuple[float, ...]]:
    """The learning rates that the suite tries, by preset.

    The quick suite is only parity: on the other tests no mechanism gets above chance in
    600 steps, so they would not tell mechanisms apart (results/suites/).
    """
    quick = {"quick": (5e-3,)} if task == "parity" else {}
    return {"official": (1e-3,), **quick}


def official_data(task: str) -> StateData:
    """The published sequences; as many word problems as in the other tests."""
    return StateData(
        num_train=5_120_000,
        num_valid=8_192,
        num_test=8_192,
        max_length=20 if task in _WORDS else 40,
        test_max=256,
        parts="20,40,64,128,192,256",
    )


def _quick_data(task: str) -> StateData:
    if task not in _WORDS:
        return StateData(num_test=500, buckets="40,128")
    return StateData(
        num_test=500, max_length=12, test_min=12, test_max=40, parts="6,12,20,40"
    )


def presets(task: str) -> dict[str, Callable[[str], Config]]:
    """The presets of one of the tests."""
    steps, short = STEPS[task], _quick_data(task)
    return families.presets(
        task,
        quick=families.Preset(
            train=synthetic.quick_train(learning_rate=5e-3),
            model=synthetic.quick_model(max_length=short.longest),
            data=short,
        ),
        official=families.Preset(
            train=synthetic.official_train(
                steps=steps,
                batch_size=256,
                learning_rate=1e-3,
                warmup=steps // 10,
                weight_decay=0.0 if task == "parity" else 0.1,
                eval_every=steps // 20,
                eval_batch_size=256,
            ),
            model=synthetic.official_model(
                embed_dim=128,
                num_heads=4,
                mlp="glu",
                mlp_dim=512,
                short_conv=4,
                max_length=256,
            ),
            data=official_data(task),
        ),
    )
