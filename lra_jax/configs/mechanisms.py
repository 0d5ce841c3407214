"""Published settings of mechanisms, which change the presets of tasks.

For each mechanism: a pattern of preset names (``official``, ``modern*``), then one of
task names (``*``, which means all of LRA, or ``path*``, ``mad-*``), then flags and
their values. Later patterns override earlier ones. Without another source, values are
those of google-research/long-range-arena.

flow: thuml/Flowformer, folder Flowformer_LRA, a fork of that code: features ReLU +
1e-6, competition by a softmax over the heads, no clip, and for some tasks its own
layers, heads, widths and rates.
cosformer: OpenNLPLab/lra, configs/experiment/trans-cosformer-lra-*.yaml, by
cosFormer's own group: layers, width, dropout, rate, weight decay, steps, warm-up of
each task, 8 heads, an MLP of twice the width, denominators of at least 1e-4, batch
norm for text and image, norms after the sums for retrieval, the last position for
pathfinder. That code is a branch of S4's, from which come sinusoids with a dropout of
0.1, biases, Adam's (0.9, 0.999, 1e-8), mean pooling, values of pixels through a
linear layer, and products and differences of two documents. Deviations: that code
does not mask padding in attention and batch norm, takes cosFormer's M from each
batch, applies dropout twice to an MLP's output, and has one layer as its head. Its
image file has 200,000 steps and no batch size: 50 is the default of S4's code, as is
the warm-up. The file's limit of 200 epochs would end that cosine at 180,000 steps; here
it runs to its end. Other settings that are missing from its files, such as the sizes
for larger images, are as in LRA's.
"""

from typing import Any


def _sizes(layers: int, heads: int, width: int, qkv: int, mlp: int) -> dict[str, int]:
    """The sizes of a model as flags."""
    return {
        "model.num_layers": layers,
        "model.num_heads": heads,
        "model.embed_dim": width,
        "model.qkv_dim": qkv,
        "model.mlp_dim": mlp,
    }


