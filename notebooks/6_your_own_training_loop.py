# %% [markdown]
# # Your own training loop
#
# The trainer is optional: the data of a task are an iterator of NumPy arrays, and a
# model is a Flax module. This notebook trains on ListOps with Optax alone, in about
# forty lines that you can change line by line. It runs on any device and takes a few
# minutes on 2 CPU cores. The run is far too short to say anything about the mechanism.

# %% tags=["parameters"]
STEPS = 300
DATA = {"num_train": 10_000}

# %% [markdown]
# ## The data
#
# A task prepares its data, here by generating them, and the iterator pads each batch to
# one of a few lengths; with `buckets="none"` there is one length, so only one program
# to compile. Batch i depends on the seed and on i alone. `batches.get_state()` and
# `set_state` save and restore the position.

# %%
import jax
import numpy as np
import optax
from flax import nnx

from lra_jax.configs import get_preset
from lra_jax.data import pipeline
from lra_jax.models import SequenceClassifier
from lra_jax.tasks import get_task

task = get_task("listops")
dataset = task.prepare(get_preset("listops").replace(data=DATA).data)
batches = pipeline.train_iterator(
    dataset, batch_size=32, seed=0, num_steps=STEPS, buckets="none"
)
for name, array in next(batches).items():
    print(f"{name:8} {array.dtype} {array.shape}")

# %% [markdown]
# ## The model
#
# `mechanism` names any mechanism, or is your own function. The parameters leave the
# module once, and every step puts them back, so a step is a function of arrays.

# %%
model = SequenceClassifier(
    dataset.vocab_size,
    dataset.num_classes,
    mechanism="cosformer",
    num_layers=2,
    embed_dim=64,
    num_heads=2,
    mlp_dim=128,
    max_length=dataset.max_length,
    rngs=nnx.Rngs(0),
)
graph, params, rest = nnx.split(model, nnx.Param, ...)
print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")

# %% [markdown]
# ## The loop

# %%
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, STEPS // 10, STEPS)),
)


@jax.jit
def step(params, state, batch, key):
    def mean_loss(params):
        model = nnx.merge(graph, params, rest)
        logits = model(batch["tokens"], batch["lengths"], nnx.Rngs(dropout=key))
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        )
        return losses.mean()

    loss, grads = jax.value_and_grad(mean_loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


state, key, losses = optimizer.init(params), jax.random.key(0), []
for number, batch in enumerate(batches):
    params, state, loss = step(params, state, batch, jax.random.fold_in(key, number))
    losses.append(loss)
    if number % 50 == 0:
        print(f"step {number:4}  loss {np.mean(losses[-50:]):.3f}")

# %% [markdown]
# ## The score
#
# `EvalBatches` shows every example of a split once. The rows that fill the last batch
# have weight 0.


# %%
@jax.jit
def count(params, batch):
    model = nnx.merge(graph, params, rest)
    answers = model(batch["tokens"], batch["lengths"]).argmax(-1)
    return ((answers == batch["labels"]) * batch["weights"]).sum()


test = pipeline.EvalBatches(dataset, "test", "none", batch_size=64)
correct = sum(float(count(params, batch)) for batch in test)
total = dataset.num_examples("test")
print(f"test accuracy {100 * correct / total:.2f} % of {total} examples")

# %% [markdown]
# ## Back to the trainer
#
# A loss, an optimizer, a block or a task of your own needs no loop of your own: the
# trainer takes each of them by its path, and adds checkpoints that resume bit for bit,
# logs, sweeps and reports. See
# [the page](https://github.com/lra-jax/lra_jax/blob/main/docs/own_parts.md).
