"""`restore`: it converts a JSON value to the type of an annotation.

A text in JSON may have been a date, a path, or a text; the annotation tells which. An annotation
becomes a plan, a function of the value, which is used many times; None is the plan to do nothing.
"""

from __future__ import annotations

import base64
import inspect
import re
import sys
import types
import typing
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import Any, get_args, get_origin
from uuid import UUID

from tickwheel.values.json.encode import Misfit, convert_at, encode, errors_for, is_model


def restore(value: Any, annotation: Any) -> Any:
    """Return the JSON value `value` as the type `annotation`.

    - Any, a class that is not in the table of `encode`, and str, int, float and bool leave it
      unchanged: a plain type is never converted to another.
    - For a union, the first member that fits counts; an unknown class counts as the last.
    - TypeError for a value that does not fit, with its place and the type.
    """
    plan = plan_for(annotation)
    with errors_for():
        return value if plan is None else plan(value)


Plan = Callable[[Any], Any]  # converts a JSON value to a type


def _unfit(value: Any, annotation: Any, why: str = "") -> Misfit:
    return Misfit(TypeError, f"{value!r:.100} is not {inspect.formatannotation(annotation)}{why}")


def plan_for(annotation: Any, strict: bool = False) -> Plan | None:
    """Return the plan for `annotation`. A strict plan also checks plain types, for a union."""
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if isinstance(origin, typing.NewType):
        return plan_for(origin.__supertype__, strict)
    if origin in _WRAPPERS:
        return plan_for(args[0], strict) if args else None
    if origin in (typing.Union, types.UnionType):
        return _union(annotation, args, strict)
    if origin is typing.Literal:
        return _literal(annotation, args)
    if type(origin).__name__ == "TypeAliasType":  # the `type` statement of Python 3.12
        return _alias(origin, strict)
    if origin is None:
        origin = types.NoneType
    return _for_class(annotation, origin, args, strict) if isinstance(origin, type) else None


def _for_class(annotation: Any, kind: Any, args: tuple[Any, ...], strict: bool) -> Plan | None:
    if kind in _PLAIN:
        return _exact(kind) if strict else None
    if kind in (list, Sequence, MutableSequence, Collection, Iterable):
        return _list(annotation, kind, args, strict)
    if kind in (set, frozenset, AbstractSet, MutableSet):
        return _set(annotation, kind, args, strict)
    if kind in (dict, Mapping, MutableMapping):
        return _dict(annotation, args, strict)
    if kind is tuple:
        return _tuple(annotation, args, strict)
    if issubclass(kind, Enum):
        return _enum(kind)
    if _is_record(kind):
        return _model(kind) if is_model(kind) else _record(kind, strict)
    for base, accepted, make in _SCALARS:
        if issubclass(kind, base):
            return _scalar(kind, accepted, make)
    return None


_WRAPPERS = [
    getattr(typing, name)
    for name in ("Annotated", "Final", "ClassVar", "Required", "NotRequired", "ReadOnly")
    if hasattr(typing, name)
]
_PLAIN: dict[type, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (float, int),
    bool: (bool,),
    types.NoneType: (types.NoneType,),
}


def _exact(kind: type) -> Plan:
    def plan(value: Any) -> Any:
        if type(value) not in _PLAIN[kind]:
            raise _unfit(value, kind)
        return value

    return plan


def or_none(plan: Plan | None, default: Any) -> Plan | None:
    """Return a plan that accepts None if None is the default: annotations often omit it."""
    if plan is None or default is not None:
        return plan
    return lambda value: None if value is None else plan(value)


def _union(annotation: Any, members: tuple[Any, ...], strict: bool) -> Plan | None:
    if not strict and all(plan_for(member) is None for member in members):
        return None
    plans = [plan_for(member, strict=True) for member in members]
    known = [plan for plan in plans if plan is not None]

    def plan(value: Any) -> Any:
        for member in known:
            with suppress(Misfit):
                return member(value)
        if len(known) < len(plans):
            return value
        raise _unfit(value, annotation)

    return plan


def _literal(annotation: Any, choices: tuple[Any, ...]) -> Plan:
    by_json = {encode(choice): choice for choice in reversed(choices)}

    def plan(value: Any) -> Any:
        json_text = encode(value)
        if json_text not in by_json:
            raise _unfit(value, annotation)
        return by_json[json_text]

    return plan


@lru_cache(maxsize=1024)
def _alias(alias: Any, strict: bool) -> Plan:
    """Return a plan that is built at its first use: an alias may refer to itself."""

    @lru_cache(maxsize=1)
    def actual() -> Plan:
        with suppress(NameError):
            return plan_for(alias.__value__, strict) or _unchanged
        return _unchanged

    def plan(value: Any) -> Any:
        return actual()(value)

    return plan


