"""Looking names up, with the nearest one in the error."""

import difflib
from collections.abc import Iterable


def known(what: str, name: str, names: Iterable[str]) -> str:
    """Returns ``name`` when it is one of ``names``.

    Raises:
      ValueError: ``unknown task 'listop'; did you mean 'listops'? (known: ...)``.
    """
    names = list(names)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {what} {name!r}; {hint}(known: {', '.join(names)})")
