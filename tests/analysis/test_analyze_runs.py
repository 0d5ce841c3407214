"""``analyze`` on a trained run: maps, spectra, curves; and what it cannot show."""

import functools
import json
from typing import Any

import helpers
import numpy as np
import pytest
from flax import nnx

from lra_jax import analyze
from lra_jax.analysis import maps as maps_module
from lra_jax.analysis.maps import (
    Maps,
    draw_image,
    draw_text,
    even_shares,
    example_maps,
    maps_section,
    shortest,
    split_words,
    token_kinds,
)
from lra_jax.analysis.spectra import initial_spectra
from lra_jax.configs import get_preset
from lra_jax.data import listops_language
from lra_jax.models import SequenceClassifier
from lra_jax.reports.page import Page
from lra_jax.tasks import get_task
from lra_jax.training import restore
from lra_jax.training.restore import SavedRun
from lra_jax.training.session import Session
from lra_jax.vocabularies import Bytes, Words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("analyze")


@pytest.fixture(scope="module")
def workdir(folder):
    """A run of a few steps with Flow-Attention and a class vector."""
    config = helpers.tiny(
        folder / "data",
        folder / "run",
        attention="flow",
        train={"steps": 4, "eval_every": 4, "warmup": 1},
        model={"num_layers": 2, "pooling": "cls"},
    )
    with Session(config, quiet=True) as session:
        session.run()
    return folder / "run"


@pytest.fixture(scope="module", autouse=True)
def load_once():
    """A run is loaded by the first analysis of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "load_run", functools.cache(restore.load_run))
        yield


def stored(folder, name):
    return json.loads((folder / f"{name}.json").read_text())["data"]


def test_maps_of_a_run(workdir, tmp_path):
    page = analyze.run(analyze.Maps(workdir=str(workdir), out=str(tmp_path), layer=2))
    assert page.read_text().count("data:image/png") == 5
    weights = np.array(stored(tmp_path, "map-matrices")["weights"])
    flow = stored(tmp_path, "map-flow")
    values = stored(tmp_path, "map-received")
    length = len(values["tokens"])
    assert weights.shape == (2, length + 1, length + 1)  # the class vector in front
    # The class vector's row, without its own part, over its mean.
    row = np.abs(weights[:, 0, 1:])
    expected = (row / row.mean(-1, keepdims=True)).mean(0)
    np.testing.assert_allclose(values["values"], expected, rtol=5e-3)
    competition = np.array(flow["competition"])
    assert competition.shape == (2, length) and 0.5 < competition.mean() < 1.5
    assert 0.5 < np.array(flow["allocation"]).mean() < 1
    assert len(flow["kinds"]) == length and {"]"} < set(flow["kinds"])


SMALL = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "qkv_dim": 8, "mlp_dim": 8}
KINDS = {"train": "16/2:8", "test": "16/2:4", "num_valid": 4}


def untrained_run(task: str, attention: str, data: dict[str, Any]) -> SavedRun:
    """A small model of a task as it is made, with its data."""
    config = get_preset(task, attention=attention).replace(model=SMALL, data=data)
    known = get_task(task)
    dataset = known.prepare(config.data)
    model = known.make_model(config, dataset, nnx.Rngs(0))
    return SavedRun(config, known, dataset, model, 0)


@pytest.mark.parametrize("task", ["mqar", "lm"])
def test_maps_where_labels_belong_to_positions(task, tmp_path):
    """Recall has two answers in a sequence; a row of text has one at every token."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abcdef":
        (texts / name).write_text(f"{name} is a short text")
    data = KINDS if task == "mqar" else {"path": str(texts), "max_length": 32}
    saved = untrained_run(task, "softmax", data)
    batch = saved.examples([0])
    maps = example_maps(saved, batch, 1)
    assert maps.label is None and maps.prediction is None
    length = int((batch["segment_ids"] > 0).sum()) if task == "lm" else 16
    assert maps.weights.shape == (2, length, length) and len(maps.tokens) == length
    page = Page("Maps", tmp_path / "out")
    page.add(maps_section(maps, saved, "an example"))
    assert "The example, shaded by the weight" in page.html()


def test_spectrum_of_a_run(workdir, tmp_path):
    settings = analyze.Spectrum(out=str(tmp_path), workdir=str(workdir), examples=3)
    analyze.run(settings)
    entry = stored(tmp_path, "spectrum")["flow on listops"]
    curves = np.array(entry["curves"])
    assert curves.shape == (2, 2, 65) and np.array(entry["ranks"]).shape == (2, 2)
    assert (np.diff(curves) >= -1e-9).all() and (curves[..., -1] == 1).all()


