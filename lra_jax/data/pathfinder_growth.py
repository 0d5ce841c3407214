"""How Pathfinder's snakes grow: the occupied space of many images, and its dashes.

A dash's pivot lies a margin before its beginning. The next pivot is one dash and two
margins further in the same direction; the next dash ends on the circle of radius
`dash + margin` around it and begins a margin away from it. Its end is sampled among the
pixels of that circle with weight

    free * cos(min(continuity * |turn|, pi / 2)) ** 2,

`free` being one minus the occupied share of the pixel's surroundings. A dash that would
touch occupied space is resampled, twice at most; then the snake has failed.

As in the original (drewlinsley/pathfinder), a snake's newest dash is not yet occupied
space, since its successor begins within its margin. Also as there, no place at all is
found for a first dash that could lie entirely outside the image, which is possible only
with small margins: on 32 and 64 pixels snakes begin in few directions, and a distractor
often does not begin. We keep this: without it an image has 40 % more ink than LRA's.
"""

import numpy as np

from lra_jax.data.pathfinder_shapes import DEGREES, Geometry, Tables

_DASH_TRIALS = 3
_PLACES_DRAWN = 24
_FREE = 76  # Of 255: the original treats an occupied share of up to 0.3 as free.
_LEAST_WEIGHT = 1e-4 * 255


class Snakes:
    """One snake in every image of a batch.

    Attributes:
      pivots: `int32 [n, 2]`, the pivot of the newest dash.
      places: `int32 [n, dashes, 2]`, where each dash is placed.
      kinds: `int32 [n, dashes]`, each dash's row in the tables.
    """

    def __init__(self, count: int, dashes: int):
        self.pivots = np.zeros((count, 2), np.int32)
        self.places = np.zeros((count, dashes, 2), np.int32)
        self.kinds = np.zeros((count, dashes), np.int32)

    @property
    def dashes(self) -> int:
        """Number of dashes in a complete snake."""
        return self.kinds.shape[1]

    def add(self, ids, dash, places, kinds, pivots) -> None:
        """Records one dash in some images."""
        self.places[ids, dash] = places
        self.kinds[ids, dash] = kinds
        self.pivots[ids] = pivots

    def copy_rows(self, source: "Snakes", ids: np.ndarray, rows: np.ndarray) -> None:
        """Copies rows from another batch."""
        self.places[ids] = source.places[rows]
        self.kinds[ids] = source.kinds[rows]


