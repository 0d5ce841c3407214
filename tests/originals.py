"""Small archives, files and models in the true formats of the released ones."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WORDS = {"neg": b"bad, awful, dull. ", "pos": b"good, great, fine! "}


def imdb_reviews(train: int = 20, test: int = 8) -> dict[str, bytes]:
    """Reviews by their names in the archive: so many of each class and split."""
    files = {}
    for split, count in (("train", train), ("test", test)):
        for label, word in WORDS.items():
            for index in range(count):
                name = f"aclImdb/{split}/{label}/{index}_{index % 10}.txt"
                files[name] = word * (1 + index % 5) + f"<br /> é{index}".encode()
    return files


def imdb_archive(file: Path, files: dict[str, bytes] | None = None) -> Path:
    """aclImdb_v1.tar.gz, with the parts that are no labelled reviews."""
    extra = {
        "aclImdb/README": b"Large Movie Review Dataset",
        "aclImdb/train/unsup/0_0.txt": b"nobody knows",
        "aclImdb/train/urls_pos.txt": b"http://",
    }
    return tar(file, extra | (imdb_reviews() if files is None else files))


def cifar_files(per_batch: int = 4, test: int = 12) -> dict[str, bytes]:
    """cifar-10-batches-bin: a label byte, then 32 x 32 red, green and blue bytes."""
    rng = np.random.default_rng(0)
    files = {"cifar-10-batches-bin/batches.meta.txt": b"airplane\n"}
    counts = {f"data_batch_{i}.bin": per_batch for i in range(1, 6)}
    for name, count in (counts | {"test_batch.bin": test}).items():
        labels = rng.permutation(np.arange(count) % 10)
        # Brighter from class to class.
        shade = (25 * labels[:, None] + rng.integers(0, 20, (count, 3072))) % 256
        records = np.concatenate([labels[:, None], shade], 1).astype(np.uint8)
        files[f"cifar-10-batches-bin/{name}"] = records.tobytes()
    return files


def cifar_archive(file: Path, files: dict[str, bytes] | None = None) -> Path:
    return tar(file, cifar_files() if files is None else files)


def aan_files(train: int = 40, other: int = 12) -> dict[str, bytes]:
    """new_aan_pairs.*.tsv: label 1 where both papers use the same letter."""
    rng = np.random.default_rng(0)
    files = {}
    for split, count in (("train", train), ("eval", other), ("test", other)):
        lines = []
        for index in range(count):
            label = index % 2
            first = int(rng.integers(4))
            second = first if label else (first + 1 + int(rng.integers(3))) % 4
            one, two = (
                bytes([97 + x]) * int(rng.integers(20, 60)) for x in (first, second)
            )
            columns = (f"{label}.0".encode(), b"P%d" % index, b"Q", one, two)
            lines.append(b"\t".join(columns) + b"\n")
        files[f"new_aan_pairs.{split}.tsv"] = b"".join(lines)
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def token_files(folder: Path, rows: dict[str, list[list[int]]], labels) -> Path:
    """MEGA's layout: the same rows, by suffix, in each split."""
    files = {}
    for split in ("train", "valid", "test"):
        for suffix, sequences in rows.items():
            text = "".join(" ".join(map(str, row)) + "\n" for row in sequences)
            files[f"input/{split}{suffix}"] = text.encode()
        files[f"label/{split}.label"] = "".join(f"{x}\n" for x in labels).encode()
    return write(folder, files)


def tar(file: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def hugging_face(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A model of random numbers in Hugging Face's format; its arrays."""
    rng = np.random.default_rng(0)
    words, linear, norm = config["vocab_size"], {}, {}
    if config["model_type"] == "gpt2":
        width, inner = config["n_embd"], config["n_inner"]
        prefix, tables = "transformer.", {"wte": words, "wpe": config["n_positions"]}
        for i in range(config["n_layer"]):
            linear |= {
                f"h.{i}.attn.c_attn": (width, 3 * width),
                f"h.{i}.attn.c_proj": (width, width),
                f"h.{i}.mlp.c_fc": (width, inner),
                f"h.{i}.mlp.c_proj": (inner, width),
            }
            norm |= {f"h.{i}.ln_1": "weight", f"h.{i}.ln_2": "weight"}
        norm["ln_f"] = "weight"
    else:
        width, inner = config["hidden_size"], config["intermediate_size"]
        prefix = f"{config['model_type']}."
        tables = {
            "embeddings.word_embeddings": words,
            "embeddings.position_embeddings": config["max_position_embeddings"],
            "embeddings.token_type_embeddings": config["type_vocab_size"],
        }
        norm["embeddings.LayerNorm"] = "gamma"
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            for name in ("query", "key", "value"):
                linear[f"{layer}.attention.self.{name}"] = (width, width)
            linear[f"{layer}.attention.output.dense"] = (width, width)
            linear[f"{layer}.intermediate.dense"] = (inner, width)
            linear[f"{layer}.output.dense"] = (width, inner)
            norm[f"{layer}.attention.output.LayerNorm"] = "weight"
            norm[f"{layer}.output.LayerNorm"] = "weight"
    shapes = {f"{name}.weight": (rows, width) for name, rows in tables.items()}
    for name, shape in linear.items():
        out = shape[1] if prefix == "transformer." else shape[0]
        shapes |= {f"{name}.weight": shape, f"{name}.bias": (out,)}
    for name, word in norm.items():
        other = "beta" if word == "gamma" else "bias"
        shapes |= {f"{name}.{word}": (width,), f"{name}.{other}": (width,)}
    arrays = {name: rng.normal(size=x).astype("f4") for name, x in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    head = {"cls.predictions.bias": np.zeros(words, "f4")}
    named = {f"{prefix}{name}": array for name, array in arrays.items()}
    save_file(named | (head if prefix == "bert." else {}), folder / "model.safetensors")
    return arrays
