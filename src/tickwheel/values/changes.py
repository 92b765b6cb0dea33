"""The difference between two configurations, as a text for the audit log. Pure.

The text shows no values of secret fields: such a field is `set`, `changed` or `removed`. Nor does
it show the query of a URL, which may have a password.
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

    Nested fields have a dot in their names. A long list ends with the number of omitted fields.
    """
    old, new = dict(leaves(before)), dict(leaves(after))
    names = [name for name in old | new if old.get(name) != new.get(name)]
    names.sort(key=lambda name: is_secret(name, secret), reverse=True)  # so that none is cut off
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
    """Yield the fields of a configuration, nested ones included."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", one) for inner, one in leaves(value))
        else:
            yield name, value


def is_secret(name: str, secret: Collection[str]) -> bool:
    """Return whether a field, or the field around it, is secret."""
    return name.partition(".")[0] in secret


def difference(name: str, old: Any, new: Any, secret: Collection[str]) -> str:
    """Describe one change: a field with its old and new value, or the fate of its secret."""
    if is_secret(name, secret):
        return f"{name:.100}: {'set' if not old else 'changed' if new else 'removed'}"
    return f"{name:.100}: {value_of(old)} -> {value_of(new)}"


def value_of(value: Any) -> str:
    """Return a value as JSON, cut to a maximum length."""
    if value is None:
        return "none"
    if isinstance(value, str) and "://" in value and "?" in value:
        value = value.partition("?")[0] + "?…"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]}…"
