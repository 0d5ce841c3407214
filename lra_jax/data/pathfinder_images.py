"""Pathfinder images in bulk: two snakes, distractors, and two markers.

The distribution is that of the original (Linsley et al., "Learning long-range spatial
dependencies with horizontal gated recurrent units", NeurIPS 2018; its repository
drewlinsley/pathfinder) with the settings of the Long-Range Arena:

1. two target snakes grow in turn, dash by dash (`pathfinder_growth`); if one cannot
   continue, the image starts again;
2. distractors grow from free places, each tried five times, and may be missing. They
   may touch only the last dash of the first target;
3. two markers are placed: at the beginning of a target snake, and at the end of the
   same one (label 1) or of the other (label 0);
4. the image is the maximum of all layers, stretched to 0..255. On 32 pixels the
   contrast of distractors is 2, that of targets 1.5, and that of markers 1; but only
   markers cover whole pixels.

One in 1,000 pairs of snakes begun on 64 pixels is finished, and one in 330 on 128. So a
batch of attempts grows at once, each at its own stage: one that failed starts again
immediately, and one that is finished moves on to the distractors.

Labels are balanced, one of each in every two images (the original tosses a coin). Each
chunk has its own random stream, keyed by (seed, chunk), so that the images are
byte-identical for any number of processes.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lra_jax.data import workers
from lra_jax.data.pathfinder_growth import Field, Patches, Snakes
from lra_jax.data.pathfinder_shapes import LEVELS, Settings, Tables, make_tables

CHUNK_PIXELS = 1 << 20
"""Pixels of all images in a chunk. Changing it would change every seed's images."""

_ATTEMPTS = 128  # At once. Changing it would change them too.
_SNAKE_TRIALS = 5


class Images(NamedTuple):
    """A batch of images.

    Attributes:
      pixels: `uint8 [n, size, size]`.
      labels: `uint8 [n]`, 1 where one snake joins the markers.
    """

    pixels: np.ndarray
    labels: np.ndarray


class Scene(NamedTuple):
    """The contents of n images.

    Attributes:
      targets: the two target snakes.
      distractors: snakes, each with the images that have it.
      first: `[n]`, the target snake, 0 or 1, with a marker at its beginning.
      last: `[n]`, the one with a marker at its end.
    """

    targets: tuple[Snakes, Snakes]
    distractors: Sequence[tuple[Snakes, np.ndarray]]
    first: np.ndarray
    last: np.ndarray


def chunk_size(settings: Settings) -> int:
    """Images in a chunk: 1024, 256, 64 and 16 for 32, 64, 128 and 256 pixels."""
    return CHUNK_PIXELS // settings.size**2


