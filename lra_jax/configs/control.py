"""Presets of control; their data: `lra_jax.data.control_files`.

official: thuml/Flowformer, folder Flowformer_RL, the decision transformer of Chen et
al. (2021, arXiv:2106.01345) with causal attention of 3 blocks, 256 wide, 4 heads and a
ReLU MLP of 1,024; windows of 20 steps, which are also all that an acting model sees;
AdamW at 1e-3 after 10,000 steps of warm-up, weight decay 1e-4, batches of 64, gradients
clipped at 0.25, 100,000 steps, scored every 10,000 by 10 episodes, and at the end by
100. Deviations: all windows but those of shorter episodes are full, and each is shown
once an epoch, where that code draws their starts at random; a tenth of the episodes is
held out; returns are those of gymnasium's v5 environments, not of D4RL's.
  Command: python -m lra_jax.train --task=control --preset=official --attention=flow \
    --data.environment=hopper --data.path=hopper_medium_expert-v2.hdf5
  Published normalised returns on Hopper, medium-expert (Wu et al. 2022,
  arXiv:2202.06258): softmax 104.0, linear 107.2, cosformer 98.1, performer 93.5, flow
  109.9, behaviour cloning 52.5.
quick (default): our pendulum; 2 blocks, 64 wide, 4 heads; windows of whole episodes, so
that a stream sees just what it was trained on; AdamW at 3e-3 with a cosine, 400 steps
of 16 windows.
  Command: python -m lra_jax.train --task=control --attention=flow
"""

import dataclasses
import functools
from typing import ClassVar, Literal

from lra_jax.configs import families
from lra_jax.configs.base import StoredData, TrainConfig
from lra_jax.errors import Count, Finite, Name, Size


@dataclasses.dataclass(frozen=True)
class ControlData(StoredData):
    """The environment, its episodes, and how a model acts."""

    path: Name | None = None
    """Episodes as D4RL has them, .hdf5 or .npz; by default they are played by policies
    that a search finds."""
    environment: Literal["pendulum", "hopper", "halfcheetah", "walker2d"] = "pendulum"
    """Where a model acts; all but pendulum need the extra control."""
    quality: Literal["random", "medium", "expert", "medium-replay", "medium-expert"] = (
        "medium-expert"
    )
    """Which policies play: see docs/control.md."""
    episodes: Size = 500
    """Episodes that each kind of policy plays."""
    context: Size = 100
    """Steps of a training window."""
    returns: bool = True
    """Show the model the return to be reached; False is behaviour cloning."""
    acting: Literal["stream", "context"] = "stream"
    """stream: a state of constant size holds all earlier steps of the episode. context:
    the last steps, as many as in training, are read again at each step."""
    target: Finite | None = None
    """The return that an acting model is to reach; by default that of the best policy,
    or the published one for D4RL's data."""
    seed: Count = 0
    """Seed of the search and of its episodes, and of which are held out."""
    buckets: str = "none"
    """Windows are of one length."""

    length_fields: ClassVar[tuple[str, ...]] = ("context",)
    source: ClassVar[str] = "played in {environment}, seed {seed}"
    is_generated: ClassVar[bool] = True

    @property
    def longest(self) -> int:
        """See the base class; a step is three tokens."""
        return 3 * self.context


_model = functools.partial(
    families.encoder,
    num_heads=4,
    max_length=3_000,
    inputs="vectors",
    positions="none",
    # With smaller ones, no trace of a return's size would survive the norm of tokens.
    embed_std=1.0,
    is_causal=True,
)

PRESETS = families.presets(
    "control",
    quick=families.Preset(
        train=TrainConfig(
            steps=400,
            batch_size=16,
            learning_rate=3e-3,
            warmup=50,
            weight_decay=0.01,
            eval_every=100,
        ),
        model=_model(num_layers=2, dropout=0.0),
    ),
    official=families.Preset(
        train=TrainConfig(
            steps=100_000,
            batch_size=64,
            learning_rate=1e-3,
            schedule="constant",
            warmup=10_000,
            weight_decay=1e-4,
            clip_norm=0.25,
            eval_every=10_000,
            eval_batch_size=64,
        ),
        model=_model(num_layers=3, embed_dim=256, mlp_dim=1_024, activation="relu"),
        data=ControlData(environment="hopper", context=20, acting="context"),
    ),
)
