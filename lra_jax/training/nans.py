"""Where a training step stops being finite: ``--debug-nans``.

The run goes back to its newest checkpoint and does the steps after it again, to the
same bits. The bad step is then done operation by operation. An operation makes a bad
tensor if it turns finite numbers into an infinity or a NaN, or infinities, as masks
have them, into a NaN. Each tensor computed from a bad one inherits its cause, so what a
``where`` drops later is not blamed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from lra_jax.training import sharding
from lra_jax.training.loop import Trainer
from lra_jax.training.step import TrainState, all_finite

# They are opened; others that hold programs, loops above all, are one operation.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)


def explain(trainer: Trainer, step: int) -> str:
    """In words, the first bad tensor of a step, and what made it.

    Args:
      trainer: freshly built, of the run.
      step: the first bad one, from 1.

    Returns:
      As in ``in step 3 exp made an infinity of float32[8,2] in
      encoder.blocks.0.attention, forward``.
    """
    trainer.restore()
    for number in range(trainer.step + 1, step + 1):
        batch = sharding.shard_batch(trainer.mesh, next(trainer.data))
        before = jax.tree.map(jnp.copy, trainer.state)
        trainer.state = trainer.train_step(trainer.state, batch)
        # A gradient can spoil the parameters one step before it shows in the loss.
        if number == step or not all_finite(trainer.state.params):
            return f"in step {number} {_first_bad(trainer, before, batch)}"
    return "its steps were finite when they were done again"


def _first_bad(trainer: Trainer, state: TrainState, batch: dict[str, jax.Array]) -> str:
    with _scopes(trainer.model_at(state.params)):
        program, shapes = jax.make_jaxpr(trainer.step_function, return_shape=True)(
            state, batch
        )
    arguments = jax.tree_util.tree_leaves_with_path((state, batch))
    causes = [_before(path, array) for path, array in arguments]
    arrays = [array for _, array in arguments]
    _, found = _follow(program.jaxpr, program.consts, arrays, causes)
    after = jax.tree.unflatten(jax.tree.structure(shapes), found)
    # The loss first: a bad one makes its gradient bad.
    causes = (after.sums["loss"], *jax.tree.leaves(after.params))
    return next(filter(None, causes), "every tensor is finite")


class _Value(NamedTuple):
    """An array, and in words what made it bad; empty for a good one."""

    array: Any
    cause: str = ""


def _follow(
    jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], causes: Sequence[str]
) -> tuple[list[Any], list[str]]:
    """Runs a program; gives its outputs, and what made each of them bad."""
    known: dict[Any, _Value] = dict(
        zip(jaxpr.constvars, map(_Value, consts), strict=True)
    )
    known |= dict(zip(jaxpr.invars, map(_Value, arrays, causes), strict=True))

    def value(variable: Any) -> _Value:
        if isinstance(variable, core.Literal):
            return _Value(variable.val)
        return known[variable]

    for equation in jaxpr.eqns:
        given = [value(variable) for variable in equation.invars]
        for variable, made in zip(equation.outvars, _do(equation, given), strict=True):
            known[variable] = made
    results = [value(variable) for variable in jaxpr.outvars]
    return [r.array for r in results], [r.cause for r in results]


def _do(equation: Any, given: list[_Value]) -> list[_Value]:
    """One operation, or a program inside the program."""
    arrays = [value.array for value in given]
    inner = _program(equation) if equation.primitive.name in _CALLS else None
    if inner is not None:
        causes = [value.cause for value in given]
        made = _follow(inner.jaxpr, inner.consts, arrays, causes)
        return list(map(_Value, *made))
    parameters = equation.primitive.get_bind_params(equation.params)
    made = equation.primitive.bind(*arrays, **parameters)
    made = made if equation.primitive.multiple_results else [made]
    inherited = next((value.cause for value in given if value.cause), "")
    return [_Value(array, _judge(equation, given, array, inherited)) for array in made]


def _judge(equation: Any, given: list[_Value], array: Any, inherited: str) -> str:
    nan, infinite = _is_bad(array)
    if not nan and not infinite:
        return ""
    if inherited:
        return inherited
    before = [_is_bad(value.array) for value in given]
    if any(was_nan or (was_infinite and not nan) for was_nan, was_infinite in before):
        return ""  # A constant that was meant so.
    kind = "a NaN" if nan else "an infinity"
    sizes = ",".join(map(str, array.shape))
    made = f"{equation.primitive.name} made {kind} of {array.dtype}[{sizes}]"
    return f"{made} in {_place(str(equation.source_info.name_stack))}"


def _place(stack: str) -> str:
    """Module and direction, from the names that jax gives an operation."""
    names = [part for part in stack.replace(")", "").split("/") if _SCOPE in part]
    module = names[-1].split(_SCOPE)[-1] if names else ""
    direction = "backward" if "transpose" in stack else "forward"
    if not module:
        return "the loss, its gradient or the optimiser"
    return f"{module}, {direction}"


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
    modules = {type(module) for _, module in nnx.iter_modules(model)}
    calls = {
        kind: kind.__dict__["__call__"]
        for kind in modules
        if "__call__" in kind.__dict__
    }
    places: dict[int, str] = {}

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(self: nnx.Module, *args: Any, **keywords: Any) -> Any:
            if type(self) is type(model):  # Merged anew, with other modules.
                for path, module in nnx.iter_modules(self):
                    places[id(module)] = ".".join(map(str, path)) or "model"
            with jax.named_scope(_SCOPE + places.get(id(self), type(self).__name__)):
                return call(self, *args, **keywords)

        return inside

    for kind, call in calls.items():
        kind.__call__ = named(call)
    try:
        yield
    finally:
        for kind, call in calls.items():
            kind.__call__ = call
