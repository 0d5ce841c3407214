"""Trees of arrays in safetensors files: parameters, and the states of streams.

The format is simple (names, dtypes, shapes and bytes), runs no code when read, and is
supported by other libraries.
"""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError, safe_open
from safetensors.flax import save

from lra_jax import files
from lra_jax.errors import a_thing, expected
from lra_jax.files import check_regular

# The dtypes that `read_arrays` can read.
_DTYPES = {
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
}


def save_arrays(file: str | os.PathLike[str], tree: Any) -> None:
    """Writes the arrays of a tree, each named by its path, as in ``sums.total``.

    Readers see either the whole file or none of it.

    Args:
      file: an existing file is replaced.
      tree: a tree of arrays, such as a stream's state.

    Raises:
      ValueError: two arrays have the same name, a leaf is not an array of numbers, or
        one has a dtype that jax would narrow, as float64 without ``jax_enable_x64``, or
        that such a file cannot hold, as float8.

    Examples:
      >>> import tempfile
      >>> from lra_jax.attention import linear_init
      >>> state = linear_init(batch_size=1, num_heads=2, head_dim=8)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_arrays(f"{folder}/state.safetensors", state)
      ...     again = load_arrays(f"{folder}/state.safetensors", like=state)
      >>> again
      LinearState(sums=Sums(summary=float32[1, 2, 8, 8], total=float32[1, 2, 8]), ...)
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = _names(leaves)
    pairs = zip(names, leaves, strict=True)
    arrays = {name: _as_array(name, leaf) for name, (_, leaf) in pairs}
    content = save(arrays, metadata={"kinds": _kinds(tree)})
    with files.replacing(Path(file)) as partial:
        partial.write_bytes(content)


def load_arrays(file: str | os.PathLike[str], like: Any) -> Any:
    """Reads a file written by `save_arrays` into a tree of the same structure.

    Args:
      file: the file.
      like: a tree of arrays or of ``jax.ShapeDtypeStruct``; its values are not read.

    Raises:
      ValueError: not such a file, or an array is missing, left over, or has another
        shape or dtype, which includes 64 bits that jax would not keep; or it holds the
        states of other mechanisms.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    arrays = read_arrays(file)
    with safe_open(file, framework="np") as content:
        kinds = (content.metadata() or {}).get("kinds", _kinds(like))
        stored = {x: content.get_slice(x).get_dtype() for x in arrays}  # As in F32.
    if kinds != _kinds(like):
        raise expected(str(file), _kinds(like) or "no states", kinds or "others")
    names = _names(leaves)
    left = sorted(arrays.keys() - set(names))
    if left:
        needed = f"the arrays {', '.join(names)}"
        raise expected(str(file), needed, f"{left[0]} as well")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        # A number is not an array, but `save_arrays` takes it as one.
        like_leaf = leaf if hasattr(leaf, "dtype") else _as_array(name, leaf)
        needed = f"{name} of {like_leaf.dtype}{list(like_leaf.shape)}"
        if name not in arrays:
            raise expected(str(file), needed, "none")
        array = arrays[name]
        if stored[name].endswith("64") and array.dtype.itemsize < 8:
            raise expected(str(file), needed, f"{stored[name]}; set jax_enable_x64")
        if (array.shape, array.dtype) != (tuple(like_leaf.shape), like_leaf.dtype):
            raise expected(str(file), needed, f"{array.dtype}{list(array.shape)}")
    return jax.tree.unflatten(structure, [arrays[name] for name in names])


def read_arrays(file: str | os.PathLike[str]) -> dict[str, jax.Array]:
    """The arrays of a safetensors file by name.

    Raises:
      ValueError: not such a file, or one with a dtype that numpy lacks, as float8.
    """
    try:
        check_regular(file)
        with safe_open(file, framework="flax") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise expected(str(file), "a safetensors file", error) from error
    except AttributeError as error:  # numpy has no such dtype.
        raise expected(str(file), "arrays of dtypes that numpy has", error) from error


def _kinds(tree: Any) -> str:
    """The classes of the states in a tree: shapes alone do not tell them apart."""
    states = re.findall(r"namedtuple\[(\w+)\]", str(jax.tree.structure(tree)))
    return ", ".join(states)


def _names(leaves: list[tuple[Any, Any]]) -> list[str]:
    """The name of each array, from its path; all differ."""
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves
    ]
    for one, other in itertools.pairwise(sorted(names)):
        if one == other:
            raise expected("tree", "another name for each array", f"two of {one!r}")
    return names


def _as_array(name: str, leaf: Any) -> jax.Array:
    """The leaf as an array of the same dtype."""
    try:
        array = jax.numpy.asarray(leaf)
    except (TypeError, ValueError) as error:
        dtype = f" of {leaf.dtype}" if hasattr(leaf, "dtype") else ""
        raise expected("tree", "arrays", f"{name}, {a_thing(leaf)}{dtype}") from error
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        got = f"{name} of {array.dtype}: save its jax.random.key_data"
        raise expected("tree", "arrays of numbers", got)
    if array.dtype.name not in _DTYPES:
        raise expected("tree", "arrays of other dtypes", f"{name} of {array.dtype}")
    dtype = getattr(leaf, "dtype", array.dtype)
    if array.dtype != dtype:
        raise expected(name, "a dtype that jax holds, or jax_enable_x64", dtype)
    return array
