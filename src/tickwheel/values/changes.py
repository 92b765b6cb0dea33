"""The difference between two configurations, in words for the audit log. Pure.

Values of secret fields are never shown: such a field is `set`, `changed` or `removed`. Neither is
the query of a URL, where some put a password.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

VALUE_CHARACTERS = 200  # shown of one value
DETAIL_CHARACTERS = 2_000  # of all changes together


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], *, secret: Collection[str] = ()
) -> str:
    """Return the fields that differ, each with its old and new value; a missing one is `none`.

    Fields within a field have a dot in their names. A long list ends with how many more there are.
    """
    old, new = dict(leaves(before)), dict(leaves(after))
    names = [name for name in old | new if old.get(name) != new.get(name)]
    names.sort(key=lambda name: is_secret(name, secret), reverse=True)  # these are never cut off
    lines = [difference(name, old.get(name), new.get(name), secret) for name in names]
    shown: list[str] = []
    left = DETAIL_CHARACTERS
    for number, line in enumerate(lines):
        left -= len(line) + 2
        if left < 0:
            shown.append(f"and {len(lines) - number} more")
            break
        shown.append(line)
    return "; ".join(shown) or "no change"


def leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give the fields of a configuration, with those of the mappings in it."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", one) for inner, one in leaves(value))
        else:
            yield name, value


def is_secret(name: str, secret: Collection[str]) -> bool:
    """Say whether a field, or the one that it is in, is secret."""
    return name.partition(".")[0] in secret


def difference(name: str, old: Any, new: Any, secret: Collection[str]) -> str:
    """Return one change: a field, and its old and new value or what became of its secret."""
    if is_secret(name, secret):
        return f"{name:.100}: {'set' if not old else 'changed' if new else 'removed'}"
    return f"{name:.100}: {value_of(old)} -> {value_of(new)}"


def value_of(value: Any) -> str:
    """Return a value as JSON, up to a length."""
    if value is None:
        return "none"
    if isinstance(value, str) and "://" in value and "?" in value:
        value = value.partition("?")[0] + "?…"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]}…"