def sample_chunk(settings: Settings, seed: int, chunk: int) -> Images:
    """Grows the images of a chunk, which depend only on the arguments."""
    entropy = np.random.SeedSequence((seed, chunk))
    rng = np.random.Generator(np.random.Philox(entropy))
    count = chunk_size(settings)
    pairs = np.tile(np.array([0, 1], np.uint8), (count // 2, 1))
    labels = rng.permuted(pairs, axis=1).ravel()
    margins = settings.geometry.margins
    margin_of = rng.integers(len(margins), size=count)
    pixels = np.zeros((count, settings.size, settings.size), np.uint8)
    for index, margin in enumerate(margins):
        chosen = np.flatnonzero(margin_of == index)
        tables = make_tables(settings.geometry, margin)
        scene = _grow_scene(settings, tables, rng, labels[chosen])
        pixels[chosen] = _draw(settings, tables, scene)
    return Images(pixels, labels)


def iterate(
    settings: Settings,
    seed: int,
    count: int,
    processes: int | None = None,
) -> Iterator[Images]:
    """Yields `count` images in batches.

    Args:
      settings: which images.
      seed: any non-negative integer; fixes every byte of the result.
      count: number of images, at least 1.
      processes: worker processes; 1 = in this process, None = as many as the machine
        has cores. The images do not depend on it.
    """
    if processes is None:
        processes = min(workers.available_cpus(), -(-count // chunk_size(settings)))
    sample = functools.partial(sample_chunk, settings, seed)
    with contextlib.closing(workers.map_in_order(sample, processes)) as chunks:
        for images in chunks:
            left = count - len(images.labels)
            if left <= 0:
                # A consumer of the last batch may never come back to end the workers.
                chunks.close()
            yield Images(images.pixels[:count], images.labels[:count])
            if left <= 0:
                return
            count = left


def _grow_scene(
    settings: Settings, tables: Tables, rng: np.random.Generator, labels: np.ndarray
) -> Scene:
    """Grows the contents of images with these labels."""
    count, level = len(labels), LEVELS[settings.level]
    field = Field(settings.geometry, tables, rng, count)
    targets = _grow_targets(field, settings, tables, rng, count)
    distractors = [
        _grow_distractor(field, count, level.distractor)
        for _ in range(settings.distractors)
    ]
    first = rng.integers(2, size=count)
    last = np.where(labels == 1, first, 1 - first)
    return Scene(targets, distractors, first, last)


def _grow_targets(field, settings, tables, rng, count) -> tuple[Snakes, Snakes]:
    """Grows two snakes in every image of `field`."""
    dashes = LEVELS[settings.level].target
    nursery = Field(settings.geometry, tables, rng, _ATTEMPTS)
    young = Snakes(_ATTEMPTS, dashes), Snakes(_ATTEMPTS, dashes)
    grown = Snakes(count, dashes), Snakes(count, dashes)
    age = np.zeros(_ATTEMPTS, np.int32)
    finished = 0
    while finished < count:
        _begin_again(nursery, young, age)
        alive = np.arange(_ATTEMPTS)
        for snakes in young:
            alive = alive[nursery.extend(snakes, alive, age[alive])]
        lost = np.ones(_ATTEMPTS, bool)
        lost[alive] = False
        age = np.where(lost, 0, age + 1)
        done = np.flatnonzero(age == dashes)[: count - finished]
        if done.size:
            nursery.occupy(young[1], done, dashes - 1)
            ids = finished + np.arange(len(done))
            field.restore(ids, nursery.save(done), np.arange(len(done)))
            for target, snakes in zip(grown, young, strict=True):
                target.copy_rows(snakes, ids, done)
            age[done] = 0
            finished += len(done)
    return grown


def _begin_again(field: Field, pair: tuple[Snakes, Snakes], age: np.ndarray) -> None:
    """Starts every attempt of age 0."""
    while (waiting := np.flatnonzero(age == 0)).size:
        field.clear(waiting)
        age[field.begin_pair(*pair, waiting)] = 1


def _grow_distractor(
    field: Field, count: int, dashes: int
) -> tuple[Snakes, np.ndarray]:
    """Grows a short snake; returns it and the images that have it."""
    snakes, waiting = Snakes(count, dashes), np.arange(count)
    for _ in range(_SNAKE_TRIALS):
        alive = field.begin_anywhere(snakes, waiting)
        saved, begun = field.save(alive), alive
        for dash in range(1, dashes):
            alive = alive[field.extend(snakes, alive, np.full(len(alive), dash))]
        field.occupy(snakes, alive, dashes - 1)
        failed = ~np.isin(begun, alive)
        field.restore(begun[failed], saved, failed)
        waiting = waiting[~np.isin(waiting, alive)]
        if not waiting.size:
            break
    return snakes, np.setdiff1d(np.arange(count), waiting)


def _draw(settings: Settings, tables: Tables, scene: Scene) -> np.ndarray:
    """The images, `uint8 [n, size, size]`."""
    targets, distractors, first, last = scene
    geometry, count = settings.geometry, len(first)
    everyone = np.arange(count)
    marks = [
        np.stack([s.places[:, 0] for s in targets])[first, everyone],
        np.stack([s.places[:, -1] for s in targets])[last, everyone],
    ]
    layers = [
        (1.0, [(everyone, place, tables.marker[None]) for place in marks]),
        (
            geometry.target_contrast,
            [d for s in targets for d in _dashes(s, everyone, tables)],
        ),
        (
            geometry.distractor_contrast,
            [d for s, ids in distractors for d in _dashes(s, ids, tables)],
        ),
    ]
    images = np.zeros((count, settings.size, settings.size), np.float32)
    for contrast, strokes in layers:
        inner = _paint(settings, tables, count, strokes) * np.float32(contrast)
        np.maximum(images, inner, out=images)
    images *= 255 / images.max(axis=(1, 2), keepdims=True)
    return (images + np.float32(0.5)).astype(np.uint8)


def _paint(settings: Settings, tables: Tables, count: int, strokes) -> np.ndarray:
    """The maximum of strokes, see `_dashes`; `uint8 [n, size, size]`."""
    pad, side = tables.pad, settings.size + 2 * tables.pad
    canvases = np.zeros((count, side, side), np.uint8)
    for ids, places, patches in strokes:
        Patches(canvases, patches.shape[1]).raise_to(ids, places, patches)
    return canvases[:, pad:-pad, pad:-pad]


def _dashes(snakes: Snakes, ids: np.ndarray, tables: Tables):
    """Yields a stroke for each dash: its images, places and patches."""
    for dash in range(snakes.dashes):
        yield ids, snakes.places[ids, dash], tables.dashes[snakes.kinds[ids, dash]]
