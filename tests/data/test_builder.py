"""Preparing data: once, whole, and in the right place."""

import collections
import itertools
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from helpers import FEW_TREES

from lra_jax.data import builder, listops


def run(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_splits(dataset):
    assert dataset.splits == ("train", "valid", "test")
    assert [dataset.num_examples(s) for s in dataset.splits] == [600, 70, 50]
    assert (dataset.vocab_size, dataset.num_classes) == (16, 10)
    assert dataset.max_length == 300
    for split in dataset.splits:
        source = dataset.source(split)
        assert len(source) == dataset.num_examples(split)
        for i, example in enumerate(source):
            assert example["tokens"].dtype == np.uint8
            assert len(example["tokens"]) == dataset.lengths(split)[i]
            assert example["label"] == dataset.labels(split)[i]
            assert listops.evaluate(example["tokens"]) == example["label"]
    with pytest.raises(ValueError, match=r"split: expected one of .* got 'dev'"):
        dataset.labels("dev")


def test_trees_are_distinct_over_all_splits(dataset):
    trees = [e["tokens"].tobytes() for s in dataset.splits for e in dataset.source(s)]
    assert len(set(trees)) == len(trees) == 720


def test_a_second_run_opens_what_is_there(tmp_path, monkeypatch):
    first = listops.prepare(tmp_path, seed=1, **FEW_TREES)
    monkeypatch.setattr(builder, "_write", None)
    second = listops.prepare(tmp_path, seed=1, **FEW_TREES | {"processes": 2})
    assert second.fingerprint == first.fingerprint
    assert second.folder == first.folder


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    listops.prepare(tmp_path / "data", seed=1, **FEW_TREES)
    assert not list(temporary.iterdir())


def test_settings_do_not_share_a_folder(tmp_path):
    changes = [
        {},
        {"seed": 1},
        {"num_train": 61},
        {"num_valid": 8},
        {"num_test": 6},
        {"min_length": 6},
        {"max_length": 61},
        {"max_depth": 4},
        {"max_args": 9},
    ]
    datasets = [listops.prepare(tmp_path, **FEW_TREES | change) for change in changes]
    assert len({d.folder for d in datasets}) == len(changes)
    assert len({d.fingerprint for d in datasets}) == len(changes)


def test_shards_keep_the_order(tmp_path, monkeypatch):
    whole = listops.prepare(tmp_path / "whole", **FEW_TREES)
    monkeypatch.setattr(builder, "_SHARD_BYTES", 11 * 130)
    sharded = listops.prepare(tmp_path / "sharded", **FEW_TREES)
    files = pathlib.Path(sharded.folder).glob("*train.array_record*")
    assert len(list(files)) == 6
    assert sharded.fingerprint == whole.fingerprint
    for a, b in zip(whole.source("train"), sharded.source("train"), strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])


def test_neither_tensorflow_nor_jax_is_imported(tmp_path):
    code = (
        "import sys; from lra_jax.data import listops\n"
        "d = listops.prepare(sys.argv[1], num_train=5, num_valid=1, num_test=1)\n"
        "d.source('train')[0]\n"
        "print([m for m in ('tensorflow', 'jax', 'grain') if m in sys.modules])"
    )
    out, err = run(code, tmp_path).communicate()
    assert out.splitlines()[-1:] == ["[]"], err


KILLED_HALF_WAY = """
import itertools, os, signal, sys
from lra_jax.data import listops
trees = listops._trees
def killed(*settings):
    yield from itertools.islice(trees(*settings), 1200)
    os.kill(os.getpid(), signal.SIGKILL)
listops._trees = killed
listops.prepare(sys.argv[1], num_train=1500, num_valid=20, num_test=20, processes=1)
"""


