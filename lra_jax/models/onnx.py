"""Models as ONNX graphs, for runtimes without jax.

    export_onnx("model.onnx", load("runs/listops-cosformer-compact-seed0"), length=512)

The model is traced by jax, and each primitive becomes operators of ONNX's opset 18. All
primitives of full (not causal) softmax, linear, cosFormer, Flow and Linformer models in
float32 are supported, except those of moving averages (``ema``), product-key memories
and several ``readings``; others raise an error. Shapes are fixed: pad shorter sequences
and pass their lengths. It needs the package ``onnx``: ``pip install 'lra-jax[onnx]'``.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend import core

from lra_jax import files
from lra_jax.attention.inputs import check_size
from lra_jax.errors import expected, writable
from lra_jax.models.attention import MultiHeadAttention
from lra_jax.models.options import named
from lra_jax.models.saved import Saved

_OPSET = 18
_IR_VERSION = 10


def export_onnx(
    file: str | os.PathLike[str], model: Any, *, batch_size: int = 1, length: int
) -> None:
    """Writes the inference graph of a classifier.

    Its inputs are int32: ``tokens`` `[B, T]` and ``lengths`` `[B]`, or for a model of
    pairs ``tokens_1``, ``lengths_1``, ``tokens_2``, ``lengths_2``. Its output is
    ``logits``.

    Args:
      file: the file to write.
      model: a classifier of this package, or a model returned by `load`.
      batch_size: B.
      length: T, at most the model's longest sequence. With ``padding="zeros"``, where
        the result depends on it, one to which the model's training padded.

    Raises:
      ValueError: another kind of model, one with an unsupported computation, or a size
        that does not fit.
    """
    import onnx

    saved = model if isinstance(model, Saved) else None
    model = model if saved is None else saved.model
    names = getattr(model, "INPUTS", ())
    if not names or "positions" in names:
        wanted = "a classifier of whole sequences or of pairs"
        raise expected("model", wanted, type(model).__name__)
    check_size("batch_size", batch_size)
    _check_length(length, model, saved)
    shapes = {
        name: (batch_size, length) if name.startswith("tokens") else (batch_size,)
        for name in names
    }
    graphdef, state = nnx.split(model)

    def run(state: nnx.State, *inputs: jax.Array) -> jax.Array:
        module: Any = nnx.merge(graphdef, state)
        _make_plain(module)
        return module(*inputs)

    given = [jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes.values()]
    closed = jax.make_jaxpr(run)(state, *given)
    paths = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    graph = _Graph()
    parameters = [
        graph.initializer(
            np.asarray(leaf), jax.tree_util.keystr(path, simple=True, separator=".")
        )
        for path, leaf in paths
    ]
    (logits,) = graph.inline(closed.jaxpr, closed.consts, [*parameters, *names])
    graph.nodes.append(onnx.helper.make_node("Identity", [logits], ["logits"]))
    (out,) = closed.jaxpr.outvars
    made = onnx.helper.make_graph(
        graph.nodes,
        type(model).__name__,
        [_info(name, np.int32, shape) for name, shape in shapes.items()],
        [_info("logits", out.aval.dtype, out.aval.shape)],
        graph.initializers,
    )
    opset = onnx.helper.make_opsetid("", _OPSET)
    proto = onnx.helper.make_model(made, opset_imports=[opset], ir_version=_IR_VERSION)
    onnx.checker.check_model(proto)
    path = Path(file).expanduser()
    with writable("file", "a file", path), files.replacing(path) as partial:
        partial.write_bytes(proto.SerializeToString())


def _check_length(length: int, model: Any, saved: Saved | None) -> None:
    most = model.encoder.config.max_length
    if check_size("length", length) > most:
        raise expected("length", f"at most {most}, the model's longest", length)
    if saved is None or getattr(model, "padding", "lengths") != "zeros":
        return
    width = saved.width_of(length)
    if width != length:
        wanted = f"a length to which training padded, such as {width}"
        raise expected("length", wanted, f"{length}, and padding='zeros'")


def _make_plain(model: nnx.Module) -> None:
    """Selects forms without kernels and loops, which ONNX lacks."""
    for _, module in nnx.iter_modules(model):
        if not isinstance(module, MultiHeadAttention) or module.mechanism.foreign:
            continue
        if "implementation" in named(module.mechanism.attention):
            plain = "xla" if module.mechanism.kernels else "dense"
            options = dict(module.config.options or ()) | {"implementation": plain}
            module.config = dataclasses.replace(module.config, options=options)


def _info(name: str, dtype: Any, shape: Sequence[int]) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, _type(dtype), shape)


def _type(dtype: Any) -> int:
    from onnx import helper

    dtype = np.dtype(dtype)
    if dtype.name in ("bfloat16", "float16"):  # Runtimes lack operators of these.
        raise expected("model", "one that computes in float32", f"one in {dtype}")
    return helper.np_dtype_to_tensor_dtype(dtype)


class _Graph:
    """Operators and constants, and the names of their outputs."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"_{self._count}"

    def initializer(self, array: np.ndarray, name: str | None = None) -> str:
        """Adds an array as a constant of the graph."""
        from onnx import numpy_helper

        name = name or self._name()
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def sizes(self, *values: int) -> str:
        """Adds shapes or axes, which are int64 arrays in ONNX."""
        return self.initializer(np.array(values, np.int64))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Adds an operator; returns the name of its output."""
        from onnx import helper

        name = self._name()
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        """``x`` in another shape."""
        return self.op("Reshape", x, self.sizes(*shape))

    def inline(self, jaxpr: Any, consts: Sequence[Any], inputs: list[str]) -> list[str]:
        """The names of a jaxpr's outputs for inputs of these names."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = self.initializer(value)

        def read(x: Any) -> str:
            if isinstance(x, core.Literal):
                aval: Any = x.aval
                return self.initializer(np.asarray(x.val, aval.dtype))
            return known[x]

        for equation in jaxpr.eqns:
            names = [read(x) for x in equation.invars]
            inner = _inner(equation)
            if not math.prod(_shape(equation)):  # Runtimes cannot expand to size zero.
                made = [self.initializer(np.zeros(_shape(equation), np.float32))]
            elif inner is not None:
                made = self.inline(inner[0], inner[1], names)
            elif equation.primitive.name == "unstack":
                made = _unstack(self, equation, *names)
            else:
                made = [_operator(equation)(self, equation, *names)]
            known |= zip(equation.outvars, made, strict=True)
        return [read(x) for x in jaxpr.outvars]


