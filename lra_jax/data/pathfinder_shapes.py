"""The settings of Pathfinder's images, and tables of the segments that they consist of.

Sizes and levels, but for `short`, are those of the Long-Range Arena (docstring of its
`data/pathfinder.py`, on top of the defaults of drewlinsley/pathfinder, whose geometry
this follows). A snake is a chain of dashes. A dash begins at a whole pixel and ends at
one of a few pixels, so all possible dashes are drawn once, with Pillow, and growing a
snake means looking up rows of tables.

Positions are (row, column); an angle a points to `(sin a, cos a)`.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

DEGREES = 360
"""The first dash of a snake has one of this many directions."""

_RIPPLE = 7  # Of 255: the ripples that Lanczos leaves around a shape.
_SCALE = 2  # Dashes and markers are drawn twice as large, then reduced by Lanczos.


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Lengths in pixels of an image of one size.

    Attributes:
      size: side of the image.
      border: rows and columns along each edge where no dash ends.
      margins: free space around a dash; each image uses one of these.
      dash: length of a dash.
      thickness: thickness of a dash.
      marker: radius of the two markers.
      seed_distance: from the beginning of one target snake to that of the other.
      continuity: how straight snakes are; no turn exceeds `pi / 2 / continuity`.
      distractor_dashes: total number of dashes of all distractors.
      target_contrast: contrast of the two target snakes; that of the markers is 1.
      distractor_contrast: contrast of the distractors.
    """

    size: int
    border: int
    margins: tuple[int, ...]
    dash: int
    thickness: float
    marker: float
    seed_distance: int
    continuity: float
    distractor_dashes: int
    target_contrast: float
    distractor_contrast: float


GEOMETRIES = {
    32: Geometry(32, 1, (1,), 2, 0.5, 1.5, 7, 1.0, 20, 1.5, 2.0),
    64: Geometry(64, 1, (1,), 5, 1.0, 2.5, 12, 1.8, 22, 0.8, 0.8),
    128: Geometry(128, 1, (2, 3), 5, 1.5, 3.0, 20, 1.8, 35, 0.9, 0.9),
    256: Geometry(256, 22, (3,), 5, 2.0, 5.0, 27, 1.8, 30, 1.0, 1.0),
}
"""Geometries by side of the image."""


class Level(NamedTuple):
    """Attributes: dashes of a target snake, and of a distractor."""

    target: int
    distractor: int


LEVELS = {
    "short": Level(3, 2),
    "easy": Level(6, 2),
    "intermediate": Level(9, 3),
    "hard": Level(14, 4),
}
"""LRA's results are for `hard`, folder `curv_contour_length_14`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which images are generated.

    Attributes:
      size: side in pixels, a key of `GEOMETRIES`.
      level: a key of `LEVELS`.
      num_distractors: None = LRA's number, 5 (32 and 64), 8 (128) and 7 (256) on the
        hard level.
    """

    size: int = 32
    level: str = "hard"
    num_distractors: int | None = None

    @property
    def geometry(self) -> Geometry:
        """The lengths of this size."""
        return GEOMETRIES[self.size]

    @property
    def distractors(self) -> int:
        """The number of attempted distractors."""
        if self.num_distractors is not None:
            return self.num_distractors
        return self.geometry.distractor_dashes // LEVELS[self.level].distractor