class Patches:
    """Square windows of canvases, addressed by their centres.

    Args:
      canvases: `uint8 [n, rows, columns]`.
      side: an odd number of pixels.
    """

    def __init__(self, canvases: np.ndarray, side: int):
        self._half = side // 2
        self._view = np.lib.stride_tricks.sliding_window_view(
            canvases, (side, side), axis=(1, 2), writeable=True
        )

    def read(self, ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        """A copy of the windows, `[ids, side, side]`."""
        corner = places - self._half
        return self._view[ids, corner[:, 0], corner[:, 1]]

    def raise_to(self, ids: np.ndarray, places: np.ndarray, patches: np.ndarray):
        """Takes the maximum of windows and patches; no id may repeat."""
        corner = places - self._half
        key = ids, corner[:, 0], corner[:, 1]
        self._view[key] = np.maximum(self._view[key], patches)


class Field:
    """The occupied space of a batch of images, kept up to date dash by dash.

    Canvases extend `tables.pad` cells beyond the image. These are free in `occupied`,
    so that a dash may stick out, and full in `near`, the dilation of `occupied` by the
    margin, so that no dash ends there. Places are in canvas coordinates.

    Args:
      geometry: the lengths.
      tables: the tables computed from them, for one margin.
      rng: source of all random choices.
      count: number of images.
    """

    def __init__(
        self,
        geometry: Geometry,
        tables: Tables,
        rng: np.random.Generator,
        count: int,
    ):
        self._geometry, self._tables, self._rng = geometry, tables, rng
        self._bare, self._bare_near = _bare_canvases(geometry, tables)
        self._occupied = np.repeat(self._bare[None], count, axis=0)
        self._near = np.repeat(self._bare_near[None], count, axis=0)
        self._occupied_patches = Patches(self._occupied, tables.room.shape[1])
        self._near_patches = Patches(self._near, tables.reach.shape[1])

    def clear(self, ids: np.ndarray) -> None:
        """Clears all space in some images."""
        self._occupied[ids] = self._bare
        self._near[ids] = self._bare_near

    def save(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A copy of some images' space."""
        return self._occupied[ids], self._near[ids]

    def restore(
        self, ids: np.ndarray, saved: tuple[np.ndarray, np.ndarray], rows: np.ndarray
    ) -> None:
        """Restores rows of such a copy, from this or an equal field, to some images."""
        self._occupied[ids], self._near[ids] = saved[0][rows], saved[1][rows]

    def occupy(self, snakes: Snakes, ids: np.ndarray, dash: int | np.ndarray) -> None:
        """Occupies the space of one dash of each snake."""
        kinds = snakes.kinds[ids, dash]
        middles = snakes.places[ids, dash] + self._tables.middles[kinds]
        self._occupied_patches.raise_to(ids, middles, self._tables.room[kinds])
        self._near_patches.raise_to(ids, middles, self._tables.reach[kinds])

    def begin_pair(self, one: Snakes, two: Snakes, ids: np.ndarray) -> np.ndarray:
        """Begins the two target snakes; returns the images in which both have room.

        The first is placed anywhere in the middle, the second at the seed distance from
        it in any direction.
        """
        tables, distance = self._tables, self._geometry.seed_distance
        possible = np.flatnonzero(tables.possible)
        kinds = possible[self._rng.integers(len(possible), size=len(ids))]
        # The free middle is a rectangle, and so are the possible places in it.
        least = 2 * distance - tables.bounds[0][kinds]
        beyond = self._geometry.size - 2 * distance - tables.bounds[1][kinds]
        room = beyond - least
        drawn = self._rng.random((len(ids), 2))
        places = (least + drawn * np.maximum(room, 0)).astype(np.int32)
        self._begin(one, ids, places, kinds)
        angles = self._rng.integers(360, size=len(ids)) * np.pi / 180
        away = distance * np.stack([np.sin(angles), np.cos(angles)], axis=1)
        places = places + np.rint(away).astype(np.int32)
        kinds = self._rng.integers(DEGREES, size=len(ids))
        self._begin(two, ids, places, kinds)
        return ids[(room > 0).all(axis=1) & self._inside(places, kinds)]

    def begin_anywhere(self, snakes: Snakes, ids: np.ndarray) -> np.ndarray:
        """Begins snakes at free places, uniformly; returns the images that had one.

        Some places are sampled. If none of them is free, all places are checked, and
        one of the free ones is sampled.
        """
        kinds = self._rng.integers(DEGREES, size=len(ids))
        size = self._geometry.size
        places = self._rng.integers(size, size=(len(ids), _PLACES_DRAWN, 2))
        free = self._free(ids, places, kinds)
        places = places[np.arange(len(ids)), free.argmax(axis=1)]
        has_room = np.asarray(free.any(axis=1))
        everywhere = np.stack(np.divmod(np.arange(size * size), size), axis=1)
        possible = self._tables.possible[kinds]
        for row in np.flatnonzero(possible & ~has_room):
            free = self._free(ids[[row]], everywhere[None], kinds[[row]])
            choices = np.flatnonzero(free[0])
            if choices.size:
                places[row] = everywhere[self._rng.choice(choices)]
                has_room[row] = True
        has_room &= possible & self._inside(places, kinds)
        self._begin(snakes, ids[has_room], places[has_room], kinds[has_room])
        return ids[has_room]

    def extend(self, snakes: Snakes, ids: np.ndarray, dash: np.ndarray) -> np.ndarray:
        """Adds a dash to snakes; returns the rows of `ids` that had room for one.

        Args:
          snakes: some have `dash` dashes.
          ids: their images.
          dash: `int [ids]`, the index of the new dash.
        """
        tables = self._tables
        before = snakes.kinds[ids, dash - 1]
        pivots = snakes.pivots[ids] + tables.advance[before]
        free = 255 - self._near_at_candidates(ids, pivots)
        summed = np.cumsum(free * tables.turns[before], axis=1)
        total = summed[:, -1]
        waiting = np.flatnonzero(total >= _LEAST_WEIGHT)
        placed = [waiting[:0]]
        for _ in range(_DASH_TRIALS):
            if not waiting.size:
                break
            drawn = self._rng.random(len(waiting), np.float32) * total[waiting]
            choice = (summed[waiting] <= drawn[:, None]).sum(axis=1)
            # Rounding may yield the whole sum: then the last one is taken.
            choice = np.minimum(choice, len(tables.candidates) - 1)
            places, kinds = (
                pivots[waiting] + tables.candidates[choice],
                DEGREES + choice,
            )
            middles = places + tables.middles[kinds]
            there = self._occupied_patches.read(ids[waiting], middles)
            fits = (there <= tables.limits[kinds]).reshape(len(there), -1).all(axis=1)
            rows, waiting = waiting[fits], waiting[~fits]
            snakes.add(ids[rows], dash[rows], places[fits], kinds[fits], pivots[rows])
            placed.append(rows)
        rows = np.sort(np.concatenate(placed))
        self.occupy(snakes, ids[rows], dash[rows] - 1)
        return rows

    def _near_at_candidates(self, ids: np.ndarray, pivots: np.ndarray) -> np.ndarray:
        """How full the space is where a dash may end, `uint8 [ids, candidates]`."""
        side = self._near.shape[1]
        offsets = self._tables.candidates @ np.array([side, 1])
        middles = (ids * side + pivots[:, 0]) * side + pivots[:, 1]
        return self._near.reshape(-1).take(middles[:, None] + offsets)

    def _begin(self, snakes, ids, places, kinds) -> None:
        """Records first dashes; here places are in image coordinates."""
        places = places + self._tables.pad
        snakes.add(ids, 0, places, kinds, places + self._tables.pivots[kinds])

    def _free(self, ids, places, kinds) -> np.ndarray:
        """Whether first dashes have room, `[n, places]`."""
        cells = places[:, :, None] + self._tables.footprints[kinds][:, None]
        cells += self._tables.pad
        there = self._occupied[ids[:, None, None], cells[..., 0], cells[..., 1]]
        return np.asarray((there <= _FREE).all(axis=2))

    def _inside(self, places, kinds) -> np.ndarray:
        """Whether ends and pivots of first dashes lie in the image."""
        size = self._geometry.size
        ends, pivots = (
            places + offsets[kinds]
            for offsets in (self._tables.heads, self._tables.pivots)
        )
        inside = [((p >= 0) & (p < size)).all(axis=1) for p in (ends, pivots)]
        return inside[0] & inside[1]


def _bare_canvases(geometry: Geometry, tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """`occupied` and `near` of an image that is empty except for its border."""
    pad, border = tables.pad, geometry.border
    margin = (tables.reach.shape[1] - tables.room.shape[1]) // 2
    side = geometry.size + 2 * pad
    occupied, near = np.full((2, side, side), 255, np.uint8)
    inner = slice(pad + border, side - pad - border)
    occupied[inner, inner] = 0
    for edge in (slice(0, pad), slice(side - pad, side)):
        occupied[edge] = occupied[:, edge] = 0
    inner = slice(pad + border + margin, side - pad - border - margin)
    near[inner, inner] = 0
    return occupied, near
