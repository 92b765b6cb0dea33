"""Calls of functions as JSON: `Signature` packs the arguments of a call and unpacks a payload.

This module does not depend on stores, tasks or schedules.
"""

from __future__ import annotations

import inspect
import sys
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tickwheel.values.json.encode import convert_at, decode, encode, encode_carefully, errors_for
from tickwheel.values.json.restore import Plan, or_none, plan_for, resolve_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Signature:
    """The parameters of a function; converts a call to a payload, and a payload to a call.

    - `Signature.of(function)` takes every callable that `inspect.signature` supports: a bound
      method, a partial, a class or a callable object.
    - Type hints are resolved at the first `unpack`, so that a function may name types that are
      defined below it. A hint that cannot be resolved counts as missing.
    - A payload is a JSON array of positional arguments or an object of named ones.

    Cost: without hints that need conversion, a call is `encode` or `decode` and a count.
    """

    def __init__(
        self, name: str, signature: inspect.Signature, namespace: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        self._signature = signature
        self._namespace = namespace or {}
        parameters = signature.parameters.values()
        by_position = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        by_name = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self._required = {p.name for p in single if p.default is p.empty}
        self._names = {p.name for p in by_name}
        self._positions = by_position
        self._fewest = sum(p.default is p.empty for p in by_position)
        self._most = len(by_position)
        if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in by_name):
            self._most = -1  # no call has only positional arguments

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Return the signature of `function`; TypeError if Python has none."""
        inner = _innermost(function)
        name = getattr(inner, "__qualname__", type(inner).__qualname__)
        try:
            signature = _signature_of(function)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}() cannot be a task: {error}") from None
        return cls(name, signature, _globals_of(inner))

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return the payload of the call `function(*args, **kwargs)`.

        TypeError if the function does not accept the call, or if it needs both positional-only and
        named arguments: JSON has an array or an object, not both.
        """
        self._check(args, kwargs)
        payload = (self._by_name(args, kwargs) if args else dict(kwargs)) if kwargs else list(args)
        try:
            return encode(payload)
        except (TypeError, ValueError):
            named = self._signature.bind(*args, **kwargs).arguments
            encode_carefully(named, f"{self.name}(): ")  # its error has the parameter's name
            raise

    def unknown(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Return those of these names that the function has no parameter for."""
        known = self._signature.parameters
        return [] if self._rest[1] else [name for name in kwargs if name not in known]

    def unpack(self, body: bytes | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the named arguments in the payload `body`, restored.

        An array has positional arguments, an object named ones; null or an empty body is no
        argument, any other JSON value is one. TypeError if the function does not accept them.
        """
        payload = decode(body) if body else None
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if isinstance(payload, dict):
            kwargs = payload
        elif isinstance(payload, list):
            args = payload
        elif payload is not None:
            args = [payload]
        self._check(args, kwargs)
        if self._plans:
            with errors_for(f"{self.name}(): "):
                args, kwargs = self._restore(args, kwargs)
        return tuple(args), kwargs

    def restore_result(self, value: Any) -> Any:
        """Return a result of the function, decoded from JSON, as the type that it returns."""
        if self.result_plan is None or value is None:
            return value
        with errors_for(f"{self.name}(): "):
            return convert_at("its result", self.result_plan, value)

    def named(self, body: bytes | str) -> dict[str, Any]:
        """Return all arguments in the payload `body` by name, restored; without defaults."""
        args, kwargs = self.unpack(body)
        return dict(self._signature.bind(*args, **kwargs).arguments)

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError if the function does not accept the call; count first, which is fast."""
        if kwargs:
            fits = not args and self._required <= kwargs.keys() <= self._names
        else:
            fits = self._fewest <= len(args) <= self._most
        if not fits:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.name}(): {error}") from None

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._positions):
            nameless = "*args"
        else:
            given = self._positions[: len(args)]
            nameless = ", ".join(p.name for p in given if p.kind is p.POSITIONAL_ONLY)
        if nameless:
            raise TypeError(
                f"{self.name}(): {nameless} can only be positional, so no argument can be named:"
                " a payload is an array or an object"
            )
        names = [p.name for p in self._positions]
        return dict(zip(names, args, strict=False)) | dict(kwargs)

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        """The plans of the parameters that need one."""
        plans = {}
        for p in self._signature.parameters.values():
            if p.annotation is not p.empty:
                plan = plan_for(resolve_hint(p.annotation, self._namespace))
                plans[p.name] = or_none(plan, p.default)
        return {name: plan for name, plan in plans.items() if plan is not None}

    @cached_property
    def result_plan(self) -> Plan | None:
        """The plan of the type that the function returns, or None if JSON's types are enough."""
        hint = self._signature.return_annotation
        return (
            None if hint is self._signature.empty else plan_for(resolve_hint(hint, self._namespace))
        )

    @cached_property
    def _rest(self) -> tuple[str, str]:
        """The names of `*args` and `**kwargs`."""
        names = {p.kind: p.name for p in self._signature.parameters.values()}
        kinds = inspect.Parameter
        return names.get(kinds.VAR_POSITIONAL, ""), names.get(kinds.VAR_KEYWORD, "")

    def _restore(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        plans, (more, others) = self._plans, self._rest
        names = [p.name for p in self._positions]
        named = [
            convert_at(name, plans.get(name), item) for name, item in zip(names, args, strict=False)
        ]
        rest = [convert_at(more, plans.get(more), item) for item in args[len(names) :]]
        return named + rest, {
            name: convert_at(name, plans.get(name if name in self._names else others), item)
            for name, item in kwargs.items()
        }


def _innermost(function: Any) -> Any:
    """Return the function below partials and decorators."""
    while isinstance(function, partial):
        function = function.func
    return inspect.unwrap(function)


def _globals_of(function: Any) -> dict[str, Any]:
    if isinstance(function, type):
        function = function.__init__  # type: ignore[misc]
    elif not inspect.isroutine(function):
        function = type(function).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__globals__", {})


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        import annotationlib  # noqa: PLC0415 - new in 3.14

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)
