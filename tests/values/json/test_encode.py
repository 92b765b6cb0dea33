"""`encode` and `decode`: the JSON of each type, and the error for the others."""

from __future__ import annotations

import collections
import json
import math
import random
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.values.json.encode import decode, encode, encode_carefully, exceeds_depth
from values.json.examples import (
    ID,
    NOON,
    Color,
    Labelled,
    Level,
    Line,
    Node,
    Point,
    Right,
    Shape,
    Word,
)


class TestEncode:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ({"a": [1, 2.5, None, True, "ü"]}, '{"a":[1,2.5,null,true,"ü"]}'),
            (2**70, "1180591620717411303424"),
            ((1, (2,)), "[1,[2]]"),
            (Point(1, date(2026, 1, 2)), '[1,"2026-01-02","none"]'),
            (Line("a", Decimal("1.50")), '{"sku":"a","price":"1.50","tags":[]}'),
            (NOON, '"2026-03-29T12:00:00+00:00"'),
            (NOON.astimezone(ZoneInfo("Europe/Berlin")), '"2026-03-29T14:00:00+02:00"'),
            (datetime(1900, 1, 1, tzinfo=ZoneInfo("Europe/Paris")), '"1899-12-31T23:50:39+00:00"'),
            (date(2026, 3, 29), '"2026-03-29"'),
            (time(12, 30), '"12:30:00"'),
            (time(12, 30, tzinfo=UTC), '"12:30:00+00:00"'),
            (timedelta(minutes=1.5), "90"),
            (timedelta(milliseconds=-1), "-0.001"),
            (ID, '"12345678-1234-5678-1234-567812345678"'),
            (Decimal("0.10"), '"0.10"'),
            (Color.RED, '"red"'),
            (Level.HIGH, "2"),
            (Word.YES, '"yes"'),
            (Shape.POINT, "[0,0]"),
            (Shape.PAUSE, "1"),
            (Right.READ | Right.WRITE, "3"),
            (Labelled.ONE, '"one"'),
            (b"\x00\xff", '"AP8="'),
            (PurePosixPath("a/b"), '"a/b"'),
            (Path("a"), '"a"'),
            (MappingProxyType({"a": ID}), '{"a":"12345678-1234-5678-1234-567812345678"}'),
            (collections.ChainMap({"a": 1}), '{"a":1}'),
            (collections.OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
            ({1: 2, -3: 4}, '{"1":2,"-3":4}'),
            ({ID: 1}, '{"12345678-1234-5678-1234-567812345678":1}'),
            ({Color.RED: Color.BLUE}, '{"red":"blue"}'),
            ({Word.YES: 1, Level.LOW: 2}, '{"yes":1,"1":2}'),
            ({"true": 1, "5": 2, "null": 3}, '{"true":1,"5":2,"null":3}'),
            ({3, 1, 20}, "[1,3,20]"),
            (set(), "[]"),
            ({"b", "a"}, '["a","b"]'),
            ({Color.RED, Color.BLUE}, '["blue","red"]'),
            ("", '""'),
            (None, "null"),
        ],
    )
    def test_a_value_goes_as(self, value, text):
        assert encode(value) == text.encode()
        assert encode_carefully(value) == text.encode()

    def test_equal_sets_give_the_same_bytes(self):
        items = [1, "a", None, 2.5, ID, Color.RED, (1, "x"), NOON, frozenset({1}), frozenset({2})]
        shuffled = [frozenset(random.Random(n).sample(items, len(items))) for n in range(20)]
        assert len({encode(set(many)) for many in shuffled}) == 1
        assert encode({frozenset({2, 3}), frozenset({1})}) == b"[[1],[2,3]]"

    @pytest.mark.parametrize(
        ("value", "place", "kind"),
        [
            ({"order": {"lines": [1, 2, 3, {"sku": object()}]}}, "order.lines[3].sku", "object"),
            ([object()], "value[0]", "object"),
            (object(), "value", "object"),
            ({"a b": {"c": 1j}}, "value['a b'].c", "complex"),
            ({"a": {"b c": 1j}}, "a['b c']", "complex"),
            (Line("a", 1j), "price", "complex"),  # type: ignore[arg-type]
            ({"tags": {("a", 1j)}}, "tags[1]", "complex"),
            (Point(1, print), "value[1]", "builtin_function_or_method"),  # type: ignore[arg-type]
            ({"m": MappingProxyType({"f": len})}, "m.f", "builtin_function_or_method"),
            ({"it": iter([])}, "it", "list_iterator"),
            ({"it": Line}, "it", "type"),
            ({"it": bytearray(b"a")}, "it", "bytearray"),
            ({"it": collections.deque()}, "it", "collections.deque"),
        ],
    )
    def test_an_unknown_type_is_named_with_its_place_and_what_is_allowed(self, value, place, kind):
        with pytest.raises(TypeError) as refused:
            encode(value)
        assert str(refused.value).startswith(f"{place}: {kind} cannot be JSON; use None, bool,")

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ({"a": [1.0, math.nan]}, r"a\[1\]: nan cannot"),
            ({"a": {"b": -math.inf}}, r"a\.b: -inf cannot"),
            ({"a": Decimal("NaN")}, r"a: Decimal\('NaN'\) cannot"),
            ({"a": ["x\ud800"]}, r"a\[0\]: 'x\\ud800' has a lone surrogate"),
            ({"x\ud800": 1}, "has a lone surrogate"),
            ({"a": datetime(2026, 1, 1)}, "a: .* needs a time zone"),  # noqa: DTZ001
            ({"a": time(1, tzinfo=ZoneInfo("Europe/Berlin"))}, "a: .* use a datetime"),
            ({1: 2, "1": 3}, "two keys become '1'"),
            ({"a": 10**5000}, "a: Exceeds the limit"),
        ],
    )
    def test_a_value_that_json_cannot_hold_is_named_with_its_place(self, value, words):
        with pytest.raises(ValueError, match=words):
            encode(value)

    @pytest.mark.parametrize(
        "key", [1.5, True, False, None, (1, 2), NOON, b"a", Shape.POINT, -1e300, 1e22]
    )
    def test_a_key_that_is_no_text_is_refused_by_name(self, key):
        for value in ({"a": {key: 1}}, {"a": {"b": 0, key: 1}}):
            with pytest.raises(TypeError) as refused:
                encode(value)
            assert str(refused.value).startswith(f"a: the key {key!r} (")

    def test_what_looks_like_a_key_inside_a_text_is_a_text(self):
        value = {"a": '{"true":1,"5":2}', "b": ',"null":'}
        assert decode(encode(value)) == value

    def test_a_cycle_is_a_value_error(self):
        itself: list[Any] = []
        itself.append(itself)
        node = Node("a")
        node.children.append(node)
        mapping: dict[str, Any] = {}
        mapping["m"] = MappingProxyType(mapping)
        twice = [itself, itself]
        for value in (itself, node, mapping, twice):
            with pytest.raises(ValueError, match="nested too deeply, or inside itself"):
                encode(value)

    def test_a_value_that_is_there_twice_is_no_cycle(self):
        shared = {1: ID}
        assert decode(encode([shared, shared])) == [{"1": str(ID)}] * 2

    @pytest.mark.parametrize(
        "around",
        [lambda inner: [inner], lambda inner: {"a": inner}, lambda inner: Node("a", inner)],
        ids=["list", "dict", "dataclass"],
    )
    def test_too_deep_is_a_value_error(self, around):
        deep: Any = None
        for _ in range(200_000):
            deep = around(deep)
        with pytest.raises(ValueError, match="nested too deeply"):
            encode(deep)

    def test_an_error_on_the_way_is_not_swallowed(self):
        class Broken(Mapping):
            def __getitem__(self, key):
                raise ZeroDivisionError

            def __iter__(self):
                return iter("a")

            def __len__(self):
                return 1

        with pytest.raises(ZeroDivisionError):
            encode({"a": Broken()})