PRESETS: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
    # athms/mad-lab, configs/layers/mh-attention.yml.
    "softmax": {"official": {"mad-*": {"model.positions": "rotary"}}},
    "linear": {"official": {"pathfinder": _sizes(1, 2, 128, 64, 128)}},
    "cosformer": {
        "official": {
            "*": {
                "model.attention_options": "eps=0.0001",
                "model.positions": "sinusoidal",
                "model.padding": "lengths",
                "model.pooling": "mean",
                "model.qkv_bias": True,
                "model.input_dropout": 0.1,
                "model.mlp_dropout": 0.0,
                "train.adam_b2": 0.999,
                "train.adam_eps": 1e-8,
            },
            "path*": {"model.inputs": "linear", "model.pooling": "last"},
            "listops": {
                **_sizes(6, 8, 128, 128, 256),
                "model.dropout": 0.0,
                "train.schedule": "cosine",
                "train.learning_rate": 0.01,
                "train.weight_decay": 0.01,
                "train.steps": 80_000,
                "train.batch_size": 50,
                "train.eval_every": 1_000,
            },
            "text": {
                **_sizes(5, 8, 64, 64, 128),
                "model.dropout": 0.0,
                "train.schedule": "cosine",
                "train.learning_rate": 0.0005,
                "train.weight_decay": 0.0,
                "train.steps": 50_000,
                "train.warmup": 80,
                "train.batch_size": 16,
                "model.norm": "batch",
                "model.max_length": 4_096,
                "data.max_length": 4_096,
            },
            "retrieval": {
                **_sizes(4, 8, 128, 128, 256),
                "model.dropout": 0.0,
                "train.schedule": "cosine",
                "train.learning_rate": 0.001,
                "train.weight_decay": 0.0,
                "train.steps": 50_000,
                "train.warmup": 800,
                "train.eval_every": 1_000,
                "model.post_norm": True,
                "model.interaction": "nli",
            },
            "image": {
                **_sizes(6, 8, 512, 512, 1_024),
                "model.dropout": 0.2,
                "train.schedule": "cosine",
                "train.learning_rate": 0.004,
                "train.weight_decay": 0.05,
                "train.steps": 200_000,
                "train.warmup": 1_000,
                "train.batch_size": 50,
                "train.eval_every": 5_000,
                "model.inputs": "linear",
                "model.norm": "batch",
            },
            "pathfinder": {
                **_sizes(6, 8, 256, 256, 512),
                "model.dropout": 0.1,
                "train.schedule": "cosine",
                "train.learning_rate": 0.0005,
                "train.weight_decay": 0.0,
                "train.steps": 500_000,
                "train.warmup": 2_500,
                "train.batch_size": 64,
                "train.eval_every": 2_500,
            },
        }
    },
    # The retrieval file has LRA's sizes.
    "flow": {
        "official": {
            "*": {
                "model.attention_options": "clip=None,competition_axis=heads,"
                "feature_map=relu+1e-6"
            },
            "listops": {
                "model.num_layers": 1,
                "model.num_heads": 2,
                "train.learning_rate": 0.005,
            },
            "text": {"model.num_layers": 1, "train.learning_rate": 0.005},
            "image": {"model.num_heads": 4},
            "pathfinder": {
                **_sizes(1, 8, 256, 128, 256),
                "train.learning_rate": 0.0001,
            },
        }
    },
    "linformer": {
        "official": {
            "*": {"model.attention_options": "features=16,sharing=key_value"},
            "pathfinder": _sizes(1, 2, 32, 16, 32),
        },
        "compact": {"*": {"model.attention_options": "features=128"}},
        "modern": {"path*": {"model.attention_options": "features=256"}},
    },
    "performer": {
        "official": {
            "*": {"model.attention_options": "kernel=relu,scale=1,feature_eps=0.001"},
            # Not those of the repository's file: its maintainer gives these for the
            # published accuracy (google-research/long-range-arena, issue 37).
            "pathfinder": _sizes(1, 8, 128, 64, 128),
        }
    },
    "local": {
        "official": {
            "*": {"model.attention_options": "block=50"},
            "image": {
                "model.attention_options": "block=64",
                "model.num_heads": 2,
                "model.pooling": "mean",
            },
            "path*": {"model.attention_options": "block=64"},
            "pathfinder": {
                **_sizes(2, 4, 64, 32, 64),
                "model.dropout": 0.1,
            },
        }
    },
    # LRA's window of 512 covers both sides together; its models give no global mask.
    "longformer": {
        "official": {
            "*": {"model.attention_options": "window=256,global_tokens=0"},
            "image": {
                "model.num_layers": 4,
                "model.num_heads": 4,
                "model.pooling": "mean",
            },
            "pathfinder": {
                **_sizes(2, 2, 32, 16, 32),
                "model.dropout": 0.1,
            },
        }
    },
    # One head on images, because of a misspelled key in LRA's file.
    "bigbird": {
        "official": {
            "*": {"model.attention_options": "block=64,num_random=3"},
            "image": {"model.num_heads": 1},
            "pathfinder": _sizes(4, 2, 64, 32, 64),
        }
    },
    "sparse": {
        "official": {
            "*": {"model.attention_options": "pattern=fixed,stride=50,summary=10"},
            "pathfinder": _sizes(1, 8, 32, 16, 32),
        }
    },
    # Not in LRA. It has no projections, so all widths are equal.
    "fnet": {
        "official": {"image": {"model.qkv_dim": 128}, "path*": {"model.qkv_dim": 32}}
    },
    "synthesizer": {"official": {"pathfinder": _sizes(2, 4, 64, 32, 64)}},
    "sinkhorn": {
        "official": {
            "*": {"model.attention_options": "block=50"},
            "image": {
                "model.num_heads": 1,
                "model.embed_dim": 32,
                "model.qkv_dim": 32,
                "model.mlp_dim": 64,
                "model.dropout": 0.1,
                "train.weight_decay": 0.7,
            },
            "pathfinder": _sizes(2, 4, 32, 16, 64),
        }
    },
    "reformer": {
        "official": {
            "*": {"model.attention_options": "chunk=None,num_hashes=1,num_buckets=10"},
            "image": _sizes(4, 8, 64, 32, 64),
            "pathfinder": _sizes(2, 8, 64, 32, 64),
        }
    },
    "gau": {"modern*": {"*": {"model.mlp": "auto"}}},
    "flash": {"modern*": {"*": {"model.mlp": "auto"}}},
    "hgrn": {
        "modern*": {
            "*": {"model.attention_options": "scale=unit", "model.local_values": False}
        }
    },
}
