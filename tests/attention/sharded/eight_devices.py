"""Measures for tests, on eight simulated devices, in a process of its own; JSON out."""

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lra_jax.attention import resolve
from lra_jax.attention.registry import MECHANISMS, accepted_keywords
from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import get_preset
from lra_jax.tasks import get_task
from lra_jax.training import sharding, step
from lra_jax.training.optimizer import make_optimizer

COLLECTIVE = re.compile(
    r"^\s*\S+ = (.*?) (all-gather|reduce-scatter|all-reduce|all-to-all|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\(",
    re.MULTILINE,
)


def collectives(compiled) -> list[tuple[str, int]]:
    """Name and elements of every collective operation in a compiled program."""
    matches = COLLECTIVE.findall(compiled.as_text())
    return sorted(
        (
            name,
            sum(
                int(np.prod([int(n) for n in sizes.split(",") if n], initial=1))
                for sizes in re.findall(r"\w+\[([\d,]*)\]", shapes)
            ),
        )
        for shapes, name in matches
    )


def difference(got, expected) -> float:
    """Largest, relative to each array's maximum."""
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max())
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    )


def documents(length: int) -> jax.Array:
    """Documents of many lengths over the edges of slices, padding between them."""
    ids = np.zeros((2, length), np.int32)
    ids[0, :3], ids[0, 3 : length - 5], ids[0, length - 3 :] = 1, 2, 1
    ids[1] = np.arange(length) // 5
    return jnp.asarray(ids)


def both(attention, causal: bool, packed: bool):
    """Output and gradients, with a padding mask, or with packed documents."""

    def call(query, key, value, cotangent):
        length = query.shape[1]
        real = jnp.array([[length], [length - 9]])
        mask = jnp.arange(length)[None] < real

        masks = {"mask": mask, "query_mask": mask}
        taken = accepted_keywords(attention) or frozenset()
        masks = {name: x for name, x in masks.items() if name in taken}
        if packed:
            masks = {"segment_ids": documents(length)}
            mask = masks["segment_ids"] > 0
        rows = mask[:, :, None, None]
        query = jnp.where(rows, query, jnp.nan)  # Padding may hold anything.

        def inner(*arrays):
            return attention(*arrays, is_causal=causal, **masks)

        out, pullback = jax.vjp(inner, query, key, value)
        # Rows of padded queries mean nothing.
        return jnp.where(rows, out, 0), pullback(jnp.where(rows, cotangent, 0))

    return call


def attention(
    name: str, causal: bool, length: int, compare: bool, packed: bool = False
) -> dict:
    """One mechanism, on 2 x 4 devices and on one."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("data", "seq"))
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (2, length, 2, 4)) for key in keys]
    split = both(sequence_parallel(name, mesh=mesh).attention, causal, packed)
    compiled = jax.jit(split, in_shardings=place, out_shardings=place)
    compiled = compiled.lower(*arrays).compile()
    result = {"collectives": collectives(compiled)}
    if compare:
        whole = jax.jit(both(resolve(name).attention, causal, packed))(*arrays)
        got = compiled(*(jax.device_put(x, place) for x in arrays))
        result["difference"] = difference(got, whole)
    return result


class Shape:
    """The fields of a dataset that a model reads."""

    vocab_size, num_classes, image_shape = 16, 10, None


def training(seq_devices: int, devices: int, length: int, steps: int) -> dict:
    """Losses of a few training steps of the whole model."""
    config = get_preset("listops", "compact").replace(
        train={"seq_devices": seq_devices, "batch_size": 8, "learning_rate": 0.01},
        model={"num_layers": 1, "embed_dim": 8, "qkv_dim": 8, "mlp_dim": 8}
        | {"max_length": length, "positions": "sinusoidal"},
    )
    task, optimizer = get_task("listops"), make_optimizer(config.train)
    model = task.make_model(config, Shape(), nnx.Rngs(params=0))
    graphdef, params = nnx.split(model)
    mesh = sharding.make_mesh((8,), seq_devices)
    if devices == 1:
        mesh = jax.make_mesh((1, 1), ("data", "seq"), (AxisType.Auto,) * 2)
    assert mesh.size == devices
    state = sharding.replicate(mesh, step.init_state(params, optimizer))
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(1, 16, (8, length)).astype(np.uint8),
        "lengths": rng.integers(length // 2, length, 8).astype(np.int32),
        "labels": rng.integers(0, 10, 8).astype(np.int32),
    }
    batch = sharding.shard_batch(mesh, batch)
    function = step.step_function(task.loss, graphdef, optimizer, seed=0)
    train_step: Any = step.compiled_step(function)
    compiled = sharding.under_mesh(mesh, train_step.lower)(state, batch).compile()
    sizes = compiled.memory_analysis()
    losses, before = [], 0.0
    for _ in range(steps):
        state = compiled(state, batch)
        total = float(state.sums["loss"])
        losses.append(total - before)
        before = total
    return {
        "losses": losses,
        "collectives": collectives(compiled),
        "temporary_bytes": sizes.temp_size_in_bytes,
        "tokens_on_a_device": batch["tokens"].addressable_shards[0].data.shape,
    }


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    report: dict = {"attention": {}, "training": {}}
    for name in (name for name, one in MECHANISMS.items() if one.sharded):
        for causal in (False, True)[: 1 if name == "flow" else 2]:
            key = f"{name}{' causal' if causal else ''}"
            report["attention"][key] = attention(name, causal, 32, compare=True)
            if name != "linear":  # cosFormer has its sums, and positions.
                report["attention"][f"{key} packed"] = {
                    length: attention(name, causal, length, length == 32, packed=True)
                    for length in (32, 64)
                }
    report["training"] = {
        "one device": training(1, 1, 256, 4),
        "data": training(1, 8, 256, 4),
        "sequence": training(4, 8, 256, 4),
        "sequence, shorter": training(4, 8, 64, 0),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