class TestDecode:
    def test_bytes_and_text_are_read(self):
        assert decode(b'{"a":[1,2.5,null,"\xc3\xbc"]}') == {"a": [1, 2.5, None, "ü"]}
        assert decode(' "x" ') == "x"
        assert decode(memoryview(b"[1]")) == [1]

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b'{"a": 1,\n "b" 2}', r"not JSON: Expecting ':' delimiter at line 2 column 6"),
            (b"", r"not JSON: Expecting value at line 1 column 1 \(character 0\)"),
            (b"[1] 2", r"Extra data at line 1 column 5"),
            (b'["\xff"]', "not JSON: invalid UTF-8 at byte 2"),
            (b"NaN", "not JSON: NaN"),
            (b"[-Infinity]", "not JSON: -Infinity"),
            (b"[" * 200_000, "nested too deeply"),
            (b"1" * 5000, "Exceeds the limit"),
        ],
    )
    def test_what_is_not_json_is_a_value_error_that_says_where(self, body, words):
        with pytest.raises(ValueError, match=words):
            decode(body)


def depth_of(value):
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, parts), default=0)
    return 0


BRACKETS = st.text(alphabet='[]{}"\\, x')


class TestDepth:
    @given(
        st.recursive(BRACKETS, lambda inner: st.lists(inner) | st.dictionaries(BRACKETS, inner)),
        st.integers(0, 4),
    )
    def test_it_is_that_of_arrays_and_objects_whatever_stands_in_strings(self, value, depth):
        for indent in (None, 1):
            text = json.dumps(value, indent=indent).encode()
            assert exceeds_depth(text, depth) == (depth_of(value) > depth)

    @pytest.mark.parametrize("opening", ["[", '{"a":', '[{"[":'])
    def test_no_stack_is_needed(self, opening):
        body = opening.encode() * 100_000
        assert exceeds_depth(body, 99_999)
        assert not exceeds_depth(body, 200_000)
