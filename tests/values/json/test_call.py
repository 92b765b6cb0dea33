"""`Signature`: a call becomes a payload, and a payload a call."""

from __future__ import annotations

import functools
import inspect
import math
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from tickwheel.values.json.call import Signature
from tickwheel.values.json.encode import encode
from values.json.examples import (
    ID,
    NOON,
    Color,
    Line,
    Node,
    Order,
)


def close_order(order_id, reason="late", *, notify=False): ...


def later(order: Order, at: datetime | None = None, *more: date, **others: UUID): ...


def by_position(a, b: date = None, /, c=3): ...  # type: ignore[assignment]  # noqa: RUF013


class Shop:
    def close(self, order_id: UUID, when: date): ...

    @classmethod
    def open(cls, when: date): ...

    def __call__(self, when: date): ...


class TestPack:
    @pytest.mark.parametrize(
        ("function", "args", "kwargs", "payload"),
        [
            (close_order, ("o-1",), {}, '["o-1"]'),
            (close_order, ("o-1", "x"), {}, '["o-1","x"]'),
            (close_order, (), {"order_id": "o-1"}, '{"order_id":"o-1"}'),
            (close_order, (), {"order_id": 1, "notify": True}, '{"order_id":1,"notify":true}'),
            (close_order, ("o-1",), {"notify": True}, '{"order_id":"o-1","notify":true}'),
            (close_order, ([1, 2],), {}, "[[1,2]]"),
            (close_order, (None,), {}, "[null]"),
            (lambda: None, (), {}, "[]"),
            (lambda *a: None, (1, 2), {}, "[1,2]"),
            (lambda a, **kw: None, (1,), {"b": 2}, '{"a":1,"b":2}'),
            (lambda **kw: None, (), {"a": 1, "b": 2}, '{"a":1,"b":2}'),
            (by_position, (1, None, 2), {}, "[1,null,2]"),
            (functools.partial(close_order, "o-1"), ("x",), {}, '["x"]'),
            (
                functools.partial(close_order, notify=True),
                ("o",),
                {"reason": 1},
                '{"order_id":"o","reason":1}',
            ),
            (Shop().close, (ID, date(2026, 1, 1)), {}, f'["{ID}","2026-01-01"]'),
        ],
    )
    def test_a_call_is_an_array_or_an_object(self, function, args, kwargs, payload):
        signature = Signature.of(function)
        assert signature.pack(args, kwargs) == payload.encode()
        assert bound(function, *signature.unpack(payload)) == bound(function, args, kwargs)

    @pytest.mark.parametrize(
        ("function", "args", "kwargs", "words"),
        [
            (close_order, (), {}, r"close_order\(\): missing a required argument: 'order_id'"),
            (close_order, (1, 2, 3), {}, r"close_order\(\): too many positional arguments"),
            (close_order, (1,), {"x": 1}, "got an unexpected keyword argument 'x'"),
            (close_order, (), {"order_id": 1, "x": 1}, "got an unexpected keyword argument 'x'"),
            (close_order, (1,), {"order_id": 1}, "multiple values for argument 'order_id'"),
            (lambda *, a: None, (), {}, "missing a required.* 'a'"),
            (lambda *, a: None, (1,), {}, "too many positional arguments"),
            (by_position, (), {"a": 1}, "'a'"),
            (by_position, (1,), {"c": 1}, r"by_position\(\): a can only be positional"),
            (lambda *a, b=1: None, (1,), {"b": 1}, r"\*args can only be positional"),
        ],
    )
    def test_a_call_that_cannot_be_is_a_type_error(self, function, args, kwargs, words):
        with pytest.raises(TypeError, match=words):
            Signature.of(function).pack(args, kwargs)

    def test_an_argument_that_cannot_go_is_named_by_its_parameter(self):
        signature = Signature.of(close_order)
        with pytest.raises(
            TypeError, match=r"^close_order\(\): order_id.lines\[1\]: object cannot"
        ):
            signature.pack(({"lines": [1, object()]},), {})
        with pytest.raises(TypeError, match=r"^close_order\(\): reason: object cannot"):
            signature.pack(("o-1",), {"reason": object()})
        with pytest.raises(ValueError, match=r"^close_order\(\): reason: nan cannot"):
            signature.pack(("o-1", math.nan), {})