class Tables(NamedTuple):
    """Every possible dash; row i belongs to direction i.

    Directions 0..359 are those of first dashes, which are placed by their beginning.
    Direction 360 + k is that of a dash that ends at the k-th candidate; it is placed by
    its end.

    Attributes:
      dashes: `uint8 [directions, s, s]`, the dash, centred at its place.
      room: `uint8 [directions, r, r]`, the dash and the margin around it, centred at
        the dash's middle.
      limits: `uint8 [directions, r, r]`, the highest occupied value below `room` with
        which the dash still fits.
      reach: `uint8 [directions, q, q]`, `room` dilated by the margin.
      middles: `int32 [directions, 2]`, from the place of a dash to its middle.
      advance: `int32 [directions, 2]`, from a dash's pivot to that of the next.
      candidates: `int32 [candidates, 2]`, from the pivot to where a dash may end.
      turns: `float32 [directions, candidates]`, how likely each candidate is next.
      pivots: `int32 [360, 2]`, from the beginning of a first dash to its pivot.
      heads: `int32 [360, 2]`, from the beginning of a first dash to its end.
      footprints: `int32 [360, cells, 2]`, cells that must be free for a first dash, as
        offsets from its beginning; shorter lists repeat a cell.
      bounds: `int32 [2, 360, 2]`, the least and the greatest of these offsets.
      possible: `bool [360]`, whether a first dash may have this direction: at no place
        in the image do all its cells lie outside.
      marker: `uint8 [m, m]`, a marker, centred at its place.
      pad: rows and columns around an image that offsets may reach.
    """

    dashes: np.ndarray
    room: np.ndarray
    limits: np.ndarray
    reach: np.ndarray
    middles: np.ndarray
    advance: np.ndarray
    candidates: np.ndarray
    turns: np.ndarray
    pivots: np.ndarray
    heads: np.ndarray
    footprints: np.ndarray
    bounds: np.ndarray
    possible: np.ndarray
    marker: np.ndarray
    pad: int


@functools.lru_cache(maxsize=8)
def make_tables(geometry: Geometry, margin: int) -> Tables:
    """Draws the dashes of one size and margin."""
    length = geometry.dash
    first = np.arange(-180, 180) * np.pi / 180
    candidates, next_ = _circle(length + margin)
    angles = np.concatenate([first, next_])
    # A first dash extends forwards from its place, a later one backwards.
    drawn = np.concatenate([first, next_ + np.pi])
    dashes, room = _draw_dashes(geometry, margin, drawn)
    heads = _rounded_up(first, length)
    footprints = _footprints(room[:DEGREES], length + margin)
    bounds = np.stack([footprints.min(axis=1), footprints.max(axis=1)])
    middles = _rounded_up(drawn, length) // 2
    room = _crop(room, middles)
    half = dashes.shape[1] // 2
    return Tables(
        dashes=dashes,
        room=room,
        limits=_limits(room),
        reach=_dilate(np.pad(room, ((0, 0), *((margin, margin),) * 2)), margin),
        middles=middles,
        advance=_rounded_up(angles, length + 2 * margin),
        candidates=candidates,
        turns=_turns(angles, next_, geometry.continuity),
        pivots=heads + _rounded_up(first + np.pi, length + margin),
        heads=heads,
        footprints=footprints,
        bounds=bounds,
        possible=((bounds[0] <= 0) & (bounds[1] >= 0)).all(axis=1),
        marker=_draw_marker(geometry.marker),
        # A pivot lies up to a margin beyond the last dash, candidates beyond that.
        pad=max(half, length + 2 * margin + 3) + margin + math.ceil(geometry.marker),
    )


def disk(radius: int) -> np.ndarray:
    """The offsets of the cells of a disk, `int [n, 2]`."""
    rows, columns = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(rows**2 + columns**2 <= radius**2) - radius


def _dilate(images: np.ndarray, radius: int) -> np.ndarray:
    """The maximum within a disk, `[n, h, w]`; values outside the image do not count."""
    padded = np.pad(images, ((0, 0), (radius, radius), (radius, radius)))
    height, width = images.shape[1:]
    out = np.zeros_like(images)
    for row, column in disk(radius) + radius:
        np.maximum(out, padded[:, row : row + height, column : column + width], out=out)
    return out


def _rounded_up(angles: np.ndarray, length: int) -> np.ndarray:
    """The offset of a step in whole pixels, `int32 [n, 2]`, rounded as originally."""
    exact = length * np.stack([np.sin(angles), np.cos(angles)], axis=1)
    return np.ceil(exact.round(9)).astype(np.int32)


