"""The protocol of a row in words: the model, its training, its data and its machine."""

from lra_jax.configs import Config, ModelConfig
from lra_jax.reports.runs import Group


def protocol(group: Group) -> str:
    """The model that was trained, and its machine, on one line."""
    config = group.config
    train, model, data = config.train, config.model, config.data
    split = "validation = test" if group.last_only else "own validation split"
    split += ", best by loss" if train.best_by == "loss" else ""
    positions = "no" if model.positions == "none" else model.positions
    note = ""
    if group.is_apart:
        what = "protocol" if group.official else "data settings"
        note = f"; NOT the published {what}, do not compare with published rows"
    parts = "".join(f", {part}" for part in _parts(model))
    changes = "".join(f"; {change}" for change in _changes(config))
    longest = "" if data.longest is None else f", at most {data.longest:,} long"
    return (
        f"{config.preset}: {train.steps:,} steps of {train.batch_size}, "
        f"{model.num_layers} x {model.embed_dim} wide, {model.pooling} pooling, "
        f"{positions} positions{parts}, padding {model.padding}{changes}; "
        f"data {data.origin}{longest}, "
        f"{split}, {group.results[0].test_examples:,} test examples; "
        f"{group.text('device') or 'unknown device'}{note}"
    )


def _parts(model: ModelConfig) -> list[str]:
    """The parts of the model besides attention and a plain MLP."""
    window = f"{model.short_conv}" + f" x {model.short_conv}" * model.conv_grid
    parts = {
        f"blocks of {' and '.join(model.hybrid_names)} in turn": model.hybrid,
        f"patches of {model.patch} x {model.patch} pixels": model.patch > 1,
        f"short convolution of {window}": model.short_conv,
        f"stages of {model.stages} blocks, each twice as wide": model.stages,
        f"drop path {model.drop_path:g}": model.drop_path,
        f"LayerScale {model.layer_scale:g}": model.layer_scale,
        "linear head": model.head == "linear",
        "output gate": model.gate,
        "local values": model.local_values,
        "gated MLP": model.mlp == "glu",
        f"{model.norm} norm": model.norm != "layer",
        "norms after the sums": model.post_norm,
        "ReLU in the MLP": model.activation == "relu",
        "product-key memory": model.mlp == "product_key",
        f"MLP {model.mlp}": ":" in model.mlp,
        f"block {model.block}": ":" in model.block,
    }
    return [name for name, there in parts.items() if there]


def _changes(config: Config) -> list[str]:
    """How the training data were shown, if they were changed; an optimizer besides
    AdamW, averages and smoothed labels."""
    train, pretrain = config.train, config.pretrain
    changes = [*config.data.shown]
    if pretrain.steps:
        first = f"self-pretrained for {pretrain.steps:,} of the steps"
        changes.insert(0, f"{first}, {pretrain.mask_rate:g} masked")
    if train.curriculum:
        changes.append(f"short examples first ({train.curriculum})")
    if train.length_warmup:
        changes.append(f"beginnings first ({train.length_warmup})")
    for name in ("mixup", "cutmix"):
        if getattr(train, name):
            changes.append(f"{name} {getattr(train, name):g}")
    if train.optimizer != "adamw":
        options = f" ({train.optimizer_options})" * bool(train.optimizer_options)
        changes.append(f"optimizer {train.optimizer}{options}")
    if train.ema:
        changes.append(f"weights averaged by {train.ema:g}")
    if train.label_smoothing:
        changes.append(f"labels smoothed by {train.label_smoothing:g}")
    return changes
