"""``python -m lra_jax.data``: prepare, describe, sample."""

import sys
import types

import helpers
import pytest

from lra_jax.data import __main__ as command
from lra_jax.data import listops

FLAGS = [f"--data.{name}={value}" for name, value in helpers.DATA.items()]


def run(capsys, *args: str) -> list[str]:
    command.main(list(args))
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_prepare_describe_sample(capsys, tmp_path):
    flags = [*FLAGS, f"--data.dir={tmp_path}"]
    first = run(capsys, "prepare", "--task=listops", *flags)
    assert first[0] == "listops: 400 train, 50 valid, 45 test"
    assert first[1].startswith(f"in {tmp_path}")
    described = run(capsys, "describe", "--task=listops", *flags)
    assert described[:2] == first
    sizes = {k: v for k, v in helpers.DATA.items() if k != "buckets"}
    dataset = listops.prepare(tmp_path, **sizes)
    assert dataset.fingerprint in described[2]
    lengths = dataset.lengths("valid")
    line = next(line for line in described if line.startswith("valid: "))
    assert f"lengths {lengths.min()} to {lengths.max()}" in line
    drawn = run(capsys, "sample", "--task=listops", "--split=test", "--count=3", *flags)
    labels = [line for line in drawn if line.startswith("label ")]
    trees = [line.partition(": ")[2] for line in drawn if line.startswith("tokens")]
    assert len(labels) == len(trees) == 3
    for label, tree in zip(labels, trees, strict=True):
        assert listops.evaluate(listops.encode(tree)) == int(label.split()[1])
    other = run(
        capsys, "sample", "--split=test", "--count=3", "--seed=1", *flags
    )  # Another seed, other examples.
    assert other != drawn


def test_a_mechanism_may_have_data_settings_of_its_own(monkeypatch, capsys):
    """`official` on text reads 4,096 bytes for cosFormer, and 1,000 for others."""
    lengths = []
    task = types.SimpleNamespace(
        prepare=lambda data: lengths.append(data.max_length), name="text"
    )
    monkeypatch.setattr(command, "get_task", lambda name: task)
    monkeypatch.setitem(command.COMMANDS, "prepare", (command.DataCommand, print))
    for name in ("cosformer", "softmax"):
        flags = ("--task=text", "--preset=official", f"--attention={name}")
        command.main(["prepare", *flags])
    capsys.readouterr()
    assert lengths == [4_096, 1_000]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("sample --count=401", "--count: expected 1 to 400"),
        ("sample --seed=-1", "--seed"),
    ],
)
def test_errors(capsys, data_dir, args, part):
    name, *rest = args.split()
    with pytest.raises(SystemExit) as stop:
        command.main([name, *FLAGS, f"--data.dir={data_dir}", *rest])
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, part)
    assert out == ""


def test_pictures_are_png_files(capsys, tmp_path):
    sizes = [f"--data.num_{split}=2" for split in ("train", "valid", "test")]
    flags = ["--task=pathfinder", *sizes, f"--data.dir={tmp_path}", "--count=1"]
    with pytest.raises(SystemExit) as stop:
        command.main(["sample", *flags, f"--out={tmp_path}/c.jpg"])
    _, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, "--out", ".png", "c.jpg")
    assert not list(tmp_path.iterdir()), "data were made before"
    command.main(["sample", *flags, f"--out={tmp_path}/c.png"])
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_prepare_says_at_once_that_it_looks(monkeypatch, capsys, data_dir):
    monkeypatch.setattr("sys.__stdout__", sys.stdout)
    first = run(capsys, "prepare", *FLAGS, f"--data.dir={data_dir}")
    assert first[0] == "looking for the data of listops ..."


def test_no_command(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([])
    assert stop.value.code == 2 and "prepare" in capsys.readouterr().out
