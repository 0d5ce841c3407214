# %% [markdown]
# # Linear attention, annotated
#
# This notebook derives linear attention, cosFormer, Linformer and Flow-Attention step
# by step with running code, compares each with the library, and draws it as a matrix.
# It runs on any device and takes a minute on a CPU.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from lra_jax import attention

LENGTH, WIDTH = 48, 16
query, key, value = jax.random.normal(jax.random.key(0), (3, LENGTH, WIDTH))


def library(name, *arrays, **options):
    """A mechanism of the library on one sample with one head."""
    function = getattr(attention, name)
    return function(*(a[None, :, None] for a in arrays), **options)[0]


def compare(ours, theirs):
    print("largest difference:", float(jnp.abs(ours - theirs).max()))


# %% [markdown]
# ## Softmax: every pair of positions
#
# $$O_i = \sum_j \frac{e^{q_i \cdot k_j / \sqrt{H}}}
# {\sum_l e^{q_i \cdot k_l / \sqrt{H}}} v_j$$
#
# The weights are a matrix of T x T numbers, so time and memory grow with the square of
# the length.

# %%
scores = jnp.einsum("th,sh->ts", query, key) / WIDTH**0.5
softmax = jax.nn.softmax(scores, axis=-1)
compare(softmax @ value, library("softmax_attention", query, key, value)[:, 0])

# %% [markdown]
# ## Linear attention: change the order of the products
#
# Replace $e^{q \cdot k}$ by $\phi(q) \cdot \phi(k)$, where $\phi$ is a positive
# function of one vector, $\phi(x) = \mathrm{elu}(x) + 1$. The weights then have rank H,
# and
#
# $$\sum_j (\phi(q_i) \cdot \phi(k_j))\, v_j = \phi(q_i) \cdot
# \Big(\sum_j \phi(k_j)\, v_j^T\Big)$$
#
# The sum in brackets is the same for every query: H x H numbers, computed once. Time is
# linear in the length.

# %%
features_q, features_k = jax.nn.elu(query) + 1, jax.nn.elu(key) + 1
summary = jnp.einsum("sm,sv->mv", features_k, value)  # the same for every query
total = features_k.sum(0)
out = jnp.einsum("tm,mv->tv", features_q, summary) / (features_q @ total)[:, None]
compare(out, library("linear_attention", query, key, value)[:, 0])

linear = jnp.einsum("tm,sm->ts", features_q, features_k)
linear = linear / linear.sum(-1, keepdims=True)

# %% [markdown]
# ## cosFormer: near keys count more
#
# Linear attention does not know how far apart two positions are. cosFormer multiplies
# each pair by $\cos(\frac{\pi}{2} \frac{i - j}{M})$, and the cosine of a difference
# splits into products of one position each:
#
# $$\cos(a - b) = \cos a \cos b + \sin a \sin b$$
#
# So the weighted form is again linear attention, with features twice as long. The
# features use ReLU, which makes the weights sparse and never negative.

# %%
angle = jnp.pi / 2 * jnp.arange(1, LENGTH + 1) / LENGTH
cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
split_q, split_k = (
    jnp.concatenate([jax.nn.relu(x) * cos, jax.nn.relu(x) * sin], -1)
    for x in (query, key)
)
summary = jnp.einsum("sm,sv->mv", split_k, value)
out = jnp.einsum("tm,mv->tv", split_q, summary) / (split_q @ split_k.sum(0))[:, None]
compare(out, library("cosformer_attention", query, key, value, max_length=LENGTH)[:, 0])

cosformer = jnp.einsum("tm,sm->ts", split_q, split_k)
cosformer = cosformer / cosformer.sum(-1, keepdims=True)

# %% [markdown]
# ## Linformer: fewer keys
#
# Linformer keeps the softmax but projects the T keys and values onto k rows by learned
# matrices E and F over the positions. The weights are T x k. Because a row mixes all
# positions, there is no causal form.

# %%
SLOTS = 12
projection = jax.random.normal(jax.random.key(1), (2, SLOTS, LENGTH)) / SLOTS**0.5
few_keys, few_values = projection[0] @ key, projection[1] @ value
slots = jax.nn.softmax(query @ few_keys.T / WIDTH**0.5, axis=-1)
given = {"key_projection": projection[0], "value_projection": projection[1]}
compare(
    slots @ few_values, library("linformer_attention", query, key, value, **given)[:, 0]
)
linformer = slots @ projection[1]

# %% [markdown]
# ## Flow-Attention: a fixed amount of flow
#
# Each query (a sink) receives $I_i = \phi(q_i) \cdot \sum_j \phi(k_j)$, and each key
# (a source) gives $O_j = \phi(k_j) \cdot \sum_i \phi(q_i)$. Flow-Attention fixes both.
# If every source gives 1 in total, the flow that still reaches a sink says how much its
# result counts (*allocation*, a sigmoid). If every sink takes 1 in total, the sources
# compete for it (*competition*, a softmax over the keys). All of this needs only sums
# over positions, so the cost stays linear, and no position is preferred.

# %%
flow_q, flow_k = jax.nn.sigmoid(query), jax.nn.sigmoid(key)
incoming = (flow_q + 1e-6) @ (flow_k.sum(0) + 1e-6)
outgoing = (flow_k + 1e-6) @ (flow_q.sum(0) + 1e-6)
conserved_in = (flow_q + 1e-6) @ ((flow_k / outgoing[:, None]).sum(0) + 1e-6)
conserved_out = (flow_k + 1e-6) @ ((flow_q / incoming[:, None]).sum(0) + 1e-6)
competition = jax.nn.softmax(jnp.clip(conserved_out, -30, 30)) * LENGTH
allocation = jax.nn.sigmoid(conserved_in)
summary = jnp.einsum("sm,sv->mv", flow_k, value * competition[:, None])
out = (flow_q / incoming[:, None]) @ summary * allocation[:, None]
compare(out, library("flow_attention", query, key, value)[:, 0])

flow = flow_q / incoming[:, None] @ flow_k.T * competition * allocation[:, None]

# %% [markdown]
# ## The matrices
#
# In practice only softmax builds its matrix; here are those of the others, too. Red is
# positive, blue is negative, and each matrix has its own scale.

# %%
matrices = {
    "softmax": softmax,
    "linear": linear,
    "cosFormer": cosformer,
    "Linformer": linformer,
    "Flow": flow,
}
figure, axes = plt.subplots(1, 5, figsize=(15, 3.4), layout="constrained")
for place, (name, matrix) in zip(axes, matrices.items(), strict=True):
    bound = float(np.abs(matrix).max())
    place.imshow(matrix, cmap="RdBu_r", vmin=-bound, vmax=bound)
    rank = int(np.linalg.matrix_rank(np.asarray(matrix, np.float64), tol=1e-5))
    place.set(title=f"{name}, rank {rank}", xlabel="key", xticks=[], yticks=[])
axes[0].set(ylabel="query")
plt.show()

# %% [markdown]
# Things to see:
#
# - **Softmax** picks single keys, a few dark cells in each row, and has full rank. The
#   others are products of narrow matrices, so their rank stays low: at most the width
#   for linear and Flow-Attention, twice the width for cosFormer, the number of slots
#   for Linformer.
# - **Linear** and **Flow-Attention** spread their weight over all keys. Vertical
#   stripes are keys that every query attends to; competition and allocation only scale
#   columns and rows.
# - **cosFormer** is paler in the corners far from the diagonal: the cosine prefers near
#   positions. White stripes are keys of which ReLU leaves little.
# - **Linformer**'s weights may be negative, and follow the random slots, not the keys.
#   A model learns its projections.