def bound(function, args, kwargs):
    found = inspect.signature(function).bind(*args, **kwargs).arguments
    return {name: encode(value) for name, value in found.items()}


class TestUnpack:
    @pytest.mark.parametrize(
        ("body", "args", "kwargs"),
        [
            (b'["o-1"]', ("o-1",), {}),
            (b'{"order_id": "o-1"}', (), {"order_id": "o-1"}),
            (b'"o-1"', ("o-1",), {}),
            (b"5", (5,), {}),
            (b"false", (False,), {}),
        ],
    )
    def test_an_array_is_by_position_an_object_by_name_another_value_the_only_one(
        self, body, args, kwargs
    ):
        assert Signature.of(close_order).unpack(body) == (args, kwargs)

    @pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", ""])
    def test_nothing_is_no_arguments(self, body):
        assert Signature.of(lambda: None).unpack(body) == ((), {})

    def test_arguments_are_restored_by_annotation(self):
        order = Order(ID, NOON, [Line("a", Decimal("1.5"), frozenset({"x"}))], Color.RED)
        days = (date(2026, 1, 1), date(2026, 1, 2))
        signature = Signature.of(later)
        assert signature.unpack(signature.pack((order, NOON, *days), {})) == (
            (order, NOON, *days),
            {},
        )
        named = {"order": order, "at": None, "x": ID}
        assert signature.unpack(signature.pack((), named)) == ((), named)
        assert signature.unpack(signature.pack((order,), {"x": ID})) == (
            (),
            {"order": order, "x": ID},
        )

    def test_a_default_of_none_needs_no_optional(self):
        signature = Signature.of(by_position)
        assert signature.unpack(b'[1, "2026-01-01"]') == ((1, date(2026, 1, 1)), {})
        assert signature.unpack(b"[1, null]") == ((1, None), {})

    @pytest.mark.parametrize(
        "function", [Shop.open, Shop(), functools.partial(Shop().close, ID), Shop().open]
    )
    def test_methods_partials_and_callables_are_restored(self, function):
        assert Signature.of(function).unpack(b'["2026-01-01"]') == ((date(2026, 1, 1),), {})

    def test_a_class_and_a_decorated_function_are_restored(self):
        @functools.wraps(later)
        def wrapped(*args, **kwargs): ...

        body = encode([Node("a")])
        assert Signature.of(Node).unpack(b'["a", [{"name": "b"}]]') == (("a", [Node("b")]), {})
        with pytest.raises(TypeError, match=r"later\(\): order: .* id, placed_at missing"):
            Signature.of(wrapped).unpack(body)

    def test_a_coroutine_function_is_a_function(self):
        async def work(when: date): ...

        assert Signature.of(work).unpack(b'["2026-01-01"]') == ((date(2026, 1, 1),), {})

    def test_hints_are_looked_up_at_the_first_use(self):
        names: dict[str, Any] = {}
        exec("def work(it: 'Later', other: 'Never' = 1): ...", names)
        signature = Signature.of(names["work"])
        names["Later"] = date
        assert signature.unpack(b'["2026-01-01", "x"]') == ((date(2026, 1, 1), "x"), {})

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"[]", r"later\(\): missing a required argument: 'order'"),
            (b"{}", r"later\(\): missing a required argument: 'order'"),
            (b"[5]", r"later\(\): order: 5 is not"),
            (b'{"order": {"id": 5, "placed_at": 1}}', r"later\(\): order.id: 5 is not uuid.UUID"),
        ],
    )
    def test_a_payload_that_does_not_fit_is_a_type_error_with_function_and_place(self, body, words):
        with pytest.raises(TypeError, match=words):
            Signature.of(later).unpack(body)

    def test_a_payload_by_name_cannot_name_what_goes_by_position(self):
        with pytest.raises(TypeError, match=r"by_position\(\): .*'a'"):
            Signature.of(by_position).unpack(b'{"a": 1}')

    def test_what_is_not_json_is_a_value_error(self):
        with pytest.raises(ValueError, match="not JSON"):
            Signature.of(later).unpack(b"{")

    def test_what_has_no_signature_is_a_type_error(self):
        for thing in (5, dict):
            with pytest.raises(TypeError, match="cannot be a task"):
                Signature.of(thing)
