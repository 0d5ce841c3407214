"""Pathfinder: does one dashed path join the two circles? 32 to 256 pixels a side.

Generated with a seed, or read from the released folders:

    dataset = prepare(data_dir, size=32, level="hard", seed=0)
    dataset = prepare(data_dir, size=32, path="lra_release")

Pixels are `uint8`, row by row, black 0. LRA's results are on the level `hard`; it calls
the images of 128 pixels Path-X.

Splits of generated images follow one another, 80 / 10 / 10 by default. The released
images are shuffled with the seed first, then cut likewise: LRA cuts the order in which
tfds once happened to store them, and the PyTorch code bases shuffle each in its own
way, so that the published test sets differ from one another, too.
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from lra_jax.data import builder, pathfinder_files, pathfinder_images
from lra_jax.data.checks import check_integer
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.pathfinder_shapes import GEOMETRIES, LEVELS, Settings

__all__ = ["GEOMETRIES", "LEVELS", "Settings", "prepare"]

_NUM_CLASSES = 2
_LEAST_FILES = 10


@dataclasses.dataclass(eq=False, kw_only=True)
class GeneratedConfig(builder.SequenceConfig):
    """Settings of generated images."""

    settings: Settings
    seed: int
    sizes: dict[str, int]
    processes: int | None


@dataclasses.dataclass(eq=False, kw_only=True)
class FilesConfig(builder.SequenceConfig):
    """Settings of images from the released folders."""

    folder: pathlib.Path
    size: int
    seed: int


class GeneratedPathfinder(builder.SequenceBuilder):
    """Pathfinder images drawn from a seed."""

    name = "lra_pathfinder"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}
    VOCAB_SIZE = 256
    NUM_CLASSES = _NUM_CLASSES
    DESCRIPTION = "Pathfinder of the Long-Range Arena, generated."

    def examples(self, dl_manager):
        """See the base class."""
        del dl_manager
        config: GeneratedConfig = self.builder_config
        images = _images(config)
        return {split: (count, images) for split, count in config.sizes.items()}


class PathfinderFiles(builder.SequenceBuilder):
    """Pathfinder images from the released folders."""

    name = "lra_pathfinder_files"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}
    VOCAB_SIZE = 256
    NUM_CLASSES = _NUM_CLASSES
    DESCRIPTION = "Pathfinder of the Long-Range Arena, from its files."

    def examples(self, dl_manager):
        """See the base class."""
        del dl_manager
        config: FilesConfig = self.builder_config
        samples = pathfinder_files.list_samples(config.folder)
        if len(samples) < _LEAST_FILES:
            raise ValueError(
                f"{config.folder} holds {len(samples)} images, too few for three "
                f"splits; expected {_LEAST_FILES} at least."
            )
        order = np.random.default_rng(config.seed).permutation(len(samples))
        tenth = len(samples) // 10
        cuts = np.split(order, [len(samples) - 2 * tenth, len(samples) - tenth])
        return {
            split: (
                len(ids),
                pathfinder_files.read((samples[i] for i in ids), config.size),
            )
            for split, ids in zip(("train", "valid", "test"), cuts, strict=True)
        }


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    size: int = 32,
    level: str = "hard",
    seed: int = 0,
    num_train: int = 160_000,
    num_valid: int = 20_000,
    num_test: int = 20_000,
    num_distractors: int | None = None,
    processes: int | None = None,
    path: str | os.PathLike | None = None,
) -> SequenceDataset:
    """Opens Pathfinder, preparing it first where that was not done before.

    Args:
      data_dir: where prepared data live; None is tfds' own folder.
      size: side of the images: 32, 64, 128 (Path-X) or 256.
      level: easy, intermediate or hard: snakes of 6, 9 or 14 dashes.
      seed: fixes every image; with `path`, the order that is cut into splits.
      num_train: training images.
      num_valid: validation images.
      num_test: test images.
      num_distractors: None is what LRA's settings say; for 128 pixels 8, where others
        take 17 (issue 38 of its repository).
      processes: worker processes; None takes what the machine has. The images do not
        depend on it.
      path: a level's folder of the released images, or one above it. The files then
        decide; of the settings above `size`, `level`, `seed` and `data_dir` are used.

    Returns:
      Splits `train`, `valid` and `test` of `tokens`, `uint8 [size * size]`, and
      `label`, 1 where one path joins the circles.

    Raises:
      ValueError: a setting is wrong, or a file is missing or malformed.
      OSError: `data_dir` cannot be written, or its disk is full.
    """
    settings = Settings(size, level, num_distractors)
    check_integer("seed", seed, 0)
    if path is not None:
        config = _files_config(path, settings, seed)
        return builder.prepare(PathfinderFiles, config, data_dir)
    sizes = {"train": num_train, "valid": num_valid, "test": num_test}
    for split, count in sizes.items():
        check_integer(f"num_{split}", count, 1)
    if processes is not None:
        check_integer("processes", processes, 1)
    config = _generated_config(settings, seed, sizes, processes)
    return builder.prepare(GeneratedPathfinder, config, data_dir)


def _generated_config(settings, seed, sizes, processes) -> GeneratedConfig:
    counts = "-".join(str(count) for count in sizes.values())
    distractors = settings.distractors
    return GeneratedConfig(
        name=(
            f"size{settings.size}-{settings.level}-distractors{distractors}"
            f"-seed{seed}-{counts}"
        ),
        max_length=settings.size**2,
        expected_bytes=(settings.size**2 + 40) * sum(sizes.values()),
        image_shape=(settings.size, settings.size),
        settings=settings,
        seed=seed,
        sizes=sizes,
        processes=processes,
    )


def _files_config(path, settings, seed) -> FilesConfig:
    folder = pathfinder_files.find(path, settings.size, settings.level)
    files = pathfinder_files.metadata_files(folder)
    stats = [file.stat() for file in files]
    identity = [
        (str(f.resolve()), s.st_size, s.st_mtime_ns)
        for f, s in zip(files, stats, strict=True)
    ]
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    # A line of metadata takes about 60 bytes.
    count = sum(s.st_size for s in stats) // 50 + 1
    return FilesConfig(
        name=f"{digest}-size{settings.size}-seed{seed}",
        max_length=settings.size**2,
        expected_bytes=(settings.size**2 + 40) * count,
        image_shape=(settings.size, settings.size),
        folder=folder,
        size=settings.size,
        seed=seed,
    )


def _images(config: GeneratedConfig) -> Iterator[tuple[np.ndarray, int]]:
    batches = pathfinder_images.iterate(
        config.settings, config.seed, sum(config.sizes.values()), config.processes
    )
    for batch in batches:
        pixels = batch.pixels.reshape(len(batch.labels), -1)
        yield from zip(pixels, batch.labels.tolist(), strict=True)
