# %% [markdown]
# # Attention alone loses rank
#
# Dong, Cordonnier and Loukas (2021) showed that a network of attention layers alone
# makes all tokens equal, doubly exponentially in its depth; that skip connections
# prevent this; and that MLPs slow it down. This notebook draws their curves, and those
# of linear mechanisms, which no paper shows. It runs on any device and takes a few
# minutes on a CPU.

# %% tags=["parameters"]
LAYERS = 12
SHAPE = "bert"
TOKENS = 64
SEQUENCES = 2
MECHANISMS = ("softmax", "linear", "cosformer", "flow", "linformer")

# %%
import matplotlib.pyplot as plt
import numpy as np

from lra_jax.analysis import relative_residual
from lra_jax.analysis.collapse import network_curves

# %% [markdown]
# ## The measure
#
# `res(X)` is the tokens minus their mean, and `||res(X)|| / ||X||` says how much the
# tokens still differ: 0 when all are equal.

# %%
rng = np.random.default_rng(0)
print("random tokens:", relative_residual(rng.normal(size=(TOKENS, 32))))
print("equal tokens:", relative_residual(np.ones((TOKENS, 32))))

# %% [markdown]
# ## With and without skip connections
#
# The network has BERT's shape and random weights and reads random tokens: neither the
# weights nor the text matter here.

# %%
settings = {"batch_size": SEQUENCES, "length": TOKENS, "num_layers": LAYERS}
curves = network_curves(SHAPE, "softmax", **settings)


def draw(axes, name, curve):
    mean = curve.mean(0)
    axes.semilogy(range(len(mean)), np.maximum(mean, 1e-9), "o-", label=name, ms=3)


figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, curve in curves.items():
    draw(axes, name, curve)
axes.set(xlabel="layer", ylabel="relative residual", title="softmax")
axes.legend()
plt.show()

# %% [markdown]
# ## Other mechanisms
#
# This is again attention alone. Where the weights depend on the positions, whatever the
# tokens are, as with cosFormer's cosine and Linformer's projections, the residual falls
# by a moderate factor per layer; for the others it collapses within a few layers, as
# with softmax. The floor is the precision of float32.

# %%
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name in MECHANISMS:
    curve = network_curves(SHAPE, name, **settings)
    draw(axes, name, next(iter(curve.values())))
axes.set(xlabel="layer", ylabel="relative residual", title="attention alone")
axes.legend()
plt.show()

# %% [markdown]
# On a command line: `python -m lra_jax.analyze rank-collapse`, which also takes a
# trained run or the weights of a BERT on your disk.
