"""Episodes in files, and the windows that they are cut into."""

import importlib.util
import sys

import numpy as np
import pytest

from lra_jax.data import __main__ as data_command
from lra_jax.data import control, control_files, pipeline
from lra_jax.data.environments import Pendulum

LENGTHS = (5, 9, 100, 3, 7, 4)


def episodes(lengths=LENGTHS, rest=2, **changes):
    """Arrays of episodes in the form of D4RL, and an unfinished one at the end."""
    count, rng = sum(lengths) + rest, np.random.default_rng(0)
    ends = np.isin(np.arange(count), np.cumsum(lengths) - 1)
    arrays = {
        "observations": rng.normal(2, 3, (count, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (count, 1)).astype(np.float32),
        "rewards": rng.normal(size=count).astype(np.float32),
        "terminals": ends & (np.arange(count) % 2 == 0),
        "timeouts": ends & (np.arange(count) % 2 == 1),
        "random_return": np.array(-850.0),
        "expert_return": np.array(-250.0),
    }
    arrays |= changes
    return {name: array for name, array in arrays.items() if array is not None}


def write(file, arrays):
    if file.suffix == ".npz":
        np.savez(file, **arrays)
        return file
    h5py = pytest.importorskip("h5py")
    with h5py.File(file, "w") as archive:
        for name, array in arrays.items():
            archive[name] = array
        archive["infos/qpos"] = np.zeros(3)
    return file


def prepare(path=None, data_dir=None, **settings):
    defaults = {
        **{"environment": "pendulum", "quality": "medium-expert", "episodes": 20},
        **{"context": 4, "returns": True, "acting": "stream", "target": None},
        "seed": 0,
    }
    return control.prepare(path=path, data_dir=data_dir, **defaults | settings)


def test_both_kinds_of_files(tmp_path):
    made = episodes()
    read = control_files.read([write(tmp_path / "a.npz", made)], Pendulum())
    assert len(read["rewards"]) == sum(LENGTHS)  # Without the unfinished episode.
    np.testing.assert_array_equal(read["actions"], made["actions"][: sum(LENGTHS)])
    both = control_files.read([tmp_path / "a.npz"] * 2, Pendulum())
    assert both["terminals"].sum() == 2 * made["terminals"].sum()
    other = control_files.read([write(tmp_path / "a.hdf5", made)], Pendulum())
    for name, array in read.items():
        np.testing.assert_array_equal(other[name], array)


@pytest.mark.skipif(not importlib.util.find_spec("mujoco"), reason="needs the extra")
def test_files_of_d4rl_have_its_returns(tmp_path):
    size = (sum(LENGTHS), 11)
    actions = np.zeros((size[0], 3), np.float32)
    arrays = episodes(rest=0, observations=np.ones(size), actions=actions)
    del arrays["random_return"], arrays["expert_return"]
    file = write(tmp_path / "hopper_medium-v2.hdf5", arrays)
    dataset = prepare(file, environment="hopper")
    assert (dataset.name, dataset.target) == ("hopper_medium-v2", 3600)
    assert dataset.normalise(3234.3) == 1 and dataset.normalise(-20.272305) == 0
    assert prepare(file, environment="hopper", target=1.0).target == 1


def test_windows_of_episodes(tmp_path):
    made = episodes()
    dataset = prepare(write(tmp_path / "a.npz", made))
    # Two of six episodes are held out; windows of four steps, or of three.
    sizes = {x: dataset.num_examples(x) for x in dataset.splits}
    held = [x for x in ("valid", "test")]
    counts = {5: 2, 9: 6, 100: 97, 3: 1, 7: 4, 4: 1}
    apart = {5: 2, 9: 3, 100: 25, 3: 1, 7: 2, 4: 1}
    lengths = {x: sum(dataset.lengths(x)) // 3 for x in held}
    assert all(sizes[x] == apart[lengths[x]] for x in held)
    assert sizes["train"] == sum(counts.values()) - sum(
        counts[n] for n in lengths.values()
    )
    starts = np.cumsum(LENGTHS) - LENGTHS
    for split in dataset.splits:
        batch = dataset.batch(split, np.arange(sizes[split]))
        for row in range(sizes[split]):
            real = batch["lengths"][row]
            action = batch["actions"][row, 0]
            first = int(np.flatnonzero(made["actions"][:, 0] == action)[0])
            episode = np.searchsorted(starts, first, "right") - 1
            place = slice(first, first + real)
            end = starts[episode] + LENGTHS[episode]
            assert first + real <= end
            states = (made["observations"][place] - dataset.mean) / dataset.deviation
            np.testing.assert_allclose(batch["states"][row, :real], states, atol=1e-5)
            left = [
                made["rewards"][step:end].sum() for step in range(*place.indices(end))
            ]
            shown = batch["returns"][row, :real, 0]
            np.testing.assert_allclose(shown, np.array(left) / 300, atol=1e-5)
            times = np.arange(real) + first - starts[episode]
            np.testing.assert_array_equal(batch["times"][row, :real], times)
            for name in ("returns", "states", "actions", "times"):
                assert not batch[name][row, real:].any()
    assert dataset.source("test")[0]["tokens"].shape[1] == 3
    assert dataset.answer("train", 0).startswith("steps 0 to ")


def test_states_are_standardised_by_training_episodes(tmp_path):
    dataset = prepare(write(tmp_path / "a.npz", episodes()), context=100)
    batch = dataset.batch("train", np.arange(dataset.num_examples("train")))
    real = np.arange(100) < batch["lengths"][:, None]
    np.testing.assert_allclose(batch["states"][real].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(batch["states"][real].std(0), 1, atol=1e-4)


def test_the_order_of_batches_and_what_identifies_the_data(tmp_path):
    file = write(tmp_path / "a.npz", episodes())
    dataset, again = prepare(file), prepare(file)
    assert dataset.fingerprint == again.fingerprint
    changes = ({"context": 5}, {"seed": 1}, {"returns": False})
    for change in changes:
        assert prepare(file, **change).fingerprint != dataset.fingerprint
    first, second = (
        next(pipeline.train_iterator(x, batch_size=8, seed=0, num_steps=9))
        for x in (dataset, again)
    )
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    assert (
        prepare(file, returns=False).batch("train", np.arange(9))["returns"].any() == 0
    )


def test_episodes_are_made_once_and_are_better_in_order(tmp_path):
    dataset = prepare(data_dir=tmp_path)
    (folder,) = (x for x in (tmp_path / "control").iterdir() if x.is_dir())
    returns = {}
    for file in sorted(folder.iterdir()):
        arrays = np.load(file)
        assert arrays["timeouts"].sum() == 20 and not arrays["terminals"].any()
        returns[file.stem] = arrays["rewards"].sum() / 20
    low, half, high = (returns[x] for x in ("random", "medium", "expert"))
    assert low < returns["medium-replay"] < high and low + 100 < half < high - 100
    assert dataset.references[0] == pytest.approx(low, abs=1e-3)
    assert dataset.target == dataset.references[1] > high - 50
    changed = {x.name: x.stat().st_mtime_ns for x in folder.iterdir()}
    assert prepare(data_dir=tmp_path).fingerprint == dataset.fingerprint
    assert changed == {x.name: x.stat().st_mtime_ns for x in folder.iterdir()}
    replay = prepare(data_dir=tmp_path, quality="medium-replay")
    assert replay.name == "pendulum-medium-replay"


COUNT = sum(LENGTHS) + 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, r"rewards: expected numbers \[130\] .*, got none"),
        ({"observations": np.ones((COUNT, 4))}, r"observations: .*\[130, 3\] of this"),
        ({"actions": np.ones(COUNT)}, r"actions: expected numbers \[130, 1\]"),
        ({"actions": np.full((COUNT, 1), 1.5)}, "actions: expected numbers from -1 to"),
        ({"rewards": np.full(COUNT, np.nan)}, "rewards: expected finite numbers"),
        ({"timeouts": np.zeros(COUNT)}, r"timeouts: expected booleans \[130\]"),
        (
            {x: np.zeros(COUNT, bool) for x in ("terminals", "timeouts")},
            "timeouts: expected an end of each episode, after at most 100",
        ),
        ({"terminals": np.arange(COUNT) == 120}, "at most 100 steps, got 121 steps"),
        ({"random_return": None}, "random_return: expected a number, got None"),
        ({"expert_return": np.array(-900.0)}, "expert_return: expected more than"),
    ],
)
def test_malformed_files(tmp_path, changes, message):
    if "terminals" in changes and len(changes) == 1:
        changes = {**changes, "timeouts": np.zeros(COUNT, bool)}
    file = write(tmp_path / "a.npz", episodes(**changes))
    with pytest.raises(ValueError, match=message) as raised:
        prepare(file)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["a.npz", "a.hdf5"])
