"""Finds where a training step stops being finite: ``--debug-nans``.

The run goes back to its newest checkpoint and repeats the steps after it, bit for bit.
The bad step is then done operation by operation. An operation creates a bad tensor if
it turns finite numbers into an infinity or a NaN, or infinities, such as those of
masks, into a NaN. Each tensor computed from a bad one inherits its cause, so values
that a ``where`` drops later are not blamed.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from lra_jax.models.batch_norm import RunningMean
from lra_jax.training import sharding
from lra_jax.training.step import TrainState, all_finite
from lra_jax.training.trainer import Trainer

# These and branches are opened; others that hold programs, mainly loops, count as one
# operation.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)


def explain(trainer: Trainer, step: int) -> str:
    """Describes the first bad tensor of a step, and what made it.

    Args:
      trainer: freshly built, for the same run.
      step: the first bad one, from 1.

    Returns:
      As in ``in step 3 exp made an infinity of float32[8,2] in
      encoder.blocks.0.attention, forward``.
    """
    trainer.restore()
    for number in range(trainer.step + 1, step + 1):
        batch = sharding.shard_batch(trainer.mesh, next(trainer.data))
        before = jax.tree.map(jnp.copy, trainer.state)
        trainer.advance(number - 1, batch)
        # A gradient can spoil the parameters one step before it shows in the loss.
        if number == step or not all_finite(trainer.state.params):
            first_bad = sharding.under_mesh(trainer.mesh, _first_bad)
            return f"in step {number} {first_bad(trainer, before, batch)}"
    return "its steps were finite when they were repeated"


def _first_bad(trainer: Trainer, state: TrainState, batch: dict[str, jax.Array]) -> str:
    with _scopes(trainer.model_at(state.params)):
        function = trainer.step_function(int(state.step))
        program, shapes = jax.make_jaxpr(function, return_shape=True)(state, batch)
    arguments = jax.tree_util.tree_leaves_with_path((state, batch))
    given = [_Value(array, _before(path, array)) for path, array in arguments]
    found = [value.cause for value in _follow(program, given, "")]
    after = jax.tree.unflatten(jax.tree.structure(shapes), found)
    # The loss first: if it is bad, so is its gradient.
    if after.sums["loss"]:
        return f"{after.sums['loss']}, forward"
    means = nnx.filter_state(after.params, RunningMean)
    spoilt = next(filter(None, jax.tree.leaves(means)), "")
    if spoilt:
        return f"{spoilt}, forward"
    spoilt = next(filter(None, jax.tree.leaves(after.params)), "")
    return f"{spoilt}, backward" if spoilt else "every tensor is finite"


class _Value(NamedTuple):
    """An array; what made it bad, if it is; whether it is independent of all inputs."""

    array: Any
    cause: str = ""
    constant: bool = False


def _follow(
    program: core.ClosedJaxpr, given: Sequence[_Value], place: str
) -> list[_Value]:
    """Runs a program, called from this place, operation by operation."""
    jaxpr = program.jaxpr
    constants = [_Value(array, constant=True) for array in program.consts]
    known: dict[Any, _Value] = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, given, strict=True)

    def value(variable: Any) -> _Value:
        if isinstance(variable, core.Literal):
            return _Value(variable.val, constant=True)
        return known[variable]

    for equation in jaxpr.eqns:
        inputs = [value(variable) for variable in equation.invars]
        made = _do(equation, inputs, f"{place}/{equation.source_info.name_stack}")
        known |= zip(equation.outvars, made, strict=True)
    return [value(variable) for variable in jaxpr.outvars]


def _do(equation: Any, given: list[_Value], place: str) -> list[_Value]:
    """One operation, or a program inside the program."""
    if equation.primitive.name == "cond":
        chosen, *given = given
        return _follow(equation.params["branches"][int(chosen.array)], given, place)
    inner = _program(equation) if equation.primitive.name in _CALLS else None
    if inner is not None:
        return _follow(inner, given, place)
    parameters = equation.primitive.get_bind_params(equation.params)
    made = equation.primitive.bind(*(value.array for value in given), **parameters)
    made = made if equation.primitive.multiple_results else [made]
    constant = all(value.constant for value in given)
    causes = [_judge(equation.primitive.name, given, array, place) for array in made]
    return [_Value(*pair, constant) for pair in zip(made, causes, strict=True)]


def _judge(name: str, given: list[_Value], array: Any, place: str) -> str:
    """The cause of a bad array, in words; empty if it is good, or bad on purpose."""
    nan, infinite = _is_bad(array)
    if (not nan and not infinite) or all(value.constant for value in given):
        return ""
    for value in given:
        if value.cause:
            return value.cause
    if not nan and any(_is_bad(value.array)[1] for value in given):
        return ""
    kind = "a NaN" if nan else "an infinity"
    sizes = ",".join(map(str, array.shape))
    return f"{name} made {kind} of {array.dtype}[{sizes}] in {_module(place)}"


def _module(place: str) -> str:
    """The innermost module among the names that jax gives a place."""
    found = re.findall(f"{_SCOPE}([^/()]+)", place)
    return found[-1] if found else "the loss, its gradient or the optimiser"


def _program(equation: Any) -> core.ClosedJaxpr | None:
    for parameter in equation.params.values():
        if isinstance(parameter, core.ClosedJaxpr):
            return parameter
        if isinstance(parameter, core.Jaxpr):
            return core.ClosedJaxpr(parameter, ())
    return None


def _is_bad(array: Any) -> tuple[bool, bool]:
    """Whether any number is NaN, and whether any is infinite."""
    if not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return False, False
    return bool(jnp.isnan(array).any()), bool(jnp.isinf(array).any())


def _before(path: Any, array: Any) -> str:
    if not any(_is_bad(array)):
        return ""
    return f"{jax.tree_util.keystr(path)} was bad before the step"


_SCOPE = "module:"


@contextlib.contextmanager
def _scopes(model: nnx.Module) -> Iterator[None]:
    """Context in which operations are named after the modules that call them."""
    kinds = {type(module) for _, module in nnx.iter_modules(model)}
    # Blocks and attention are also entered through methods of other names.
    methods = [
        (kind, name, value)
        for kind in kinds
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and (name == "__call__" or name[0] != "_")
    ]
    places: dict[int, str] = {}

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(self: nnx.Module, *args: Any, **keywords: Any) -> Any:
            if type(self) is type(model):  # Merged again, with new module objects.
                for path, module in nnx.iter_modules(self):
                    places[id(module)] = ".".join(map(str, path)) or "model"
            with jax.named_scope(_SCOPE + places.get(id(self), type(self).__name__)):
                return call(self, *args, **keywords)

        return inside

    for kind, name, method in methods:
        setattr(kind, name, named(method))
    try:
        yield
    finally:
        for kind, name, method in methods:
            setattr(kind, name, method)
