"""Pathfinder's images: the distribution, what a label means, and how snakes grow."""

import functools
import itertools

import numpy as np
import pytest

from lra_jax.data import pathfinder_growth, pathfinder_images
from lra_jax.data.pathfinder_shapes import (
    GEOMETRIES,
    LEVELS,
    Settings,
    disk,
    make_tables,
)


def chunk(size: int, level: str = "hard", num_distractors: int | None = None):
    return cached_chunk(Settings(size, level, num_distractors))


@functools.cache
def cached_chunk(settings: Settings):
    if settings != Settings(64):
        return pathfinder_images.sample_chunk(settings, 0, 0)
    # A third of a chunk: of a thousand pairs of snakes one is finished.
    labels = np.tile(np.array([0, 1], np.uint8), 40)
    tables, rng = make_tables(settings.geometry, 1), np.random.default_rng(0)
    scene = pathfinder_images._grow_scene(settings, tables, rng, labels)
    pixels = pathfinder_images._draw(settings, tables, scene)
    return pathfinder_images.Images(pixels, labels)


# Of the original generator: mean pixel and share of black ones.
@pytest.mark.parametrize(
    ("settings", "mean", "black"),
    [
        ((32, "hard"), 20.4, 0.655),
        ((32, "easy"), 12.8, 0.777),
        ((64, "hard"), 13.5, 0.736),
        ((128, "hard"), 7.9, 0.860),
        ((128, "hard", 17), 11.5, 0.798),
    ],
    ids=str,
)
def test_statistics_of_the_original(settings, mean, black):
    pixels = chunk(*settings).pixels
    assert abs(pixels.mean() / mean - 1) < 0.05
    assert abs((pixels == 0).mean() - black) < 0.02


def test_contrasts():
    """As bright as the released images, and stretched to the whole range."""
    pixels = chunk(32).pixels
    assert abs(pixels.std() / 255 - 0.20) < 0.006
    assert abs((pixels > 127).mean() - 0.086) < 0.006
    assert (chunk(64).pixels.max(axis=(1, 2)) == 255).all()