def _inner(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation calls once, such as ``jax.jit``'s, and its consts."""
    if equation.primitive.name in ("scan", "while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = equation.params.get(name)
        if found is not None:
            return (
                (found.jaxpr, found.consts) if hasattr(found, "consts") else (found, ())
            )
    return None


def _operator(equation: Any) -> Callable[..., str]:
    name = equation.primitive.name
    if name in _PLAIN:
        return lambda graph, _, *inputs: graph.op(_PLAIN[name], *inputs)
    if name not in _OPERATORS:
        wanted = "one that computes only what the ONNX export supports"
        raise expected("model", wanted, f"one with jax's {name!r}")
    return _OPERATORS[name]


# Primitives that map to one operator with the same arguments.
_PLAIN = {
    **{"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg"},
    **{"max": "Max", "min": "Min", "pow": "Pow", "abs": "Abs", "sign": "Sign"},
    **{"exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "erf": "Erf"},
    **{"sin": "Sin", "cos": "Cos", "logistic": "Sigmoid", "floor": "Floor"},
    **{"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"},
    **{"eq": "Equal", "and": "And", "or": "Or", "not": "Not"},
    **{"stop_gradient": "Identity", "copy": "Identity", "copy_p": "Identity"},
}


def _shape(equation: Any) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape


def _broadcast(graph: _Graph, equation: Any, x: str) -> str:
    shape = _shape(equation)
    kept = dict(
        zip(
            equation.params["broadcast_dimensions"],
            equation.invars[0].aval.shape,
            strict=True,
        )
    )
    ones = [kept.get(axis, 1) for axis in range(len(shape))]
    return graph.op("Expand", graph.reshaped(x, ones), graph.sizes(*shape))


def _dot(graph: _Graph, equation: Any, x: str, y: str) -> str:
    """``dot_general`` as an Einsum: batch axes, then the other axes of x, then of y."""
    (x_sums, y_sums), (x_batch, y_batch) = equation.params["dimension_numbers"]
    letters: Iterator[str] = iter("abcdefghijklmnopqrstuvwxyz")
    first = [next(letters) for _ in equation.invars[0].aval.shape]
    second = ["" for _ in equation.invars[1].aval.shape]
    for ours, theirs in zip((*x_sums, *x_batch), (*y_sums, *y_batch), strict=True):
        second[theirs] = first[ours]
    second = [letter or next(letters) for letter in second]
    out = [first[axis] for axis in x_batch]
    out += [a for i, a in enumerate(first) if i not in (*x_sums, *x_batch)]
    out += [b for i, b in enumerate(second) if i not in (*y_sums, *y_batch)]
    words = f"{''.join(first)},{''.join(second)}->{''.join(out)}"
    return graph.op("Einsum", x, y, equation=words)


def _gather(graph: _Graph, equation: Any, x: str, index: str) -> str:
    """Rows of a table, or of each sample: GatherND."""
    numbers, sizes = (equation.params[n] for n in ("dimension_numbers", "slice_sizes"))
    shape, rank = equation.invars[0].aval.shape, len(_shape(equation))
    batch = tuple(range(len(numbers.operand_batching_dims)))
    picked, left = (len(batch),), shape[len(batch) + 1 :]
    rows = (
        numbers.operand_batching_dims == batch
        and numbers.start_indices_batching_dims == batch
        and numbers.collapsed_slice_dims == numbers.start_index_map == picked
        and tuple(sizes[len(batch) + 1 :]) == left
        and numbers.offset_dims == tuple(range(rank - len(left), rank))
    )
    if not rows:
        raise expected("model", "one that gathers whole rows", "another gather")
    index = graph.op("Cast", index, to=_type(np.int64))
    return graph.op("GatherND", x, index, batch_dims=len(batch))


def _slice(graph: _Graph, equation: Any, x: str) -> str:
    starts, ends = (equation.params[f"{end}_indices"] for end in ("start", "limit"))
    steps = equation.params["strides"] or [1] * len(starts)
    places = (starts, ends, range(len(starts)), steps)
    return graph.op("Slice", x, *(graph.sizes(*values) for values in places))


def _reduce(kind: str) -> Callable[..., str]:
    def operator(graph: _Graph, equation: Any, x: str) -> str:
        axes = graph.sizes(*equation.params["axes"])
        return graph.op(kind, x, axes, keepdims=0)

    return operator


def _reduce_booleans(kind: str) -> Callable[..., str]:
    def operator(graph: _Graph, equation: Any, x: str) -> str:
        x = graph.op("Cast", x, to=_type(np.int32))
        out = _reduce(kind)(graph, equation, x)
        return graph.op("Cast", out, to=_type(np.bool_))

    return operator


def _is_finite(graph: _Graph, _: Any, x: str) -> str:
    return graph.op("Not", graph.op("Or", graph.op("IsNaN", x), graph.op("IsInf", x)))


def _not_equal(graph: _Graph, _: Any, x: str, y: str) -> str:
    return graph.op("Not", graph.op("Equal", x, y))


def _power(graph: _Graph, equation: Any, x: str) -> str:
    dtype = equation.invars[0].aval.dtype
    return graph.op("Pow", x, graph.initializer(np.array(equation.params["y"], dtype)))


def _expm1(graph: _Graph, equation: Any, x: str) -> str:
    one = graph.initializer(np.array(1, equation.invars[0].aval.dtype))
    return graph.op("Sub", graph.op("Exp", x), one)


def _concatenate(graph: _Graph, equation: Any, *parts: str) -> str:
    pairs = zip(parts, equation.invars, strict=True)
    real = [part for part, variable in pairs if variable.aval.size]
    return graph.op("Concat", *real, axis=equation.params["dimension"])


def _unstack(graph: _Graph, equation: Any, x: str) -> list[str]:
    """The slices along an axis, without it; jax 0.12 has a primitive for them."""
    axis = equation.params["axis"]
    return [
        graph.op("Gather", x, graph.initializer(np.array(index, np.int64)), axis=axis)
        for index in range(len(equation.outvars))
    ]


def _stack(graph: _Graph, equation: Any, *parts: str) -> str:
    axis = equation.params["axis"]
    shape = list(_shape(equation))
    shape[axis] = 1
    rows = (graph.reshaped(part, shape) for part in parts)
    return graph.op("Concat", *rows, axis=axis)


def _pad(graph: _Graph, equation: Any, x: str, value: str) -> str:
    low, high, inner = zip(*equation.params["padding_config"], strict=True)
    if any(inner):
        raise expected("model", "one that pads at the ends", "padding in between")
    return graph.op("Pad", x, graph.sizes(*low, *high), value, mode="constant")


def _iota(graph: _Graph, equation: Any) -> str:
    shape, axis = _shape(equation), equation.params["dimension"]
    along = np.arange(shape[axis], dtype=equation.params["dtype"])
    along = along.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return graph.initializer(np.broadcast_to(along, shape))


_OPERATORS: dict[str, Callable[..., str]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda graph, e, x: graph.reshaped(x, _shape(e)),
    "squeeze": lambda graph, e, x: graph.reshaped(x, _shape(e)),
    "expand_dims": lambda graph, e, x: graph.reshaped(x, _shape(e)),
    "transpose": lambda graph, e, x: graph.op(
        "Transpose", x, perm=list(e.params["permutation"])
    ),
    "concatenate": _concatenate,
    "stack": _stack,
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
    "iota": _iota,
    "dot_general": _dot,
    "select_n": lambda graph, e, where, no, yes: graph.op("Where", where, yes, no),
    "convert_element_type": lambda graph, e, x: graph.op(
        "Cast", x, to=_type(e.params["new_dtype"])
    ),
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_and": _reduce_booleans("ReduceMin"),
    "reduce_or": _reduce_booleans("ReduceMax"),
    "is_finite": _is_finite,
    "ne": _not_equal,
    "square": lambda graph, e, x: graph.op("Mul", x, x),
    "integer_pow": _power,
    "rsqrt": lambda graph, e, x: graph.op("Reciprocal", graph.op("Sqrt", x)),
    "expm1": _expm1,
}
