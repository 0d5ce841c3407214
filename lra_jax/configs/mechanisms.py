"""What a mechanism's own published settings change in the presets of tasks.

For each mechanism: a pattern of preset names (``official``, ``modern*``), then one of
task names (``*``, which means all of LRA, or ``path*``, ``mad-*``), then flags and
their values. Later patterns override earlier ones. `lra_jax.configs.families` names the
sources.
"""

from typing import Any


def _sizes(**sizes: int) -> dict[str, int]:
    """Flags of the model: ``_sizes(num_layers=2)`` sets ``model.num_layers``."""
    return {f"model.{name}": size for name, size in sizes.items()}


PRESETS: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
    # athms/mad-lab, configs/layers/mh-attention.yml.
    "softmax": {"official": {"mad-*": {"model.positions": "rotary"}}},
    "linear": {
        "official": {
            "pathfinder": _sizes(
                num_layers=1, num_heads=2, embed_dim=128, qkv_dim=64, mlp_dim=128
            )
        }
    },
    # OpenNLPLab/lra, trans-cosformer-lra-*.yaml; see lra_jax/configs/families.py.
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
            "listops": _sizes(
                num_layers=6, num_heads=8, embed_dim=128, qkv_dim=128, mlp_dim=256
            )
            | {
                "model.dropout": 0.0,
                "train.schedule": "cosine",
                "train.learning_rate": 0.01,
                "train.weight_decay": 0.01,
                "train.steps": 80_000,
                "train.batch_size": 50,
                "train.eval_every": 1_000,
            },
            "text": _sizes(
                num_layers=5, num_heads=8, embed_dim=64, qkv_dim=64, mlp_dim=128
            )
            | {
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
            "retrieval": _sizes(
                num_layers=4, num_heads=8, embed_dim=128, qkv_dim=128, mlp_dim=256
            )
            | {
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
            "image": _sizes(
                num_layers=6, num_heads=8, embed_dim=512, qkv_dim=512, mlp_dim=1_024
            )
            | {
                "model.dropout": 0.2,
                "train.schedule": "cosine",
                "train.learning_rate": 0.004,
                "train.weight_decay": 0.05,
                "model.inputs": "linear",
                "model.norm": "batch",
            },
            "pathfinder": _sizes(
                num_layers=6, num_heads=8, embed_dim=256, qkv_dim=256, mlp_dim=512
            )
            | {
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
    # thuml/Flowformer, folder Flowformer_LRA; the retrieval file has LRA's sizes.
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
            "pathfinder": _sizes(
                num_layers=1, num_heads=8, embed_dim=256, qkv_dim=128, mlp_dim=256
            )
            | {
                "train.learning_rate": 0.0001,
            },
        }
    },
    "linformer": {
        "official": {
            "*": {"model.attention_options": "features=16,sharing=key_value"},
            "pathfinder": _sizes(
                num_layers=1, num_heads=2, embed_dim=32, qkv_dim=16, mlp_dim=32
            ),
        },
        "compact": {"*": {"model.attention_options": "features=128"}},
        "modern": {"path*": {"model.attention_options": "features=256"}},
    },
    "performer": {
        "official": {
            "*": {"model.attention_options": "kernel=relu,scale=1,feature_eps=0.001"},
            # Not those of the repository's file: its maintainer gives these for the
            # published accuracy (google-research/long-range-arena, issue 37).
            "pathfinder": _sizes(
                num_layers=1, num_heads=8, embed_dim=128, qkv_dim=64, mlp_dim=128
            ),
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
            "pathfinder": _sizes(
                num_layers=2, num_heads=4, embed_dim=64, qkv_dim=32, mlp_dim=64
            )
            | {
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
            "pathfinder": _sizes(
                num_layers=2, num_heads=2, embed_dim=32, qkv_dim=16, mlp_dim=32
            )
            | {
                "model.dropout": 0.1,
            },
        }
    },
    # One head on images, because of a misspelled key in LRA's file.
    "bigbird": {
        "official": {
            "*": {"model.attention_options": "block=64,num_random=3"},
            "image": {"model.num_heads": 1},
            "pathfinder": _sizes(
                num_layers=4, num_heads=2, embed_dim=64, qkv_dim=32, mlp_dim=64
            ),
        }
    },
    "sparse": {
        "official": {
            "*": {"model.attention_options": "pattern=fixed,stride=50,summary=10"},
            "pathfinder": _sizes(
                num_layers=1, num_heads=8, embed_dim=32, qkv_dim=16, mlp_dim=32
            ),
        }
    },
    # Not in LRA. It has no projections, so all widths are equal.
    "fnet": {
        "official": {"image": {"model.qkv_dim": 128}, "path*": {"model.qkv_dim": 32}}
    },
    "synthesizer": {
        "official": {
            "pathfinder": _sizes(
                num_layers=2, num_heads=4, embed_dim=64, qkv_dim=32, mlp_dim=64
            )
        }
    },
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
            "pathfinder": _sizes(
                num_layers=2, num_heads=4, embed_dim=32, qkv_dim=16, mlp_dim=64
            ),
        }
    },
    "reformer": {
        "official": {
            "*": {"model.attention_options": "chunk=None,num_hashes=1,num_buckets=10"},
            "image": _sizes(
                num_layers=4, num_heads=8, embed_dim=64, qkv_dim=32, mlp_dim=64
            ),
            "pathfinder": _sizes(
                num_layers=2, num_heads=8, embed_dim=64, qkv_dim=32, mlp_dim=64
            ),
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