def _circle(radius: int) -> tuple[np.ndarray, np.ndarray]:
    """The cells on a circle, `int32 [n, 2]`, and their angles."""
    angles = np.arange(0, 360, 180 / (radius * np.pi)) * np.pi / 180
    exact = radius * np.stack([np.sin(angles), np.cos(angles)], axis=1)
    cells = np.unique(np.floor(exact.round(9)).astype(np.int32), axis=0)
    return cells, np.arctan2(cells[:, 0], cells[:, 1])


def _turns(angles: np.ndarray, next_: np.ndarray, continuity: float) -> np.ndarray:
    difference = np.abs(angles[:, None] - next_[None, :])
    turn = np.minimum(difference, 2 * np.pi - difference)
    return (np.cos(np.minimum(turn * continuity, np.pi / 2)) ** 2).astype(np.float32)


def _draw_dashes(
    geometry: Geometry, margin: int, angles: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    half = geometry.dash + math.ceil(geometry.thickness) + margin
    large, middle = 2 * half * _SCALE + 1, half * _SCALE
    images = np.zeros((len(angles), large, large), np.uint8)
    for i, (row, column) in enumerate(_rounded_up(angles, geometry.dash * _SCALE)):
        image = Image.new("L", (large, large))
        ImageDraw.Draw(image).line(
            [(middle, middle), (middle + int(column), middle + int(row))],
            fill=255,
            width=round(geometry.thickness * _SCALE),
        )
        images[i] = np.asarray(image)
    dilated = _dilate(images, margin * _SCALE)
    return _reduce(images, 2 * half + 1), _reduce(dilated, 2 * half + 1)


def _draw_marker(radius: float) -> np.ndarray:
    # The marker's place is a pixel of the large image, just before its middle.
    half = math.ceil(radius) + 3
    large = np.arange(-half * _SCALE, (half + 1) * _SCALE)
    inside = large[:, None] ** 2 + large[None, :] ** 2 <= (radius * _SCALE) ** 2
    return _reduce(255 * inside[None].astype(np.uint8), 2 * half + 1)[0]


def _reduce(images: np.ndarray, side: int) -> np.ndarray:
    lanczos = Image.Resampling.LANCZOS
    reduced = [Image.fromarray(i).resize((side, side), lanczos) for i in images]
    return np.stack([np.asarray(image) for image in reduced])


def _crop(images: np.ndarray, middles: np.ndarray) -> np.ndarray:
    """The smallest squares around the centres that contain all but Lanczos' ripples."""
    images = np.where(images > _RIPPLE, images, 0)
    which, *cells = np.nonzero(images)
    cells = np.stack(cells, axis=1) - images.shape[1] // 2
    half = int(np.abs(cells - middles[which]).max())
    cropped = np.zeros((len(images), 2 * half + 1, 2 * half + 1), np.uint8)
    moved = cells - middles[which] + half
    cropped[which, moved[:, 0], moved[:, 1]] = images[images > 0]
    return cropped


def _limits(room: np.ndarray) -> np.ndarray:
    """A dash fits if occupied space and its room sum to less than 1.8 times 255."""
    return np.minimum(458 - room.astype(np.int32), 255).astype(np.uint8)


def _footprints(room: np.ndarray, radius: int) -> np.ndarray:
    """Cells that a first dash covers completely.

    As in the original, they extend one row and one column beyond the dash itself, and
    end at `radius`.
    """
    half = room.shape[1] // 2
    cells = [np.argwhere(image == 255) - half + 1 for image in room]
    cells = [c[(np.abs(c) <= radius).all(axis=1)] for c in cells]
    most = max(map(len, cells))
    filled = [np.pad(c, ((0, most - len(c)), (0, 0)), mode="edge") for c in cells]
    return np.stack(filled).astype(np.int32)
