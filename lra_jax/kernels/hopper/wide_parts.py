"""The parts of the Hopper kernels for heads of more than 64 columns.

Arrays are cut into *panels* of 64 columns. A panel of features is one more term of a
weight, and each pair of a term and a panel of values has its own state of 64 x 64. The
state of a whole head would not fit one warpgroup's registers, so a program owns one
panel of its result and only the states that this panel needs.

Tiles in shared memory are replaced by their features, or by whatever else a product
needs, so that they take no more room than the copies; cosFormer's sines go elsewhere.

A program forms its result for *rows*, from *columns* and the *summands* that the state
collects with them. In a forward walk these are queries, keys and values; in a mirrored
one, from the last chunk to the first, keys, queries and the output's gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.ops import TILE
from lra_jax.kernels.hopper.parts import LinearProgram, Terms

# Arrays or references by name, and lists of tiles in shared memory.
Named = dict[str, Any]
Tiles = dict[str, list[Any]]
_FIXED = ("scale", "states", "totals", "out", "den")


@dataclass(frozen=True, kw_only=True)
class WideProgram(LinearProgram):
    """A program that owns one panel of the result; ``backward`` is a mirrored walk.

    Attributes:
      feature_panels: panels of query and key.
      value_panels: panels of the values.
    """

    feature_panels: int
    value_panels: int

    @property
    def row_array(self) -> str:
        """The array whose positions are rows."""
        return "key" if self.backward else "query"

    @property
    def column_array(self) -> str:
        """The array whose positions are columns."""
        return "query" if self.backward else "key"

    @property
    def summand_array(self) -> str:
        """The array at the columns' positions that the state collects."""
        return "of_out" if self.backward else "value"

    @property
    def factor_array(self) -> str:
        """The array at the rows' positions that pairs with the summands."""
        return "value" if self.backward else "of_out"

    @property
    def terms(self) -> range:
        """The indices of all panels' terms, those of one panel side by side."""
        return range(self.feature_panels * self.spec.terms)

    @property
    def panel(self) -> Any:
        """The program's own panel."""
        return lax.axis_index("p")

    def result(self, panels: int) -> jax.ShapeDtypeStruct:
        """An array `[B, T, N, 64 P]` of several panels."""
        batch, heads, length = self.shape
        shape = (batch, length, heads, panels * TILE)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def states(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """State and total of each segment; the latter is the same for every panel."""
        axes = (*self.shape[:2], self.segments, self.value_panels, len(self.terms))
        return (
            jax.ShapeDtypeStruct((*axes, TILE, TILE), jnp.float32),
            jax.ShapeDtypeStruct((*axes, TILE), jnp.float32),
        )

    def needed(self, arrays: Named, *names: str) -> Named:
        """The named arrays, with the mask of keys and the lines of gradients."""
        masked = {"key", "value"} & set(names) and "mask" in arrays
        names = (*names, "mask") if masked else names
        names = (*names, "inverse") if "of_out" in names else names
        return {name: arrays[name] for name in names}

    def launch(
        self,
        kernel: Callable[["WideProgram", Named, Tiles], None],
        arrays: Named,
        outputs: dict[str, jax.ShapeDtypeStruct],
        stages: tuple[Mapping[str, int], Mapping[str, int]],
        panels: int,
    ) -> list[jax.Array]:
        """Runs ``kernel(program, refs, stages)`` for every panel.

        Args:
          kernel: gets arrays and outputs by their names, and the stages.
          arrays: the inputs.
          outputs: their shapes.
          stages: the number of tiles and of vectors in shared memory, by name.
          panels: programs for a segment of a head.
        """
        tiles, vectors = stages

        def named(*refs: Any) -> None:
            rest = iter(refs)
            given = {name: next(rest) for name in (*arrays, *outputs)}
            counts = {**tiles, **vectors}
            own = {name: [next(rest) for _ in range(n)] for name, n in counts.items()}
            kernel(self, given, own)

        scratch = [self.tile_memory() for _ in range(sum(tiles.values()))]
        scratch += [self.vector_memory() for _ in range(sum(vectors.values()))]
        return self.run(
            named, list(arrays.values()), list(outputs.values()), scratch, (panels,)
        )

    def walk_panels(
        self,
        body: Callable[..., Any],
        refs: Named,
        panels: Mapping[str, Any],
        carry: Any,
    ) -> Any:
        """Like `walk`; each name's tiles are a list.

        Of the arrays in ``panels`` it holds only that panel, of others all of them.
        Outputs and what is read once do not take part.
        """
        refs = {name: ref for name, ref in refs.items() if name not in _FIXED}
        places = {
            (name, at): panels.get(name, at)
            for name, ref in refs.items()
            for at in range(_panels(ref) if name not in panels else 1)
        }
        inputs = [(f"{name} {at}", refs[name]) for name, at in places]

        def step(first: Any, tiles: Named, carry: Any) -> Any:
            grouped: Tiles = {name: [] for name in refs}
            for name, at in places:
                grouped[name].append(tiles[f"{name} {at}"])
            return body(first, grouped, carry)

        by_label = {f"{name} {at}": panel for (name, at), panel in places.items()}
        return self.walk(step, inputs, carry, by_label)

    def start(self, given: Named, stages: Tiles, places: list[tuple[Any, Any]]) -> list:
        """The states at (panel of values, term), if they change; others are staged."""
        at = self._origin
        found = (self.ops.stored_tile(given["states"].at[*at, *x]) for x in places)
        if self.spec.is_causal:
            return list(found)
        # One after the other, because registers would not hold all of them.
        self.stage(stages["state"], found)
        plgpu.commit_smem()
        return []

    @property
    def _origin(self) -> tuple[Any, Any, Any]:
        """Where the sums before the program are; there is only one if not causal."""
        batch, head, segment = self.here()
        return batch, head, segment if self.spec.is_causal else 0

    def start_totals(self, given: Named, stages: Tiles, first: Any) -> None:
        """Stages the totals of the terms from the first one on."""
        at = (*self._origin, 0)
        for term, stage in enumerate(stages["total"]):
            stage[...] = self.ops.by_column(given["totals"].at[*at, first + term])
        plgpu.commit_smem()

    def valid(self, tiles: Tiles) -> jax.Array | None:
        """Which keys are real, a row vector; None = all."""
        return self.ops.by_row(tiles["mask"][0]) if "mask" in tiles else None

    def put_features(
        self, name: str, tiles: Tiles, weights: Terms | None, sines: list[Any]
    ) -> Iterator[tuple[list[Any], Terms]]:
        """Replaces each of the array's tiles by its features; `commit_smem` follows.

        Yields the places of a panel's terms, the tile and, with angles, one of
        ``sines``, and the terms.
        """
        valid = self.valid(tiles) if name == "key" else None
        for at, tile in enumerate(tiles[name]):
            places = [tile, *sines[at : at + 1]]
            terms, _ = self.features(tile, weights, valid)
            self.stage(places, terms)
            yield places, terms

    def put_values(self, name: str, tiles: Tiles) -> None:
        """Makes the array's tiles ready for products; `commit_smem` follows.

        Gradients of outputs become those of numerators, and hidden values zero.
        """
        valid, down = self.valid(tiles), self.ops.down
        for tile in tiles[name]:
            if name == "of_out":
                inverse = down(self.ops.by_row(tiles["inverse"][0]))
                x = self.ops.tile(tile).astype(jnp.float32) * inverse
                tile[...] = x.astype(self.dtype)
            elif valid is not None:
                x = self.ops.tile(tile)
                tile[...] = jnp.where(down(valid) > 0, x, jnp.zeros((), x.dtype))


def _panels(ref: Any) -> int:
    return ref.shape[3] // TILE if len(ref.shape) == 4 else 1
