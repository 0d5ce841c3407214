# %% [markdown]
# # Quick start: test an attention mechanism on the Long-Range Arena
#
# This notebook trains a model with linear-complexity attention on ListOps, plots its
# curve, and keeps the run where you can resume it. It needs Python 3.11 or later and
# one device of any kind: a Colab TPU or GPU, or a CPU. cosFormer takes 18 minutes on 2
# CPU cores; the run prints how much time is left. For a first look set `STEPS` to 100.
#
# In Colab, choose the device under Runtime > Change runtime type.

# %% [markdown]
# ## Settings
#
# `RUNS` is the folder for the runs. A Colab machine is deleted after use, so in Colab
# the folder is on your Google Drive, in `MyDrive/lra_jax`. Colab asks for your
# permission first. `DRIVE = None` keeps runs on the machine only.

# %% tags=["parameters"]
RUNS = "runs"
DRIVE = "/content/drive"  # Where Colab mounts Google Drive.
ATTENTION = "cosformer"
STEPS = 3200
DATA = {}  # Settings of the data, such as {"num_train": 10_000}.

# %%
import json
from pathlib import Path

import jax
import matplotlib.pyplot as plt

from lra_jax import train
from lra_jax.configs import get_preset

print(jax.devices())

# %%
try:
    from google.colab import drive
except ImportError:  # Not in Colab.
    drive = None

folder = Path(RUNS)
if DRIVE and drive is not None:
    drive.mount(DRIVE)
    folder = Path(DRIVE, "MyDrive", "lra_jax", RUNS)
folder.mkdir(parents=True, exist_ok=True)
print("runs are kept in", folder.resolve())

# %% [markdown]
# ## Train
#
# ListOps asks for the value, a digit, of a nested expression such as
# `[MAX 2 [MIN 3 4 ] 5 ]`, but about a thousand tokens long. Guessing the most frequent
# digit scores 17 %; reading only the outermost operator, 36.6 %.
#
# A preset holds every setting with its source. The default for ListOps, `modern-quick`,
# uses the same block for every mechanism, with a short convolution before the attention
# and a gate after it. Interrupt the cell whenever you like and run it again: it
# continues from its last checkpoint. If the run is on Google Drive, that works on a new
# Colab machine, too.

# %%
preset = get_preset("listops", attention=ATTENTION)
config = preset.replace(
    train={"steps": STEPS, "warmup": STEPS // 10, "eval_every": STEPS // 8}, data=DATA
)
# Other settings make another folder.
config = config.replace(workdir=f"{folder}/{config.run_name(preset)}")
result = train.run(config)

# %% [markdown]
# ## Look at the curve
#
# Every measurement of the run is a line of `metrics.jsonl`. The curriculum shows short
# examples for the first 80 % of the steps and all of them after that, so the loss rises
# once.

# %%
lines = Path(config.workdir, "metrics.jsonl").read_text().splitlines()
metrics = [json.loads(line) for line in lines]
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for split, style in (("train", "-"), ("valid", "o-")):
    points = [m for m in metrics if m["split"] == split]
    axes.plot(
        [m["step"] for m in points],
        [100 * m["accuracy"] for m in points],
        style,
        label={"train": "training", "valid": "validation"}[split],
    )
axes.axhline(36.6, color="grey", linestyle=":", label="root operator alone")
axes.set(xlabel="training step", ylabel="accuracy, %", title=f"{ATTENTION} on ListOps")
axes.legend()
plt.show()

# %%
print(f"test accuracy {result['test_accuracy_best']:.2f} %")
print(f"{result['steps_per_second']:.2f} steps/s on {result['device']}")

# %% [markdown]
# ## Next
#
# - `ATTENTION = "softmax"` is the mechanism that all others are compared with.
# - Notebook 5 uses your own attention instead.
# - On a command line: `python -m lra_jax.train --task=listops`.