def test_killed_half_way(tmp_path):
    process = run(KILLED_HALF_WAY, tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.rglob("incomplete.*")
    assert not list(tmp_path.rglob("dataset_info.json"))
    sizes = {"num_train": 1500, "num_valid": 20, "num_test": 20, "processes": 1}
    dataset = listops.prepare(tmp_path, **sizes)
    assert len(dataset.source("train")) == 1500
    # It may be another machine's; an hour later it is nobody's.
    assert leftover.exists()
    builder._remove_leftovers(pathlib.Path(dataset.folder))
    assert leftover.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_STALE_SECONDS", -1)
        builder._remove_leftovers(pathlib.Path(dataset.folder))
    assert not leftover.exists()
    assert pathlib.Path(dataset.folder).exists()


PREPARE = """
import random, sys
random.seed(0)
from lra_jax.data import listops
d = listops.prepare(sys.argv[1], num_train=800, num_valid=5, num_test=5, processes=1)
print(d.fingerprint, len(d.source("train")))
"""


@pytest.mark.parametrize("locks", [True, False])
def test_two_at_a_time(tmp_path, locks):
    """With a lock one waits for the other; without, the last rename loses quietly."""
    code = PREPARE if locks else "import fcntl; fcntl.flock = int.__add__\n" + PREPARE
    if not locks:
        code = code.replace("int.__add__", "lambda *_: None")
    processes = [run(code, tmp_path) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    # On a busy machine lines of progress come first.
    one, other = (out.splitlines()[-1] for out, _ in outputs)
    assert one == other and one.split()[1] == "800"
    assert not list(tmp_path.rglob("incomplete.*"))


def test_workers_end_with_a_killed_parent(tmp_path):
    code = (
        "import os, signal, multiprocessing as mp\n"
        "from lra_jax.data import workers\n"
        "results = workers.map_in_order(abs, 2)\n"
        "print(next(results), *[p.pid for p in mp.active_children()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    out, _ = run(code).communicate()
    pids = out.split()[1:]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid):
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_a_script_without_the_main_guard_still_works(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from lra_jax.data.listops_language import Grammar\n"
        "from lra_jax.data.listops_trees import iterate\n"
        "print(sum(len(trees.labels) for trees in iterate(0, 10, Grammar(), 2)))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["10"]
    assert "__main__" in done.stderr


def test_too_little_space(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(builder.shutil, "disk_usage", lambda _: usage(9, 8, 1))
    with pytest.raises(OSError, match=r"about 9,360 bytes, and 1 are .*lra_listops"):
        listops.prepare(tmp_path, **FEW_TREES)


def test_the_disk_fills_up(tmp_path, monkeypatch):
    def write(*_, **__):
        raise RuntimeError("write() failed: No space left on device; writing x")

    monkeypatch.setattr("tensorflow_datasets.core.writer.ExampleWriter.write", write)
    with pytest.raises(OSError, match="No space left"):
        listops.prepare(tmp_path, **FEW_TREES)
    assert not list(tmp_path.rglob("incomplete.*"))
    monkeypatch.undo()
    assert listops.prepare(tmp_path, **FEW_TREES).num_examples("train") == 60


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    refusal = r"^--data.dir: expected a folder that can be written, got .*file"
    with pytest.raises(ValueError, match=refusal):
        listops.prepare(tmp_path / "file" / "data", **FEW_TREES)


def test_a_deleted_record_file_is_noticed(tmp_path):
    dataset = listops.prepare(tmp_path, **FEW_TREES)
    next(pathlib.Path(dataset.folder).glob("*valid.array_record*")).unlink()
    with pytest.raises(ValueError, match=r"expected .*, got no .*valid.*; delete "):
        listops.prepare(tmp_path, **FEW_TREES)


def test_too_few_examples(tmp_path, monkeypatch):
    monkeypatch.setattr(listops, "_trees", lambda *_: iter([(np.ones(3, np.uint8), 1)]))
    with pytest.raises(ValueError, match="train: expected 60 examples, got 1"):
        listops.prepare(tmp_path, **FEW_TREES)


@pytest.mark.parametrize(("tokens", "got"), [([3, 99], "one of 99"), ([], "none")])
def test_tokens_that_a_model_cannot_read(tmp_path, monkeypatch, tokens, got):
    examples = itertools.repeat((np.array(tokens, np.uint8), 1))
    monkeypatch.setattr(listops, "_trees", lambda *_: examples)
    refusal = f"train example 1: expected ids below .* in tokens, got {got}"
    with pytest.raises(ValueError, match=refusal):
        listops.prepare(tmp_path, **FEW_TREES)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_depth": 2}, "less than 12, the longest tree"),
    ],
)
def test_wrong_settings_leave_nothing_behind(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        listops.prepare(tmp_path, **FEW_TREES | {"min_length": 20} | setting)
    assert not list(tmp_path.iterdir())


def test_the_users_random_state_is_left_alone(tmp_path):
    random.seed(3)
    expected = random.random()
    random.seed(3)
    listops.prepare(tmp_path, **FEW_TREES)
    assert random.random() == expected


class Pairs(builder.SequenceBuilder):
    """A task of two sequences, as Retrieval is."""

    name = "lra_test_pairs"
    SEQUENCES = ("tokens_1", "tokens_2")
    VOCAB_SIZE = 257
    NUM_CLASSES = 2


def test_a_task_of_pairs(tmp_path):
    from lra_jax.data import pipeline

    examples = [
        (np.full(i, 1, np.uint8), np.full(9 - i, 2, np.uint8), i % 2)
        for i in range(1, 9)
    ]
    config = builder.SequenceConfig(
        name="x",
        max_length=16,
        expected_bytes=100,
        examples=lambda _: {"train": (8, examples), "test": (3, examples[:3])},
    )
    dataset = builder.prepare(Pairs, config, tmp_path)
    assert dataset.lengths("train").tolist() == [[i, 9 - i] for i in range(1, 9)]
    assert pipeline.bucket_lengths(dataset, "auto") == (16,)
    batch = next(iter(pipeline.EvalBatches(dataset, "test", "8,16", batch_size=2)))
    assert batch["tokens_1"].shape == batch["tokens_2"].shape == (2, 8)
    assert batch["lengths_1"].tolist() == [1, 2]
    assert batch["lengths_2"].tolist() == [8, 7]
    assert batch["tokens_2"][1].tolist() == [2] * 7 + [0]
    assert batch["labels"].tolist() == [1, 0]
