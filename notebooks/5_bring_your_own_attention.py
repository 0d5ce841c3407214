# %% [markdown]
# # Bring your own attention to the Long-Range Arena
#
# A function of query, key and value is enough, and a second function gives it learned
# parameters. This notebook writes such a mechanism, checks it, trains it and linear
# attention, and compares the two results. It runs on any device and takes about five
# minutes on 2 CPU cores. The runs are far too short to rank anything: for that, raise
# `STEPS`.

# %% tags=["parameters"]
RUNS = "runs"
STEPS = 300
DATA = {"num_train": 10_000}
SIZES = {}  # Settings of the model, such as {"num_layers": 4}.

# %% [markdown]
# ## Write it
#
# The function takes query `[B, T, N, H]`, key and value `[B, S, N, H]`, and, by name, a
# mask `[B, 1, 1, S]`, True at real tokens. It returns `[B, T, N, H]`. Always take the
# mask: without it, a function attends to padding.
#
# This one is linear attention whose features are ReLU to a learned power, one for each
# head. `power_parameters`, in the same file, makes the array; the layer trains it and
# passes it by name. The mechanism is in its own file, so that a run can find it again.
# A subclass of `nnx.Module` would work, too.

# %%
import sys
from pathlib import Path

source = '''
"""Linear attention whose features are ReLU to a learned power."""

import jax
import jax.numpy as jnp


def power_parameters(rng_key, *, num_heads, dtype=jnp.float32):
    """The logarithms of the initial powers, `[N]`."""
    return {"log_power": jnp.zeros((num_heads,), dtype)}


def power_attention(query, key, value, mask=None, *, log_power):
    """``phi(q) (phi(k)^T v)``, normalised, with phi(x) = relu(x)^p + 1e-6."""
    power = jnp.exp(log_power)[None, None, :, None]

    def features(x):
        # Both branches are guarded: the power of 0 has no derivative.
        positive = jnp.maximum(x, 1e-3)
        return jnp.where(x > 1e-3, positive**power, 0) + 1e-6

    query, key = features(query), features(key)
    if mask is not None:
        key = jnp.where(mask[:, 0, 0, :, None, None], key, 0)
    summary = jnp.einsum("bsnm,bsnv->bnmv", key, value)
    total = jnp.einsum("btnm,bnm->btn", query, key.sum(1))
    return jnp.einsum("btnm,bnmv->btnv", query, summary) / (total[..., None] + 1e-6)
'''
Path("power.py").write_text(source)
sys.path.insert(0, ".")

# %% [markdown]
# ## Check it
#
# The function itself, or the string `"power:power"`, can be used wherever the name of a
# mechanism can: in models and in the trainer. If you change the file later, restart the
# session, because Python keeps a module that it has imported, and choose another folder
# for `RUNS`, because a run belongs to the code that it began with.

# %%
import jax
import jax.numpy as jnp
from flax import nnx
from power import power_attention

from lra_jax.models import MultiHeadAttention

layer = MultiHeadAttention(2, 16, mechanism=power_attention, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (1, 12, 16))
mask = jnp.arange(12)[None] < 8
padded, alone = layer(x, mask=mask)[:, :8], layer(x[:, :8])
print("padding changes the output by", float(jnp.abs(padded - alone).max()))
print("its own parameters:", {k: v.shape for k, v in layer.parameters.items()})

# %% [markdown]
# ## Train it

# %%
from lra_jax import train
from lra_jax.configs import get_preset

results = {}
for name, attention in {"power": power_attention, "linear": "linear"}.items():
    preset = get_preset("listops", attention=attention)
    config = preset.replace(
        train={"steps": STEPS, "warmup": STEPS // 20, "eval_every": STEPS // 3},
        model=SIZES,
        data=DATA,
    )
    # Other settings make another folder.
    config = config.replace(workdir=f"{RUNS}/{config.run_name(preset)}")
    results[name] = train.run(config)

# %% [markdown]
# ## Compare

# %%
for name, result in results.items():
    print(f"{name:8}{result['test_accuracy_best']:6.2f} %")

# %% [markdown]
# ## Report
#
# The report puts all finished runs of a folder on one page;
# `python -m lra_jax.report runs/` writes the same page. Read the test accuracy first,
# and treat a difference smaller than the standard error next to it (se) as noise. Then
# look at the protocol: rows can be compared only if data, steps and model are the same.

# %%
from html import escape

from lra_jax.report import write_report


class Framed(str):
    """A page that a notebook shows in a frame, so that its style stays inside."""

    def _repr_html_(self):
        return f'<iframe srcdoc="{escape(self)}" width="100%" height="600"></iframe>'


write_report(Path(RUNS), Path("report"))
Framed(Path("report/report.html").read_text())
