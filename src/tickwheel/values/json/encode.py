"""`encode` and `decode`: Python values to JSON, and JSON to plain Python values.

This module does not depend on annotations, tasks or stores. Unlike pickle, decoding runs no code.

| Python | JSON |
|---|---|
| None, bool, int, float, str | themselves; an int of any size, no NaN, no infinity |
| list, tuple, NamedTuple, set, frozenset | array; a set in a fixed order |
| dict and other mappings, dataclass, TypedDict, pydantic model | object |
| datetime with a time zone, date, time | RFC 3339 text |
| timedelta | seconds; exact to the microsecond within 136 years |
| UUID, Decimal, path | text |
| bytes | base64 text |
| Enum | its value; one that is also a str, an int or a float goes as that |
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWED = (
    "None, bool, int, float, str, list, tuple, set, dict, dataclasses, pydantic models, datetime, "
    "date, time, timedelta, UUID, Decimal, Enum, bytes and paths"
)
TOO_DEEP = "nested too deeply, or inside itself"
MAX_DEPTH = 200  # nested arrays and objects, in JSON from other processes
DEPTH_SLICE_BYTES = 65_536  # whose depth is measured at once


def encode(value: object, owner: str = "") -> bytes:
    """Return `value` as compact UTF-8 JSON; `owner` begins the message of an error.

    - Equal sets give the same bytes.
    - Keys of an object are str; int, UUID and Enum of str become text.
    - TypeError for a type that is not in the table above, ValueError for a value that JSON cannot
      represent (NaN, a datetime without a zone, a lone surrogate, a cycle). Both say where it is.

    Cost: plain data is one call of the C encoder, and a scan of the keys that it wrote.
    """
    try:
        text = _ENCODER.encode(value)
        if not _has_doubtful_keys(text) or _is_plain(value):
            return text.encode()
    except (TypeError, ValueError, RecursionError, Misfit):
        pass  # `encode_carefully` finds the place, or a way to encode it
    return encode_carefully(value, owner)


def decode(body: bytes | str) -> Any:
    """Return the value of the JSON text `body`; ValueError, with the position, for invalid JSON."""
    try:
        return _DECODER.decode(body if isinstance(body, str) else str(body, "utf-8"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno} (character {error.pos})"
        raise ValueError(f"not JSON: {error.msg} at {place}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: invalid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("this JSON is nested too deeply") from None


def exceeds_depth(body: bytes, depth: int = MAX_DEPTH) -> bool:
    """Return whether JSON nests arrays and objects more than `depth` levels deep.

    The process that reads it may have a smaller stack than the one that accepts it: the limit of
    the decoder differs between Pythons, from a thousand to ten thousand levels.
    """
    return any(most > depth for most in slice_depths(body, depth))


def slice_depths(body: bytes, least: int = MAX_DEPTH) -> Iterator[int]:
    """Yield the depth of each slice of JSON; nothing if it has at most `least` brackets.

    Cost: a count of the brackets; if there are more, at most 2 ms for each slice.
    """
    if body.count(b"[") + body.count(b"{") <= least:
        return
    inside = level = start = 0  # inside: 1 within a string
    while start < len(body):
        part = body[start : start + DEPTH_SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part += body[start + len(part) : start + len(part) + 1]  # the escaped character
        start += len(part)
        texts = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(texts[inside::2])  # the JSON outside of strings
        inside ^= (len(texts) - 1) & 1
        steps = memoryview(outside.translate(_STEPS, _NO_BRACKETS)).cast("b")
        yield max(accumulate(steps, initial=level))
        level += sum(steps)


_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level deeper, or back: -1 as a byte
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class Misfit(Exception):
    """A value that cannot be converted; each container around it adds its position."""

    def __init__(self, kind: type[Exception], message: str) -> None:
        super().__init__(message)
        self._kind = kind
        self._message = message
        self._steps: list[str | int] = []

    def inside(self, step: str | int) -> None:
        self._steps.append(step)

    def error(self, owner: str = "") -> Exception:
        """Return the error for the caller; `owner` names what holds the value."""
        if owner and not self._steps:
            return self._kind(f"{owner}{self._message}")
        place = ""
        for step in self._steps[:-20:-1]:
            if isinstance(step, str) and step.isidentifier():
                place += f".{step}" if place else step
            else:
                place += f"[{step!r:.50}]"
        if place[:1] in ("", "["):
            place = f"value{place}"
        return self._kind(f"{owner}{place}: {self._message}")


@contextmanager
def errors_for(owner: str = "") -> Iterator[None]:
    """Raise a Misfit of this block as the error for the caller."""
    try:
        yield
    except Misfit as misfit:
        raise misfit.error(owner) from misfit.__cause__
    except RecursionError:
        raise ValueError(f"{owner}value: {TOO_DEEP}") from None


def convert_at(step: str | int, convert: Callable[[Any], Any] | None, value: Any) -> Any:
    """Return `convert(value)` for the value at `step` of its container."""
    if convert is None:
        return value
    try:
        return convert(value)
    except Misfit as misfit:
        misfit.inside(step)
        raise


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is not a JSON number")


def _simpler(value: Any) -> object:
    """Return `value` one step closer to JSON; the encoder calls it for types that it lacks."""
    kind: Any = type(value)
    convert = _converter(kind)
    if convert is None:
        raise Misfit(TypeError, f"{_type_name(value)} cannot be JSON; use {ALLOWED}")
    try:
        return convert(value)
    except (ValueError, OverflowError) as error:
        raise Misfit(ValueError, str(error)) from None


_ENCODER = json.JSONEncoder(
    ensure_ascii=False,
    allow_nan=False,
    check_circular=False,  # the recursion limit ends a cycle, too
    separators=(",", ":"),
    default=_simpler,
)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

# The C encoder turns keys that are float, bool or None into text, and writes both 1 and "1" as the
# same key. Scanning its output is cheaper than checking every dict. The first search finds only
# ends of keys; the others are exact. Inside a string the quotes would be escaped.
_may_be_doubtful = re.compile(
    r'":(?<=[0-9el]":)(?:(?<=[0-9]":)|(?<="true":)|(?<="false":)|(?<="null":))'
).search
_DOUBTFUL = r'"(?:-?[0-9][0-9.e+-]*|true|false|null)":'
_first_is_doubtful = re.compile(r"\{" + _DOUBTFUL).search
_later_is_doubtful = re.compile("," + _DOUBTFUL).search
_SCALARS = frozenset({str, int, float, bool, type(None)})
_KEYS: tuple[set[type], ...] = (set(), {str}, {int})


def _has_doubtful_keys(text: str) -> bool:
    return bool(_may_be_doubtful(text) and (_first_is_doubtful(text) or _later_is_doubtful(text)))


def _is_plain(value: Any) -> bool:
    """Return whether `value` has only JSON's types, and keys that the C encoder handles."""
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) in _KEYS and all(map(_is_plain, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return kind in _SCALARS


def encode_carefully(value: object, owner: str = "") -> bytes:
    """Encode slowly, with exact errors; `owner` names what holds the value."""
    with errors_for(owner):
        return _ENCODER.encode(_plain(value, set())).encode()


def _plain(value: Any, above: set[int]) -> Any:
    """Return `value` in JSON's types; `above` has the ids of the containers around it."""
    if value is None or isinstance(value, str | int | float):
        return _plain_scalar(value)
    if id(value) in above:
        raise Misfit(ValueError, TOO_DEEP)
    above.add(id(value))
    try:
        return _plain_container(value, above)
    finally:
        above.discard(id(value))


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise Misfit(ValueError, f"{value} cannot be JSON; use a finite number, or None")
    try:
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, int):
            int.__repr__(value)
    except UnicodeEncodeError:
        message = f"{value!r:.100} has a lone surrogate and cannot be UTF-8"
        raise Misfit(ValueError, message) from None
    except ValueError as error:  # Python refuses to print an int of thousands of digits
        raise Misfit(ValueError, str(error)) from None
    return value


def _plain_container(value: Any, above: set[int]) -> Any:
    if isinstance(value, dict):
        return _plain_dict(value, above)
    if isinstance(value, list | tuple):
        plain = partial(_plain, above=above)
        return [convert_at(index, plain, item) for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        for item in value:
            _plain(item, above)  # raises with the place, before sorting encodes them
    return _plain(_simpler(value), above)


def _plain_dict(items: dict[Any, Any], above: set[int]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in items.items():
        text = _key_text(key)
        if text in plain:
            raise Misfit(ValueError, f"two keys become {text!r:.100}")
        plain[text] = convert_at(text, partial(_plain, above=above), item)
    return plain


def _key_text(key: object) -> str:
    if isinstance(key, Enum) and isinstance(key.value, str):
        key = key if isinstance(key, str) else key.value
    if isinstance(key, UUID):
        key = str(key)
    if isinstance(key, str):
        return str.__str__(_plain_scalar(key))
    if isinstance(key, int) and not isinstance(key, bool):
        return int.__repr__(_plain_scalar(key))
    raise Misfit(
        TypeError,
        f"the key {key!r:.100} ({_type_name(key)}) cannot be JSON; "
        "use str, int, UUID or an Enum of str",
    )


def _type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


@lru_cache(maxsize=1024)
def _converter(kind: Any) -> Callable[[Any], object] | None:
    for base, convert in _CONVERTERS:
        if issubclass(kind, base):
            return convert
    if is_dataclass(kind):
        names = tuple(field.name for field in fields(kind))
        return lambda value: {name: getattr(value, name) for name in names}
    if is_model(kind):
        return lambda value: value.model_dump(mode="json", by_alias=True)
    return dict if issubclass(kind, Mapping) else None


def is_model(kind: type) -> bool:
    """Return whether a class is a pydantic model, without importing pydantic."""
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "model_validate_json")


def _from_datetime(value: datetime) -> str:
    offset = value.utcoffset()
    if offset is None:
        raise ValueError(f"{value!r} needs a time zone; give it one, such as tzinfo=UTC")
    if offset % timedelta(minutes=1):
        value = value.astimezone(UTC)  # RFC 3339 has no seconds in an offset
    return value.isoformat()


def _from_time(value: time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise ValueError(f"the offset of {value!r} depends on the date; use a datetime")
    return value.isoformat()


def _from_timedelta(value: timedelta) -> float:
    return value.total_seconds() if value.microseconds else value // timedelta(seconds=1)


def _from_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise ValueError(f"{value!r} cannot be JSON; use a finite number, or None")
    return str(value)


def _from_set(value: AbstractSet[Any]) -> list[Any]:
    kinds = set(map(type, value))
    if len(kinds) == 1 and kinds <= {str, int, float}:
        return sorted(value)
    # Many types have no order, and `<` of sets means subset.
    return sorted(value, key=encode)


_CONVERTERS: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (Enum, lambda value: value.value),
    (datetime, _from_datetime),  # before date, its base class
    (date, date.isoformat),
    (time, _from_time),
    (timedelta, _from_timedelta),
    (UUID, str),
    (Decimal, _from_decimal),
    (bytes, lambda value: base64.b64encode(value).decode()),
    (PurePath, str),
    (set, _from_set),
    (frozenset, _from_set),
)