def test_files_of_another_kind(tmp_path, name):
    if name.endswith(".hdf5"):
        pytest.importorskip("h5py")
    file = tmp_path / name
    file.write_bytes(b"neither")
    with pytest.raises(ValueError, match=rf"{name}: expected an \.hdf5"):
        prepare(file)
    with pytest.raises(ValueError, match=r"--data\.path: .* does not exist"):
        prepare(tmp_path / "missing.npz")


def test_hdf5_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    file = tmp_path / "a.hdf5"
    file.touch()
    with pytest.raises(
        ValueError, match=r"--data\.path: .* `pip install lra_jax\[cont"
    ):
        prepare(file)


def test_data_in_words(tmp_path, capsys):
    file = write(tmp_path / "a.npz", episodes())
    flags = ("--task=control", f"--data.path={file}", "--data.context=4")
    for action in ("describe", "sample"):
        data_command.main([action, *flags])
    printed = capsys.readouterr().out
    assert "sequences of at most 12, vectors of 3; numbers" in printed
    assert " of an episode\ntokens (4): 4 steps of 3 channels" in printed


def test_too_few_episodes(tmp_path):
    file = write(tmp_path / "a.npz", episodes(lengths=(5, 9)))
    with pytest.raises(ValueError, match=r"--data\.path: expected 3 episodes or more"):
        prepare(file)
