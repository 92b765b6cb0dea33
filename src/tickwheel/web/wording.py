"""What is wrong with a body or a query, in words: the field, what it must be, and what it is. Pure.

The decoder says where it stopped. What would be right there is read from the type, so that no
message shows a library's words or a regular expression. What may be secret is never shown.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from tickwheel.web import types
from tickwheel.web.elements import TRUNCATED

# A secret may be in any of these: an endpoint's query can have a key.
HIDDEN = frozenset({"secret", "headers", "payload", "result", "error", "endpoint"})
LOOKED_AT = 65_536  # bytes of a body in which the value is looked up
SHOWN = 60  # characters of it
PATTERNS = {
    types.NAME: "1 to 100 of A-Z a-z 0-9 . _ : -, and not only dots",
    types.ID: "32 hexadecimal digits, lower case",
}
MOMENT = "a time with its offset, such as 2030-01-31T12:00:00Z"

_STEP = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+|\.\.\.)\]")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*?)`", re.DOTALL)
# Half a character, as JSON may have it: the first half without the second, or the other way round.
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_STOPPED = re.compile(r"(?:surrogate pair|hex escape) \(byte (\d+)\)")
ESCAPE = 6  # bytes that one half has


class Place(NamedTuple):
    """Where something is wrong: how it is called, its type as far as known, and what is there."""

    name: str
    type: inspect.Type | None
    value: Any  # UNSET: not known, or not to be shown


def in_words(error: msgspec.ValidationError, type_: Any, given: Any, *, query: bool = False) -> str:
    """Return what is wrong; `given` is the body as bytes, or the mapping that was converted."""
    text = str(error)
    _, at, path = text.rpartition(" - at `$")
    path = path.removesuffix("`") if at else ""
    field = _FIELD.match(text)
    place = found_at(path, described(type_), given)
    if field is not None:
        return field_in_words(field[1] == "contains unknown", field[2], place, query=query)
    whole = "the query" if query else "the body"
    wanted = "JSON of another type" if place.type is None else wanted_in_words(place, query=query)
    got = "" if place.value is msgspec.UNSET else f", got {value_in_words(place.value)}"
    return f"{place.name or whole} must be {wanted}{got}"


def found_at(path: str, type_: inspect.Type | None, given: Any) -> Place:
    """Go down a path such as `.backoff.first`, in the type and in what was given."""
    steps = _STEP.findall(path)
    value = msgspec.UNSET if steps and steps[0][0] in HIDDEN else loaded(given)
    if not steps and isinstance(value, str):
        value = msgspec.UNSET  # there is no telling what it is
    for name, number in steps:
        type_ = inner_type(type_, name)
        value = inner_value(value, name, number)
    name = path.removeprefix(".")
    if name.endswith("[...]"):
        name = f"each value of {name.removesuffix('[...]')}"
    return Place(name, type_, value)


def loaded(given: Any) -> Any:
    """Return what was given as plain values; UNSET when that would be much work, or is none."""
    if not isinstance(given, bytes | bytearray | memoryview | msgspec.Raw):
        return given
    body = bytes(given)
    if len(body) > LOOKED_AT:
        return msgspec.UNSET
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return msgspec.UNSET


def inner_type(type_: inspect.Type | None, name: str) -> inspect.Type | None:
    """Return the type of a field, of an array's elements, or of an object's values."""
    for one in options_of(type_):
        if name and isinstance(one, inspect.StructType):
            return next((field.type for field in one.fields if field.encode_name == name), None)
        if not name and isinstance(one, inspect.ListType):
            return one.item_type
        if not name and isinstance(one, inspect.DictType):
            return one.value_type
    return None


def inner_value(value: Any, name: str, number: str) -> Any:
    """Return what is at one step of the path."""
    if name and isinstance(value, dict):
        return value.get(name, msgspec.UNSET)
    if number.isdigit() and isinstance(value, list) and int(number) < len(value):
        return value[int(number)]
    return msgspec.UNSET


def options_of(type_: inspect.Type | None) -> tuple[inspect.Type, ...]:
    """Return the types that a union has, or the one that it is."""
    if type_ is None:
        return ()
    return type_.types if isinstance(type_, inspect.UnionType) else (type_,)


def field_in_words(unknown: bool, name: str, place: Place, *, query: bool) -> str:
    """Say that a field is not known, and which are; or that it is missing."""
    within = f"{place.name}." if place.name else ""
    if not unknown:
        return f"{within}{name} is missing"
    what = "parameter" if query else "field"
    known = ", ".join(
        field.encode_name
        for one in options_of(place.type)
        if isinstance(one, inspect.StructType)
        for field in one.fields
    )
    return f"there is no {what} {f'{within}{name}'!r:.100}; there are {known}"


def wanted_in_words(place: Place, *, query: bool) -> str:
    """Say what must be there."""
    words = [type_in_words(one, place.value) for one in options_of(place.type)]
    if "null" in words:
        words.remove("null")
        if words and not query:  # there, what is not to be given is left out
            words[-1] += ", or null"
    return " or ".join(words)


def type_in_words(type_: inspect.Type, value: Any) -> str:
    """Say what a value of this type is."""
    match type_:
        case inspect.IntType() | inspect.FloatType():
            return number_in_words(type_, value)
        case inspect.StrType():
            return text_in_words(type_)
        case inspect.LiteralType():
            return " or ".join(map(str, type_.values))
        case inspect.ListType():
            most = "" if type_.max_length is None else f" of up to {type_.max_length}"
            return f"an array{most}"
        case inspect.StructType() | inspect.DictType():
            return "an object"
        case inspect.BoolType():
            return "true or false"
        case inspect.DateTimeType():
            return MOMENT
        case inspect.NoneType():
            return "null"
    return "any JSON"


def number_in_words(type_: inspect.IntType | inspect.FloatType, value: Any) -> str:
    """Say between which bounds a number must be; that it is to be one, where it is none."""
    whole = isinstance(type_, inspect.IntType)
    least, most = type_.ge, type_.le
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    kind = "a whole number" if whole else "a number"
    if type_.gt is not None:
        bounds = f"above {type_.gt:g}" + ("" if most is None else f", up to {figure(most)}")
        return f"{kind} {bounds}"
    if least is None or most is None:
        return kind
    bounds = f"{figure(least)} to {figure(most)}"
    return bounds if right else f"{kind}, {bounds}"


def figure(number: float) -> str:
    """Return a number without a fraction that it has not."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def text_in_words(type_: inspect.StrType) -> str:
    """Say what a text must be like."""
    if type_.pattern is not None:
        return PATTERNS[type_.pattern]
    if type_.max_length is None:
        return "text"
    least = f"{type_.min_length} to" if type_.min_length else "up to"
    return f"text of {least} {type_.max_length} characters"


