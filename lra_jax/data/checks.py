"""Checks of what a user can get wrong."""

import operator


def check_integer(name: str, value: int, least: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `least`."""
    try:
        operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
