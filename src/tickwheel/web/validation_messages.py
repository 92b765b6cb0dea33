"""Messages for invalid bodies and queries: the field, its type, and the value. Pure.

The decoder's error has the position; the expected value is read from the type there, so that no
message shows a library's wording or a regular expression. Values that may be secret are not shown.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from tickwheel.web import schemas
from tickwheel.web.batch_parser import TRUNCATED

# Any of these may have a secret: an endpoint can have a key in its query.
SECRET_FIELDS = frozenset({"secret", "headers", "payload", "result", "error", "endpoint"})
MAX_DECODED_BYTES = 65_536  # of a body, for the value to be looked up in it
MAX_SHOWN_CHARS = 60  # of a value
IN_SECONDS = frozenset({
    "delay", "timeout", "feedback_timeout", "first", "max", "pause", "max_pause", "interval",
    "lifetime",
})  # fmt: skip
MOMENT = "a time with its offset, such as 2030-01-31T12:00:00Z"

_STEP = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+|\.\.\.)\]")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*?)`", re.DOTALL)
# JSON may have a lone surrogate: a high one without its low one, or the other way round.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_STOPPED = re.compile(r"(?:surrogate pair|hex escape) \(byte (\d+)\)")
ESCAPE_BYTES = 6  # of one surrogate


class Location(NamedTuple):
    """The location of an error: its name, its type if known, and its value."""

    name: str
    type: inspect.Type | None
    value: Any  # UNSET: unknown, or maybe secret


def describe_error(
    error: msgspec.ValidationError, type_: Any, given: Any, *, query: bool = False
) -> str:
    """Return the message for an error; `given` is the body as bytes, or the converted mapping."""
    text = str(error)
    _, at, path = text.rpartition(" - at `$")
    path = path.removesuffix("`") if at else ""
    field = _FIELD.match(text)
    place = locate(path, type_info(type_), given)
    if field is not None:
        return describe_field(field[1] == "contains unknown", field[2], place, query=query)
    whole = "the query" if query else "the body"
    wanted = "JSON of another type" if place.type is None else describe_expected(place, query=query)
    got = "" if place.value is msgspec.UNSET else f", got {describe_value(place.value)}"
    return f"{place.name or whole} must be {wanted}{got}"


def locate(path: str, type_: inspect.Type | None, given: Any) -> Location:
    """Follow a path such as `.backoff.first`, in the type and in the value."""
    steps = _STEP.findall(path)
    value = msgspec.UNSET if steps and steps[0][0] in SECRET_FIELDS else plain_values(given)
    if not steps and isinstance(value, str):
        value = msgspec.UNSET  # without a field's name it may be anything, also a secret
    for name, number in steps:
        type_ = inner_type(type_, name)
        value = inner_value(value, name, number)
    name = path.removeprefix(".")
    if name.endswith("[...]"):
        name = f"each value of {name.removesuffix('[...]')}"
    return Location(name, type_, value)


def plain_values(given: Any) -> Any:
    """Return the decoded body; UNSET if it is large or not JSON."""
    if not isinstance(given, bytes | bytearray | memoryview | msgspec.Raw):
        return given
    body = bytes(given)
    if len(body) > MAX_DECODED_BYTES:
        return msgspec.UNSET
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return msgspec.UNSET


def inner_type(type_: inspect.Type | None, name: str) -> inspect.Type | None:
    """Return the type of a field, of an array's elements, or of an object's values."""
    for one in union_members(type_):
        if name and isinstance(one, inspect.StructType):
            return next((field.type for field in one.fields if field.encode_name == name), None)
        if not name and isinstance(one, inspect.ListType):
            return one.item_type
        if not name and isinstance(one, inspect.DictType):
            return one.value_type
    return None


def inner_value(value: Any, name: str, number: str) -> Any:
    """Return the value at one step of the path."""
    if name and isinstance(value, dict):
        return value.get(name, msgspec.UNSET)
    if number.isdigit() and isinstance(value, list) and int(number) < len(value):
        return value[int(number)]
    return msgspec.UNSET


def union_members(type_: inspect.Type | None) -> tuple[inspect.Type, ...]:
    """Return the types of a union; of another type, the type itself."""
    if type_ is None:
        return ()
    return type_.types if isinstance(type_, inspect.UnionType) else (type_,)


def describe_field(unknown: bool, name: str, place: Location, *, query: bool) -> str:
    """Return the message for an unknown field, with the known ones; or for a missing field."""
    within = f"{place.name}." if place.name else ""
    if not unknown:
        return f"{within}{name} is missing"
    what = "parameter" if query else "field"
    known = ", ".join(
        field.encode_name
        for one in union_members(place.type)
        if isinstance(one, inspect.StructType)
        for field in one.fields
    )
    return f"there is no {what} {f'{within}{name}'!r:.100}; there are {known}"


def describe_expected(place: Location, *, query: bool) -> str:
    """Return a description of the expected value."""
    unit = "seconds" if place.name.rpartition(".")[2] in IN_SECONDS else ""
    words = [describe_type(one, place.value, unit) for one in union_members(place.type)]
    if "null" in words:
        words.remove("null")
        if words and not query:  # a query cannot have null
            words[-1] += ", or null"
    return " or ".join(words)


def describe_type(type_: inspect.Type, value: Any, unit: str = "") -> str:
    """Return a description of a type; `unit` is that of a number."""
    match type_:
        case inspect.IntType() | inspect.FloatType():
            return describe_number(type_, value, unit)
        case inspect.StrType():
            return describe_string(type_)
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


def describe_number(type_: inspect.IntType | inspect.FloatType, value: Any, unit: str) -> str:
    """Return the bounds of a number; also its kind, if the value is not of it."""
    whole = isinstance(type_, inspect.IntType)
    least, most = type_.ge, type_.le
    is_right_kind = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    kind = "a whole number" if whole else f"a number of {unit}" if unit else "a number"
    if type_.gt is not None:
        bounds = f"above {type_.gt:g}" + ("" if most is None else f", up to {format_number(most)}")
        return f"{kind} {bounds}"
    if least is None or most is None:
        return kind
    bounds = f"{format_number(least)} to {format_number(most)}"
    return f"{bounds} {unit}".rstrip() if is_right_kind else f"{kind}, {bounds}"


def format_number(number: float) -> str:
    """Return a number as text, an integer without a fraction."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def describe_string(type_: inspect.StrType) -> str:
    """Return a description of a string."""
    if type_.pattern is not None:
        return schemas.PATTERNS[type_.pattern]
    if type_.max_length is None:
        return "text"
    least = f"{type_.min_length} to" if type_.min_length else "up to"
    return f"text of {least} {type_.max_length} characters"