def value_in_words(value: Any) -> str:
    """Show a value, as JSON has it; of what is long, its size."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    shown = json.dumps(value)
    if isinstance(value, str) and len(shown) > SHOWN:
        return f"{len(value)} characters"
    return shown[:SHOWN]


@lru_cache(maxsize=100)
def described(type_: Any) -> inspect.Type:
    """Return what is known of a type."""
    return inspect.type_info(type_)


def half_of(error: Exception, body: bytes) -> str | None:
    """Return the half of a character that the decoder stopped at, as it is written; or None."""
    places = []
    stopped = _STOPPED.search(str(error))
    if stopped is not None:  # behind it, or behind what should have been the second half
        end = int(stopped[1])
        places = [(_FIRST_HALF, end - 2 * ESCAPE), (_HALF, end - ESCAPE)]
    elif str(error) == TRUNCATED:  # there is too little left for a second half
        near = range(len(body) - 2 * ESCAPE + 1, len(body) - ESCAPE + 1)
        places = [(_FIRST_HALF, start) for start in near]
    for pattern, start in places:
        if is_escape(pattern, body, start):
            return body[start : start + ESCAPE].decode()
    return None


def is_escape(pattern: re.Pattern[bytes], body: bytes, start: int) -> bool:
    """Say whether an escape begins here, and no escaped backslash."""
    if start < 0 or not pattern.match(body, start):
        return False
    before = body[max(0, start - 1000) : start]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def no_json(error: Exception, body: bytes) -> tuple[str, str]:
    """Return the code and the words for what is no JSON, or none that can be passed on."""
    if isinstance(error, RecursionError):
        return "bad_request", "it is nested too deep"
    half = half_of(error, body)
    if half is not None:
        return "invalid", f"a text has half a character, {half}: a surrogate without its other half"
    return "bad_request", f"it is no JSON: {str(error).removeprefix('JSON is malformed: ')}"
