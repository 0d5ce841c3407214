"""Control from flags to a return, by small models of few steps."""

from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import evaluate, report, train
from lra_jax.configs import get_preset
from lra_jax.data import control
from lra_jax.data.environments import Pendulum, play
from lra_jax.models import load
from lra_jax.tasks import acting, get_task
from lra_jax.training.restore import load_run

TRAIN = {
    "steps": 4,
    "warmup": 0,
    "batch_size": 4,
    "eval_batch_size": 4,
    "eval_every": 2,
    "log_every": 2,
}
MODEL = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "qkv_dim": 8, "mlp_dim": 8}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A folder in which episodes are made once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def config(data_dir, tmp_path):
    def make(attention="linear", workdir="run", preset="quick", **data):
        sizes = {"dir": str(data_dir), "episodes": 12, "context": 8}
        return get_preset("control", preset, attention).replace(
            train=TRAIN,
            model=MODEL,
            data=sizes | data,
            workdir=str(tmp_path / workdir),
        )

    return make


def untrained(run):
    """The dataset of a run, and its model before training."""
    task = get_task("control")
    dataset: Any = task.prepare(run.data)
    return dataset, task.make_model(run, dataset, nnx.Rngs(0))


def act_in(dataset, model, count=3):
    """Plays some episodes."""
    act = acting.make_act(dataset, model, count)
    return play(dataset.environment, act, range(count))


def check_saved(workdir):
    """A finished run's model acts alone as it does with the run's data and task."""
    run, saved = load_run(workdir), load(workdir)
    dataset: Any = run.dataset
    window = dataset.batch("train", np.arange(2))
    states = window["states"] * saved.raw["deviation"] + saved.raw["mean"]
    np.testing.assert_allclose(dataset.standardise(states), window["states"], 1e-4)
    arrays = [jnp.asarray(window[name]) for name in saved.model.INPUTS]
    calls = (
        helpers.call_model(type(x).__call__, x, *arrays)
        for x in (saved.model, run.model)
    )
    np.testing.assert_array_equal(*calls)
    assert saved.raw["target"] == dataset.references[1]
    assert saved.raw["return_scale"] == 1 / 300
    with pytest.raises(ValueError, match=r"^model: .* which acts by step"):
        saved.predict([window["states"][0]])


def test_a_run_is_scored_by_acting_and_resumed_bit_for_bit(config, tmp_path, capsys):
    run = config(context=100)
    result = train.run(run)
    assert result["metric"] == "return" and "test return" in capsys.readouterr().out
    dataset: Any = load_run(run.workdir).dataset
    low, high = dataset.references
    share = (result["test_raw_return_last"] - low) / (high - low)
    assert result["test_return_last"] == pytest.approx(share)
    assert result["test_accuracy_last"] == pytest.approx(100 * share)
    assert result["test_loss_last"] < 1.5 and result["validation"] == "holdout"
    scored = evaluate.run(evaluate.EvaluateConfig(run.workdir, checkpoint="last"))
    assert scored["raw_return"] == pytest.approx(result["test_raw_return_last"])
    check_saved(run.workdir)
    report.main([str(tmp_path), f"--out={tmp_path / 'report'}"])
    assert "control, raw return" in (tmp_path / "report" / "report.md").read_text()
    wrong = evaluate.EvaluateConfig(run.workdir, predictions=str(tmp_path / "x"))
    with pytest.raises(
        ValueError, match=r"--predictions: expected no file for .*contr"
    ):
        evaluate.run(wrong)
    resumed = helpers.resume(run, 2).run().to_dict()
    for name in ("test_return_last", "valid_loss_best", "best_step"):
        assert resumed[name] == result[name]


def test_a_stream_acts_as_reading_a_whole_episode_does(config):
    dataset, model = untrained(config(context=100, attention="flow"))
    by_stream = act_in(dataset, model)
    dataset.acting = "context"
    reread = act_in(dataset, model)
    np.testing.assert_allclose(by_stream.actions, reread.actions, atol=1e-3)
    assert np.ptp(by_stream.actions) > 1e-3


def test_acting_in_a_context_forgets_what_is_older(config):
    """Two pasts whose states differ only before the context end in one action."""
    dataset, model = untrained(config(context=5, acting="context"))
    model.actions.kernel[...] *= 0  # Earlier actions depend on older states.
    states = np.random.default_rng(0).normal(size=(12, 2, 3))
    states[7:, 1] = states[7:, 0]

    def last_actions():
        act = acting.make_act(dataset, model, 2)
        return [act(step, x, np.zeros(2)) for step, x in enumerate(states)][-1]

    first, second = last_actions()
    np.testing.assert_allclose(first, second, atol=1e-6)
    dataset.acting = "stream"
    assert np.abs(np.subtract(*last_actions())).max() > 1e-5