def _unchanged(value: Any) -> Any:
    return value


def _array(value: Any, annotation: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _unfit(value, annotation)
    return value


def _each(plan: Plan | None, items: list[Any]) -> list[Any]:
    return (
        items if plan is None else [convert_at(index, plan, it) for index, it in enumerate(items)]
    )


def _list(annotation: Any, kind: type, args: tuple[Any, ...], strict: bool) -> Plan:
    item = plan_for(args[0], strict) if args else None
    lenient = kind is not list and not strict  # a str is a Sequence, too

    def plan(value: Any) -> Any:
        if lenient and not isinstance(value, list):
            return value
        return _each(item, _array(value, annotation))

    return plan


def _set(annotation: Any, kind: type, args: tuple[Any, ...], strict: bool) -> Plan:
    item = plan_for(args[0], strict) if args else None
    make: Callable[[list[Any]], Any] = frozenset if kind is frozenset else set

    def plan(value: Any) -> Any:
        items = _each(item, _array(value, annotation))
        try:
            return make(items)
        except TypeError as error:  # an item that cannot be in a set
            raise _unfit(value, annotation, f": {error}") from None

    return plan


def _tuple(annotation: Any, args: tuple[Any, ...], strict: bool) -> Plan:
    if args[1:] == (...,):
        item = plan_for(args[0], strict)
        return lambda value: tuple(_each(item, _array(value, annotation)))
    if (not args and annotation != tuple[()]) or any(map(_is_unpacked, args)):
        return lambda value: tuple(_array(value, annotation))
    plans = [plan_for(arg, strict) for arg in args]

    def plan(value: Any) -> Any:
        if len(_array(value, annotation)) != len(plans):
            raise _unfit(value, annotation)
        return tuple(map(convert_at, range(len(plans)), plans, value))

    return plan


def _is_unpacked(arg: Any) -> bool:
    """Return whether `arg` is a `*tuple[...]` inside a tuple."""
    return getattr(arg, "__unpacked__", False) or get_origin(arg) is typing.Unpack


def _dict(annotation: Any, args: tuple[Any, ...], strict: bool) -> Plan:
    key, item = (_key(args[0]), plan_for(args[1], strict)) if args else (None, None)

    def plan(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _unfit(value, annotation)
        if key is None and item is None:
            return value
        return {
            convert_at(text, key, text): convert_at(text, item, entry)
            for text, entry in value.items()
        }

    return plan


def _key(annotation: Any) -> Plan | None:
    """Return the plan for a key; JSON keys are text, even those of an int."""
    while isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    if not (isinstance(annotation, type) and issubclass(annotation, int)) or annotation is bool:
        return plan_for(annotation)
    number = plan_for(annotation) or _unchanged

    def plan(text: str) -> Any:
        if not re.fullmatch("-?[0-9]{1,4000}", text):
            raise _unfit(text, annotation)
        return number(int(text))

    return plan


class Record:
    """The plan for a class with named fields, built at its first use: a class may contain itself.

    - A dataclass is an object; unknown fields, and missing ones without a default, are errors.
    - A NamedTuple is an array; fields with a default may be missing at its end.
    - A TypedDict is an object and stays a dict; keys that it does not name stay unchanged.
    """

    def __init__(self, kind: Any, strict: bool) -> None:
        self._kind = kind
        self._strict = strict

    def __call__(self, value: Any) -> Any:
        if _is_named_tuple(self._kind):
            given = self._by_position(_array(value, self._kind))
        elif isinstance(value, dict):
            given = value
        else:
            raise _unfit(value, self._kind)
        missing = self._required - given.keys()
        if missing:
            raise _unfit(value, self._kind, f": {', '.join(sorted(missing))} missing")
        restored = {name: convert_at(name, self._plans.get(name), it) for name, it in given.items()}
        if typing.is_typeddict(self._kind):
            return restored
        try:
            return self._kind(**{k: v for k, v in restored.items() if k not in self._derived})
        except (TypeError, ValueError) as error:
            raise _unfit(value, self._kind, f": {error}") from error

    def _by_position(self, items: list[Any]) -> dict[str, Any]:
        if len(items) > len(self._kind._fields):
            raise _unfit(items, self._kind, f": {len(items)} items")
        return dict(zip(self._kind._fields, items, strict=False))

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        """The fields with a default, and its value if it is constant."""
        if is_dataclass(self._kind):
            return {
                field.name: field.default
                for field in fields(self._kind)
                if field.default is not MISSING or field.default_factory is not MISSING
            }
        return getattr(self._kind, "_field_defaults", {})

    @cached_property
    def _derived(self) -> set[str]:
        """The fields that are not parameters of the class."""
        if not is_dataclass(self._kind):
            return set()
        return {field.name for field in fields(self._kind) if not field.init}

    @cached_property
    def _required(self) -> set[str]:
        if typing.is_typeddict(self._kind):
            hints = self._hints.items()
            optional = {name for name, hint in hints if get_origin(hint) is typing.NotRequired}
            return set(self._kind.__required_keys__) - optional
        if is_dataclass(self._kind):
            names = {field.name for field in fields(self._kind)}
        else:
            names = set(self._kind._fields)
        return names - self._defaults.keys() - self._derived

    @cached_property
    def _hints(self) -> dict[str, Any]:
        hints: dict[str, Any] = {}
        for base in reversed(self._kind.__mro__):
            module = getattr(sys.modules.get(base.__module__), "__dict__", {})
            for name, annotation in _annotations(base).items():
                hints[name] = resolve_hint(annotation, module, dict(vars(base)))
        return hints

    @cached_property
    def _plans(self) -> dict[str, Plan | None]:
        return {
            name: or_none(plan_for(hint, self._strict), self._defaults.get(name, MISSING))
            for name, hint in self._hints.items()
        }


@lru_cache(maxsize=1024)
def _record(kind: Any, strict: bool) -> Plan:
    return Record(kind, strict)


def _model(kind: Any) -> Plan:
    """Return the plan for a pydantic model, which validates JSON itself."""

    def plan(value: Any) -> Any:
        try:
            return kind.model_validate_json(encode(value))
        except ValueError as error:
            raise _unfit(value, kind, f": {error}") from error

    return plan


def _is_record(kind: type) -> bool:
    return (
        is_dataclass(kind) or typing.is_typeddict(kind) or _is_named_tuple(kind) or is_model(kind)
    )


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _enum(kind: type[Enum]) -> Plan:
    @lru_cache(maxsize=1)
    def by_json() -> dict[bytes, Enum]:
        """Return the members by their JSON, for values that JSON changes, such as a tuple."""
        members: dict[bytes, Enum] = {}
        for member in kind.__members__.values():
            with suppress(TypeError, ValueError):
                members.setdefault(encode(member), member)
        return members

    def plan(value: Any) -> Any:
        with suppress(TypeError, ValueError):
            return kind(value)
        with suppress(KeyError):
            return by_json()[encode(value)]
        raise _unfit(value, kind)

    return plan


def _scalar(kind: Any, accepted: tuple[type, ...], make: Callable[[Any, Any], Any]) -> Plan:
    def plan(value: Any) -> Any:
        if type(value) not in accepted:
            raise _unfit(value, kind)
        try:
            return make(kind, value)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise _unfit(value, kind, f": {error}") from None

    return plan


def _to_datetime(kind: Any, text: str) -> datetime:
    made: datetime = kind.fromisoformat(text)
    if made.tzinfo is None:
        raise ValueError("it needs a time zone")
    return made


def _to_decimal(kind: Any, value: str | float) -> Decimal:
    made: Decimal = kind(str(value))
    if not made.is_finite():
        raise ValueError("it is not finite")
    return made


_SCALARS: tuple[tuple[type, tuple[type, ...], Callable[[Any, Any], Any]], ...] = (
    (datetime, (str,), _to_datetime),
    (date, (str,), lambda kind, text: kind.fromisoformat(text)),
    (time, (str,), lambda kind, text: kind.fromisoformat(text)),
    (timedelta, (int, float), lambda kind, seconds: kind(seconds=seconds)),
    (UUID, (str,), lambda kind, text: kind(text)),
    (Decimal, (str, int, float), _to_decimal),
    (bytes, (str,), lambda kind, text: kind(base64.b64decode(text, validate=True))),
    (PurePath, (str,), lambda kind, text: kind(text)),
)


def _annotations(kind: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib  # noqa: PLC0415 - new in 3.14

        return annotationlib.get_annotations(kind, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(kind)


def resolve_hint(
    annotation: Any, module: dict[str, Any], inner: dict[str, Any] | None = None
) -> Any:
    """Return `annotation` with all its names resolved; Any if that fails."""
    holder = type("holder", (), {"__annotations__": {"hint": annotation}})
    try:  # the module's names before the class's: a field may have the name of its type
        return typing.get_type_hints(holder, inner or {}, module, include_extras=True)["hint"]
    except Exception:  # noqa: BLE001 - an annotation may be any expression
        return Any