def describe_value(value: Any) -> str:
    """Return a value as JSON; for a long one, its size."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    shown = json.dumps(value)
    if isinstance(value, str) and len(shown) > MAX_SHOWN_CHARS:
        return f"{len(value)} characters"
    return shown[:MAX_SHOWN_CHARS]


@lru_cache(maxsize=100)
def type_info(type_: Any) -> inspect.Type:
    """Return the type information of msgspec."""
    return inspect.type_info(type_)


def lone_surrogate(error: Exception, body: bytes) -> str | None:
    """Return the escape of a lone surrogate at which the decoder stopped, or None."""
    candidates = []
    stopped = _STOPPED.search(str(error))
    if stopped is not None:  # after it, or after what should be its low surrogate
        end = int(stopped[1])
        candidates = [(_HIGH_SURROGATE, end - 2 * ESCAPE_BYTES), (_SURROGATE, end - ESCAPE_BYTES)]
    elif str(error) == TRUNCATED:  # the text ends where its low surrogate should be
        near = range(len(body) - 2 * ESCAPE_BYTES + 1, len(body) - ESCAPE_BYTES + 1)
        candidates = [(_HIGH_SURROGATE, start) for start in near]
    for pattern, start in candidates:
        if is_escape(pattern, body, start):
            return body[start : start + ESCAPE_BYTES].decode()
    return None


def is_escape(pattern: re.Pattern[bytes], body: bytes, start: int) -> bool:
    """Return whether an escape begins at `start`, rather than after an escaped backslash."""
    if start < 0 or not pattern.match(body, start):
        return False
    before = body[max(0, start - 1000) : start]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def describe_bad_json(error: Exception, body: bytes) -> tuple[str, str]:
    """Return the code and the message for a body that is not JSON, or not valid Unicode."""
    if isinstance(error, RecursionError):
        return "bad_request", "it is nested too deeply"
    surrogate = lone_surrogate(error, body)
    if surrogate is not None:
        return "invalid", f"a string has a lone surrogate, {surrogate}"
    return "bad_request", f"it is not JSON: {str(error).removeprefix('JSON is malformed: ')}"
