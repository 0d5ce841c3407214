"""The parts of an encoder that are chosen by name, or are a user's own.

Every part, built in or not, is made by a class or a function:

  block      ``make(attention, mlp, config, rngs)``, a `lra_jax.models.Block`.
  mlp        ``make(config, rngs, **mlp_options)``, called as ``mlp(x, mask=..., rngs=
             ...)``: `[B, T, D]` to `[B, T, D]`; or None for no MLP.
  positions  ``make(config, rngs)``, called as ``positions(length)``: the vectors of the
             first positions, `[length, D]`; or None for none.

``config`` is the `ModelConfig` of the encoder; for a block and its MLP it has the sizes
of the block's stage, and its own rate ``drop_path``. ``rngs`` draws the parameters,
each an ``nnx.Param``; that of a call has a stream "dropout" in training, and is None in
evaluation.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from lra_jax.attention import own
from lra_jax.errors import a_thing, expected


def make_part(
    setting: str,
    name: str,
    parts: Mapping[str, Callable[..., Any]],
    *args: Any,
    kind: type = object,
    **options: Any,
) -> Any:
    """Makes a part of an encoder.

    Args:
      setting: block, mlp or positions.
      name: one of ``parts``, or ``package.module:thing``.
      parts: those of this package, by name.
      *args: see above.
      kind: what it has to be.
      **options: of the part.

    Raises:
      ValueError: there is no such part, or it does not follow the interface above.
    """
    make = parts.get(name) or own.load(name, setting)
    if isinstance(make, nnx.Module) or not callable(make):
        needed = f"{name!r} to be a class, or a function that makes a module"
        raise expected(setting, needed, a_thing(make))
    # The signature of a class of Flax is that of any class.
    called = make.__init__ if inspect.isclass(make) else make
    first = (make,) if inspect.isclass(make) else ()
    try:
        inspect.signature(called).bind(*first, *args, **options)
    except TypeError as error:
        takes = {"block": "attention, mlp, config, rngs"}.get(setting, "config, rngs")
        needed = f"{name!r} to take ({', '.join([takes, *options])})"
        raise expected(setting, needed, str(error).removeprefix("got ")) from error
    part = make(*args, **options)
    if not isinstance(part, kind) or not (part is None or callable(part)):
        needed = f"{name!r} to make a {kind.__name__}"
        needed = f"{name!r} to make a module" if kind is object else needed
        raise expected(setting, needed, a_thing(part))
    return part