@pytest.mark.parametrize("shown", [True, False])
def test_hidden_returns_have_no_effect(config, shown):
    dataset, model = untrained(config(returns=shown))
    before = act_in(dataset, model)
    dataset.target = 1e4
    same = np.array_equal(act_in(dataset, model).actions, before.actions)
    assert same != shown


OWN = """
import jax.numpy as jnp


def last(query, key, value, mask=None, is_causal=False):
    return value + 0 * query
"""


def test_own_attention_acts_in_its_context(config, tmp_path, monkeypatch):
    (tmp_path / "control_last.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"--data\.acting: expected context for contr"):
        train.run(config(attention="control_last:last"), quiet=True)
    run = config(attention="control_last:last", acting="context")
    assert np.isfinite(train.run(run, quiet=True)["test_return_best"])


@pytest.mark.parametrize("preset", ["quick", "official"])
def test_the_size_of_a_return_survives_the_norm_of_its_token(config, preset):
    """A token is normalised: without vectors of times about as large as the projected
    return, it would show the return's sign alone."""
    _, model = untrained(config(preset=preset, environment="pendulum", acting="stream"))
    sizes = jnp.array([[-0.9], [-1.5]])
    low, high = model._token("returns", sizes, jnp.zeros(2, int))
    assert jnp.abs(low - high).max() > 0.1


def test_the_loss_is_of_real_steps():
    class Model:
        INPUTS = ("actions", "lengths")

        def __call__(self, actions, lengths, rngs):
            return jnp.zeros_like(actions)

    actions = jnp.array([[[1.0, 3.0], [2.0, 0.0]], [[0.0, 2.0], [9.0, 9.0]]])
    batch = {"actions": actions, "lengths": jnp.array([2, 1])}
    sums = acting.loss(Model(), batch)
    assert (float(sums["loss"]), float(sums["count"])) == (5 + 2 + 2, 3)
    weighted = acting.loss(Model(), batch | {"weights": jnp.array([0.0, 1.0])})
    assert (float(weighted["loss"]), float(weighted["count"])) == (2, 1)


@pytest.mark.parametrize("preset", ["quick", "official"])
def test_presets_make_models(preset):
    config = get_preset("control", preset, "cosformer")
    get_task("control").check(config)
    data: Any = config.data

    class Dataset:
        environment, acting, context = Pendulum(), data.acting, data.context

    model = nnx.eval_shape(lambda: acting.make_model(config, Dataset(), nnx.Rngs(0)))
    assert model.encoder.config.max_length == {"quick": 300, "official": 60}[preset]
    assert get_task("control").follows_protocol(config) == (preset == "official")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"is_causal": False}}, r"--model\.is_causal: expected True"),
        ({"data": {"packing": True}}, r"--data\.packing: expected False"),
        ({"data": {"quality": "best"}}, r"--data\.quality: expected one of random"),
        ({"data": {"context": 2_000}}, r"--model\.max_length: expected at least 6000"),
        ({"pretrain": {"steps": 2}}, "reconstructs: expected False"),
        ({"train": {**TRAIN, "seq_devices": 2}}, r"--train\.seq_devices: expected 1"),
        ({"attention": "linformer"}, r"linformer"),
    ],
)
def test_refusals(config, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        train.run(config().replace(**changes), quiet=True)
    assert "\n" not in str(raised.value)


def test_the_test_has_episodes_of_its_own(monkeypatch):
    played = {}

    def fake(environment, act, seeds):
        played[split] = list(seeds)
        return type("Episodes", (), {"returns": np.zeros(1)})

    monkeypatch.setattr(acting, "play", fake)
    monkeypatch.setattr(acting, "make_act", lambda *_: None)
    dataset = object.__new__(control.ControlDataset)
    dataset.environment, dataset.references = Pendulum(), (-4.0, -2.0)
    for split in ("train", "valid", "test"):
        scores = acting.scores(dataset, split, 0.0, None)
    assert scores == {"return": 2.0, "raw_return": 0.0}
    assert [len(x) for x in played.values()] == [10, 10, 100]
    assert len({seed for seeds in played.values() for seed in seeds}) == 120