@pytest.mark.parametrize("size", [32, 128])
def test_labels_are_balanced_in_every_pair(size):
    images = chunk(size)
    assert images.pixels.shape == (2**20 // size**2, size, size)
    assert images.pixels.dtype == np.uint8
    assert (images.labels.reshape(-1, 2).sum(axis=1) == 1).all()
    assert 0.35 < images.labels[::2].mean() < 0.65


def test_the_largest_images():
    images = chunk(256)
    assert images.pixels.shape == (16, 256, 256)
    # No dash begins or ends in its wide border.
    assert not images.pixels[:, :10].any()


def test_bytes_do_not_depend_on_the_processes():
    settings = Settings(32, "easy", 1)
    batches = (pathfinder_images.iterate(settings, 3, 1500, n) for n in (1, 2))
    one, two = (list(zip(*images, strict=True)) for images in batches)
    pixels, labels = map(np.concatenate, one[:2])
    np.testing.assert_array_equal(pixels, np.concatenate(two[0]))
    np.testing.assert_array_equal(labels, np.concatenate(two[1]))
    assert pixels.shape == (1500, 32, 32)
    assert len(np.unique(pixels.reshape(1500, -1), axis=0)) == 1500
    other = pathfinder_images.sample_chunk(settings, 4, 0).pixels
    assert (other != pixels[:1024]).any(axis=(1, 2)).all()


@pytest.fixture
def drawn(monkeypatch):
    """The contents of the images drawn last."""
    arrays = {}
    draw = pathfinder_images._draw

    def spy(settings, tables, scene):
        arrays.update(scene._asdict(), pad=tables.pad)
        return draw(settings, tables, scene)

    monkeypatch.setattr(pathfinder_images, "_draw", spy)
    return arrays


def test_a_label_says_whether_one_snake_joins_the_markers(drawn):
    settings = Settings(64, "easy", 0)
    images = pathfinder_images.sample_chunk(settings, 0, 0)
    first, last = drawn["first"], drawn["last"]
    np.testing.assert_array_equal(images.labels, first == last)
    assert 0.3 < first.mean() < 0.7
    rows, columns = np.mgrid[:64, :64]
    for i, image in enumerate(images.pixels):
        ends = [
            drawn["targets"][first[i]].places[i, 0] - drawn["pad"],
            drawn["targets"][last[i]].places[i, -1] - drawn["pad"],
        ]
        distances = [np.hypot(rows - y, columns - x) for y, x in ends]
        # Markers have 255, dashes 204: the brightest pixels are two disks.
        near = np.minimum(*distances)
        assert (image[near <= 1.0] > 240).all()
        assert near[image > 210].max() <= GEOMETRIES[64].marker + 0.8


@pytest.fixture(scope="module", params=[(64, 1), (128, 3)], ids=str)
def grown(request):
    """Two target snakes in each of some images, and the space they occupy."""
    size, margin = request.param
    settings = Settings(size, "easy")
    tables = make_tables(settings.geometry, margin)
    rng = np.random.default_rng(0)
    field = pathfinder_growth.Field(settings.geometry, tables, rng, 40)
    snakes = pathfinder_images._grow_targets(field, settings, tables, rng, 40)
    return settings, margin, tables, field, snakes


def test_near_space_is_the_dilation_of_occupied_space(grown):
    settings, margin, tables, field, _ = grown
    pad, size = tables.pad, settings.size
    image = np.s_[:, pad : pad + size, pad : pad + size]
    occupied = np.pad(field._occupied[image], ((0, 0), *((margin, margin),) * 2))
    expected = np.zeros((40, size, size), np.uint8)
    for row, column in disk(margin) + margin:
        shifted = occupied[:, row : row + size, column : column + size]
        np.maximum(expected, shifted, out=expected)
    np.testing.assert_array_equal(field._near[image], expected)
    assert (field._near[:, :pad] == 255).all()


def test_snakes_turn_gently_and_stay_inside(grown):
    settings, margin, tables, _, snakes = grown
    geometry = settings.geometry
    for snake in snakes:
        places = snake.places - tables.pad
        assert places.min() >= 0 and places.max() < settings.size
        offsets = tables.candidates[snake.kinds[:, 1:] - 360]
        angles = np.arctan2(offsets[..., 0], offsets[..., 1])
        turns = np.abs(np.diff(angles, axis=1))
        turns = np.minimum(turns, 2 * np.pi - turns)
        assert turns.max() < np.pi / 2 / geometry.continuity
        # From the end of one dash to that of the next: a dash and two margins.
        steps = np.hypot(*np.moveaxis(np.diff(places[:, 1:], axis=1), -1, 0))
        assert abs(steps.mean() - geometry.dash - 2 * margin) < 1


def test_dashes_do_not_cross(grown):
    """The newest dash of a snake is not in the way yet; all older ones are."""
    settings, _, tables, _, snakes = grown
    side = settings.size + 2 * tables.pad
    drawn = []
    for snake in snakes:
        for dash in range(snake.dashes):
            canvas = np.zeros((40, side, side), np.uint8)
            patches = pathfinder_growth.Patches(canvas, tables.dashes.shape[1])
            images = tables.dashes[snake.kinds[:, dash]]
            patches.raise_to(np.arange(40), snake.places[:, dash], images)
            drawn.append((dash, canvas > 150))
    for (i, one), (j, two) in itertools.combinations(drawn, 2):
        assert abs(i - j) < 2 or not (one & two).any()


def test_the_second_snake_begins_at_the_seed_distance(grown):
    settings, _, tables, _, (one, two) = grown
    apart = one.places[:, 0] - two.places[:, 0]
    distance = settings.geometry.seed_distance
    assert np.abs(np.hypot(*apart.T) - distance).max() < 1
    begins = one.places[:, 0] - tables.pad
    assert begins.min() >= 2 * distance - tables.footprints.max()


def test_distractors_are_short_snakes_of_their_own():
    def pixels(count):
        return chunk(128, "hard", count).pixels.astype(np.int32)

    assert [level.distractor for level in LEVELS.values()] == [2, 2, 3, 4]
    assert Settings(128).distractors == 8 and Settings(32, "easy").distractors == 10
    without, eight, many = pixels(0).mean(), pixels(None).mean(), pixels(17).mean()
    assert without < eight < many
