"""The parts of a model, or of its training: chosen by name, or a user's own.

Every part, built in or not, is made by a class or a function:

  block      ``make(attention, mlp, config, rngs)``, a `lra_jax.models.Block`.
  mlp        ``make(config, rngs, **mlp_options)``, called as ``mlp(x, mask=..., rngs=
             ...)``: `[B, T, D]` to `[B, T, D]`; or None for no MLP.
  positions  ``make(config, rngs)``, called as ``positions(length)``: the vectors of the
             first positions, `[length, D]`; or None for none.
  optimizer  ``make(schedule, **optimizer_options)``, see
             `lra_jax.training.optimizer.make_optimizer`.

``config`` is the `ModelConfig` of the encoder; for a block and its MLP it has the sizes
of the block's stage, and its own rate ``drop_path``. ``rngs`` draws the parameters,
each an ``nnx.Param``; that of a call has a stream "dropout" in training, and is None in
evaluation.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from lra_jax.attention import outside
from lra_jax.errors import a_thing, expected


def make_part(
    setting: str,
    name: str,
    parts: Mapping[str, Callable[..., Any]],
    args: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    kind: type = object,
    offers: Mapping[str, Any] | None = None,
) -> Any:
    """Makes the part that a setting names: one of ``parts``, or the user's own.

    Args:
      setting: for errors.
      name: one of ``parts``, or ``package.module:thing``.
      parts: those of this package.
      args: its arguments, by position; the names are for errors.
      options: by name.
      kind: the class that it must have.
      offers: further keywords, for a part that has parameters of these names.
    """
    make = parts.get(name) or outside.load(name, setting)
    if isinstance(make, nnx.Module) or not callable(make):
        needed = f"{name!r} to be a class or a function"
        raise expected(setting, needed, a_thing(make))
    # The signature of a class of Flax is that of any class.
    is_class = inspect.isclass(make)
    signature = inspect.signature(make.__init__ if is_class else make)
    positional = [make, *args.values()] if is_class else [*args.values()]
    taken = {k: x for k, x in (offers or {}).items() if k in signature.parameters}
    keywords = taken | dict(options)
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        needed = f"{name!r} to take ({', '.join([*args, *keywords])})"
        raise expected(setting, needed, str(error).removeprefix("got ")) from error
    part = make(*args.values(), **keywords)
    if not isinstance(part, kind):
        needed = f"{name!r} to make a {kind.__name__}"
        raise expected(setting, needed, a_thing(part))
    return part
