"""Checks of what an operator may set in a profile."""

from __future__ import annotations

from collections.abc import Mapping

from anaphora.errors import SettingsError
from anaphora.profiles.outline import LIFETIMES, Ttl


def check_count(name: str, value: object) -> None:
    """Raises :class:`~anaphora.errors.SettingsError` for anything but 1, 2, 3, ..."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name} is {value!r}: use a whole number above 0")


def check_seconds(name: str, value: object) -> None:
    """Raises :class:`~anaphora.errors.SettingsError` for anything but a time above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise SettingsError(f"{name} is {value!r}: use a number of seconds above 0")


def complete(lifetimes: Mapping[Ttl, float]) -> dict[Ttl, float]:
    """Lifetimes by name, with the providers' where one is not given.

    Raises :class:`~anaphora.errors.SettingsError` for unknown names and impossible times.
    """
    for name, seconds in lifetimes.items():
        if name not in LIFETIMES:
            raise SettingsError(f"there is no lifetime {name!r}: use {', '.join(LIFETIMES)}")
        check_seconds(f"the lifetime {name}", seconds)
    return {**LIFETIMES, **lifetimes}