def test_spectrum_at_initialisation(tmp_path, small_networks):
    analyze.run(
        analyze.Spectrum(
            out=str(tmp_path), attention="softmax,flow", length=16, draws=2
        )
    )
    entry = stored(tmp_path, "spectrum")
    assert set(entry) == {"softmax", "flow", "part"}
    draws = [initial_spectra("bert", "flow", 1, 16, [seed]).curves for seed in (0, 1)]
    np.testing.assert_allclose(entry["flow"]["curves"], np.mean(draws, 0), rtol=1e-3)
    far = np.abs((draws[0] - draws[1]).mean(1)) / 2
    np.testing.assert_allclose(entry["flow"]["deviations"], far, atol=1e-4)
    assert far.max() > 1e-4


def test_spectrum_of_a_few_tokens(tmp_path, small_networks):
    """A sequence shorter than the smallest rank of longer ones."""
    page = analyze.run(
        analyze.Spectrum(out=str(tmp_path), attention="softmax", length=3)
    )
    lines = page.with_suffix(".md").read_text().splitlines()
    cells = [line.split("|")[2].strip() for line in lines if "|" in line]
    assert [int(cell) for cell in cells if cell.isdecimal()] == [1, 2]


def test_rank_collapse_of_a_run(workdir, tmp_path):
    settings = analyze.RankCollapse(out=str(tmp_path), workdir=str(workdir), examples=2)
    analyze.run(settings)
    (entry,) = stored(tmp_path, "rank-collapse-run")["ours"].values()
    assert all(len(curve["mean"]) == 3 for curve in entry.values())


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["maps", "--layer=3"], ["--layer: ", "1 to 2", "got 3"]),
        (["maps", "--example=9999"], ["--example: ", "9999"]),
        (["spectrum", "--examples=9999"], ["--examples: expected 1 to ", "9999"]),
        (["maps", "--split=tset"], ["split", "tset"]),
    ],
)
def test_what_a_run_does_not_have(args, parts, workdir, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        analyze.main([*args, f"--workdir={workdir}", f"--out={tmp_path / 'out'}"])
    error = capsys.readouterr().err
    helpers.assert_one_error(stop.value.code, error, 2, *parts)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["spectrum", "--attention=fnet", "--length=8"], "fnet"),
        (["spectrum", "--network=xlnet", "--length=8"], "bert or albert"),
        (["spectrum", "--length=600"], "length"),
    ],
)
def test_one_line_for_what_cannot_work(args, part, tmp_path, capsys, small_networks):
    with pytest.raises(SystemExit) as stop:
        analyze.main([*args, f"--out={tmp_path / 'out'}"])
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)


def test_config_of_another_kind(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="expected the config of a run"):
        analyze.run(analyze.Maps(workdir=str(tmp_path), out=str(tmp_path / "out")))


def test_trees_have_their_arguments_below_them():
    tokens = listops_language.encode("[MAX 2 [MIN 3 4 ] ]")
    places, parents, words = listops_language.tree(tokens)
    assert words == {0: "MAX", 1: "2", 2: "MIN", 3: "3", 4: "4"}
    assert parents == {1: 0, 2: 0, 3: 2, 4: 2}
    assert places[1] == (0, 2) and places[3] == (1, 3) and places[4] == (2, 3)
    assert places[2] == (1.5, 2) and places[0] == (0.75, 1)


class Dataset:
    decode, classes, num_classes, step_parts = None, None, 10, ()

    def __init__(self, image_shape):
        self.image_shape = image_shape


class Saved:
    def __init__(self, task, image_shape):
        self.dataset = Dataset(image_shape)
        self.task = get_task(task)


@pytest.mark.parametrize(
    ("task", "parts"),
    [("series", ["step"]), ("control", ["return", "state", "action"])],
)
def test_maps_of_steps(task, parts, tmp_path):
    """The tokens of real vectors are named after their step, and so are the kinds."""
    data: dict[str, Any] = {"dir": str(tmp_path), "episodes": 3, "context": 4}
    if task == "series":
        values, numbers = np.ones((6, 5, 2)), np.arange(6) / 2
        arrays = {"values": values, "labels": numbers}
        splits = ("train", "valid", "test")
        kept = {f"{x}_{name}": y for x in splits for name, y in arrays.items()}
        np.savez(tmp_path / "a.npz", **kept)
        data = {"path": str(tmp_path / "a.npz")}
    saved = untrained_run(task, "flow", data)
    batch = saved.examples([0])
    maps = example_maps(saved, batch, 1)
    length = int(batch["lengths"][0]) * len(parts)
    assert maps.weights.shape == (2, length, length) and maps.label is None
    charts: Any = maps_section(maps, saved, "an example").parts
    (flow,) = (part for part in charts if part.name == "map-flow")
    thirds = ["first third", "first third", "middle", "middle", "last third"]
    assert flow.data["kinds"] == (parts * 4 if task == "control" else thirds)


