# %% [markdown]
# # The library in your own model
#
# Every mechanism is a pure function of `[batch, length, heads, head_dim]` arrays. This
# notebook puts one into Flax's own layers (NNX and Linen), shows that padding changes
# nothing, packs several documents into one row, and decodes with a state of constant
# size. It runs on any device; on a CPU it takes a minute or two, most of it
# compilation.

# %%
import jax
import jax.numpy as jnp
from flax import linen, nnx

from lra_jax import attention
from lra_jax.models import MultiHeadAttention

# %% [markdown]
# ## A function
#
# Its arguments are query, key and value `[B, T, N, H]`, as in
# `jax.nn.dot_product_attention`, and a mask that is True at real tokens.

# %%
query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
out = attention.cosformer_attention(query, key, value, max_length=64)
print(out.shape)

# %% [markdown]
# ## In Flax's own layers
#
# Each function can be the `attention_fn` of these layers, with any arrays of its own
# bound by `functools.partial`. For a causal layer, wrap it:
# `attention.as_causal(attention.flow_attention)`. The layer itself passes
# `is_causal=False`.

# %%
x = jax.random.normal(jax.random.key(1), (2, 64, 64))
layer = nnx.MultiHeadAttention(
    num_heads=4,
    in_features=64,
    decode=False,
    attention_fn=attention.flow_attention,
    rngs=nnx.Rngs(0),
)
print("NNX", layer(x).shape)

linen_layer = linen.MultiHeadDotProductAttention(
    num_heads=4, attention_fn=attention.flow_attention
)
variables = linen_layer.init(jax.random.key(0), x)
print("Linen", linen_layer.apply(variables, x).shape)

# %% [markdown]
# `lra_jax.models.MultiHeadAttention` does the same and also holds what some mechanisms
# need besides queries, keys and values: Linformer's projections, Performer's random
# features, the gates of gated linear attention. The name chooses the mechanism.

# %%
for name in ("cosformer", "linformer", "performer", "gla"):
    layer = MultiHeadAttention(4, 64, mechanism=name, max_length=64, rngs=nnx.Rngs(0))
    print(f"{name:10}", layer(x).shape)

# %% [markdown]
# ## Padding changes nothing
#
# In a padded batch each sequence gets the result that it would get alone, whatever the
# padding holds.

# %%
mask = jnp.arange(64)[None] < jnp.array([[64], [40]])
noise = jnp.where(mask[:, :, None, None], key, 1e3)
padded = attention.flow_attention(query, noise, value, mask, query_mask=mask)
alone = attention.flow_attention(query[1:, :40], key[1:, :40], value[1:, :40])
print("largest difference:", float(jnp.abs(padded[1:, :40] - alone).max()))

# %% [markdown]
# ## Several documents in one row
#
# `segment_ids` says which document a position belongs to; 0 is padding. No document
# sees another, states start afresh, and positions count from each document's start.

# %%
ids = jnp.array([[1] * 24 + [2] * 30 + [0] * 10] * 2)
packed = attention.cosformer_attention(
    query, key, value, is_causal=True, max_length=64, segment_ids=ids
)
second = attention.cosformer_attention(
    *(a[:, 24:54] for a in (query, key, value)), is_causal=True, max_length=64
)
print("largest difference:", float(jnp.abs(packed[:, 24:54] - second).max()))

# %% [markdown]
# ## Decoding
#
# A causal mechanism of linear cost summarises all earlier positions in a state of fixed
# size. `prefill` reads a prompt in one pass, and `step` one further position.

# %%
whole = attention.linear_attention(query, key, value, is_causal=True)
prompt = (a[:, :50] for a in (query, key, value))
out, state = attention.linear_prefill(*prompt)
step = jax.jit(attention.linear_step)
for t in range(50, 64):
    out, state = step(state, query[:, t], key[:, t], value[:, t])
print("largest difference:", float(jnp.abs(out - whole[:, 63]).max()))
print("numbers in the state:", sum(a.size for a in jax.tree.leaves(state)))