@pytest.mark.parametrize(("task", "shape"), [("pathfinder", (4, 4)), ("text", None)])
def test_images_and_text(task, shape, tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(2, 16, 16))  # of either sign
    received = np.abs(weights).mean(1)
    tokens = np.frombuffer(b"a <b> $x$ & c\xe9\n.", np.uint8)
    maps = Maps(1, weights, {"received": received}, tokens, label=1)
    page = Page("Maps", tmp_path)
    page.add(maps_section(maps, Saved(task, shape), "an example"))
    assert (tmp_path / "map-received.png").stat().st_size > 1000


def test_tokens_are_grouped_by_kind():
    assert token_kinds(["[MAX", "3", "3", "]"]) == ["[MAX", "3", "3", "]"]
    words = [*"abcdefghijklmnopqrstuvwxyz", "7", " ", "+"]
    assert token_kinds(words) == ["letters"] * 26 + ["numbers", "blanks", "others"]


def test_names_of_a_tree_do_not_collide():
    """The first of neighbours is named; nodes of other depths are no neighbours."""
    places = {0: (0.0, 1), 1: (1.0, 2), 2: (1.5, 2), 3: (50.0, 2), 4: (100.0, 3)}
    assert maps_module._apart([*places], places) == [0, 1, 3, 4]


def test_the_shortest_example():
    assert shortest(np.array([5, 3, 4])) == 1
    assert shortest(np.array([[5, 1], [4, 9], [7, 2]])) == 1


def test_tokens_are_shown_in_their_own_vocabulary():
    """An id is a character only where tokens are bytes."""
    text = np.frombuffer(b"a $\n\xc3\xa9", np.uint8)
    assert split_words(text, get_task("text").decode) == ["a", " ", "$", " ", "·", "·"]
    ids = np.array([65, 7, 200], np.uint8)
    assert split_words(ids, get_task("mqar").decode) == ["65", "7", "200"]
    bits = np.array([66, 65], np.uint8)
    assert split_words(bits, get_task("parity").decode) == ["66", "65"]
    vocabulary = Words.of([b"the house of the house\n"])
    tokens = vocabulary.encode(b"house the\nof")
    shown = split_words(tokens, lambda x: vocabulary.decode(x).decode())
    assert shown == ["house", "the", " ", "of"]
    ends = np.array([104, 256], np.int32)
    assert split_words(ends, lambda x: Bytes().decode(x).decode()) == ["h", "·"]


def test_words_have_room_in_the_picture():
    words = [*["of"] * 19, "abcdefghijklmnopqrs"]
    figure: Any = draw_text(words, "received", np.arange(20.0) + 1).draw()
    axis, bar = figure.axes
    shown = [text.get_text() for text in axis.texts]
    assert shown == [*["of"] * 19, "abcdefghijkl..."]
    assert axis.get_xlabel() == "token of a line" and bar.get_ylabel() == "share"
    places = {text.xy for text in axis.texts}
    assert len(places) == 20 and max(x for x, _ in places) == 7


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_maps_of_images_in_patches(pooling, tmp_path):
    """Positions are patches; a class vector is in front of them and not shown."""
    model = SequenceClassifier(
        256,
        2,
        mechanism="flow",
        pooling=pooling,
        inputs="linear",
        patch=2,
        grid=(4, 8),
        max_length=32,
        num_layers=1,
        embed_dim=8,
        mlp_dim=8,
        dropout=0.0,
        rngs=nnx.Rngs(0),
    )
    tokens = np.random.default_rng(0).integers(0, 256, (1, 32))
    batch = {"tokens": tokens, "lengths": np.array([32]), "labels": np.array([1])}
    saved: Any = Saved("pathfinder", (4, 8))
    saved.model, saved.dataset.sequences = model, ("tokens",)
    saved.run = lambda batch: model(batch["tokens"], batch["lengths"])
    maps = example_maps(saved, batch, 1)
    front = int(pooling == "cls")
    assert maps.weights.shape == (2, front + 8, front + 8)
    size = np.abs(maps.weights)
    size = (size[:, 0] if front else size.mean(1))[:, front:]
    expected_shares = size / size.mean(1, keepdims=True)
    np.testing.assert_allclose(maps.scores["received"], expected_shares, rtol=1e-6)
    assert maps.scores["competition"].shape == (2, 8)
    # If all tokens of a causal model attend evenly, in each document of a row.
    documents = np.array([1, 1, 1, 2, 2])
    shares = [11 / 6, 5 / 6, 1 / 3, 3 / 2, 1 / 2]
    np.testing.assert_allclose(even_shares(documents), shares, rtol=1e-12)
    if not front:
        page = Page("Maps", tmp_path)
        page.add(maps_section(maps, saved, "an example"))
        assert (tmp_path / "map-received.png").stat().st_size > 1000


def test_each_picture_of_an_image_has_its_own_title():
    chart = draw_image(np.arange(16), (4, 4), "allocation", np.ones(16))
    figure = chart.draw()
    assert [axis.get_title() for axis in figure.axes[:2]] == ["input", "allocation"]
    assert "part allocated" in [axis.get_ylabel() for axis in figure.axes]
