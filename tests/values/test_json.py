"""The serializer: what goes as JSON, what comes back, and what is said of the rest."""

from __future__ import annotations

import collections
import functools
import inspect
import json
import math
import random
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.values.json.call import Signature, decode, encode, restore
from tickwheel.values.json.encode import encode_carefully, exceeds_depth

ID = UUID("12345678-1234-5678-1234-567812345678")
NOON = datetime(2026, 3, 29, 12, tzinfo=UTC)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Word(StrEnum):
    YES = "yes"


class Shape(Enum):
    POINT = (0, 0)
    PAUSE = timedelta(seconds=1)


class Right(Flag):
    READ = 1
    WRITE = 2


class Labelled(str, Enum):  # noqa: UP042 - a StrEnum's value is its text
    """Its members' values are not the texts that they are."""

    ONE = ("one", 1)

    def __new__(cls, text, number):
        member = str.__new__(cls, text)
        member._value_ = number
        return member


class Point(NamedTuple):
    x: int
    when: date
    label: str = "none"


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal
    tags: frozenset[str] = frozenset()


@dataclass
class Order:
    id: UUID
    placed_at: datetime
    lines: list[Line] = field(default_factory=list)
    color: Color | None = None


@dataclass
class Node:
    """Holds its like, and its hint is text."""

    name: str
    children: list[Node] = field(default_factory=list)


@dataclass
class Square:
    side: int
    area: int = field(init=False)
    date: date = None  # called as its type is

    def __post_init__(self):
        if self.side < 0:
            raise ValueError("side must be 0 or more")
        self.area = self.side**2


class Movie(TypedDict):
    name: str
    shown_at: datetime
    director: NotRequired[UUID]


OrderId = NewType("OrderId", UUID)


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
            (Line("a", 1j), "price", "complex"),
            ({"tags": {("a", 1j)}}, "tags[1]", "complex"),
            (Point(1, print), "value[1]", "builtin_function_or_method"),
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
        assert str(refused.value).startswith(f"{place}: {kind} cannot go as JSON; use None, bool,")

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ({"a": [1.0, math.nan]}, r"a\[1\]: nan cannot"),
            ({"a": {"b": -math.inf}}, r"a\.b: -inf cannot"),
            ({"a": Decimal("NaN")}, r"a: Decimal\('NaN'\) cannot"),
            ({"a": ["x\ud800"]}, r"a\[0\]: 'x\\ud800' has half a surrogate pair"),
            ({"x\ud800": 1}, "has half a surrogate pair"),
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
            (b'["\xff"]', "not JSON: no UTF-8 at byte 2"),
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


class TestRestore:
    @pytest.mark.parametrize(
        ("value", "annotation", "restored"),
        [
            ("x", Any, "x"),
            ("x", object, "x"),
            ("x", int, "x"),
            (1, str, 1),
            (1, float, 1),
            ("x", TestDecode, "x"),
            (None, None, None),
            ("2026-03-29T12:00:00Z", datetime, NOON),
            ("2026-03-29", date, date(2026, 3, 29)),
            ("12:30:00", time, time(12, 30)),
            (1.5, timedelta, timedelta(seconds=1.5)),
            (str(ID), UUID, ID),
            ("1.50", Decimal, Decimal("1.50")),
            (1.1, Decimal, Decimal("1.1")),
            ("red", Color, Color.RED),
            (2, Level, Level.HIGH),
            ([0, 0], Shape, Shape.POINT),
            (1, Shape, Shape.PAUSE),
            (3, Right, Right.READ | Right.WRITE),
            ("one", Labelled, Labelled.ONE),
            ("AP8=", bytes, b"\x00\xff"),
            ("a/b", PurePosixPath, PurePosixPath("a/b")),
            ("a/b", Path, Path("a/b")),
            (["red"], list[Color], [Color.RED]),
            (["red"], list, ["red"]),
            (["red", "red"], set[Color], {Color.RED}),
            (["red"], frozenset[Color], frozenset({Color.RED})),
            ([1], typing.Set[int], {1}),  # noqa: UP006
            ([1], typing.AbstractSet[int], {1}),
            (["red", 1], tuple[Color, int], (Color.RED, 1)),
            (["red", "blue"], tuple[Color, ...], (Color.RED, Color.BLUE)),
            ([], tuple[()], ()),
            ([1, "a"], tuple, (1, "a")),
            ([1, "a"], tuple[int, *tuple[str, ...]], (1, "a")),
            (["red"], Sequence[Color], [Color.RED]),
            (["red"], Iterable[Color], [Color.RED]),
            ("red", Sequence[str], "red"),
            ({"a": "red"}, dict[str, Color], {"a": Color.RED}),
            ({"a": "red"}, Mapping[str, Color], {"a": Color.RED}),
            ({"a": 1}, dict, {"a": 1}),
            ({"1": 2}, dict[int, int], {1: 2}),
            ({"-1": 2}, dict[Any, int], {"-1": 2}),
            ({"2": 2}, dict[Level, int], {Level.HIGH: 2}),
            ({"red": 2}, dict[Color, int], {Color.RED: 2}),
            ({str(ID): 2}, dict[OrderId, int], {ID: 2}),
            (None, Optional[Color], None),  # noqa: UP045
            ("red", Color | None, Color.RED),
            ("x", int | None, "x"),
            ("green", Color | str, "green"),
            ("red", str | Color, "red"),
            ("2026-03-29", datetime | date, date(2026, 3, 29)),
            ("2026-03-29T12:00:00Z", date | datetime, NOON),
            (["2026-03-29"], list[int] | list[date], [date(2026, 3, 29)]),
            (True, int | Color | bool, True),
            (1, float | Color, 1),
            ("x", TestDecode | Color, "x"),
            ("red", TestDecode | Color, Color.RED),
            ("x", Any | Color, "x"),
            ({"side": 2}, Line | Square, Square(2)),
            ("a", Literal["a", 1], "a"),
            (1, Literal["a", 1], 1),
            ("red", Literal[Color.RED], Color.RED),
            (None, Literal["a", None], None),  # noqa: PYI061
            (str(ID), OrderId, ID),
            (str(ID), Annotated[UUID, "the id"], ID),
            (str(ID), typing.Final[UUID], ID),
            ([1, "2026-03-29"], Point, Point(1, date(2026, 3, 29))),
            ({"side": 3, "area": 9}, Square, Square(3)),
            ({"side": 3, "date": "2026-03-29"}, Square, Square(3, date=date(2026, 3, 29))),
            ({"side": 3, "date": None}, Square, Square(3)),
            (
                {"name": "a", "children": [{"name": "b"}]},
                Node,
                Node("a", [Node("b")]),
            ),
            (
                {"name": "a", "shown_at": "2026-03-29T12:00:00Z", "more": 1},
                Movie,
                {"name": "a", "shown_at": NOON, "more": 1},
            ),
            (5, typing.TypeVar("T"), 5),
        ],
    )
    def test_a_json_value_comes_back_as_its_annotation_says(self, value, annotation, restored):
        found = restore(value, annotation)
        assert found == restored
        assert type(found) is type(restored)

    @pytest.mark.parametrize(
        ("value", "annotation", "words"),
        [
            ("x", datetime, "value: 'x' is not datetime.datetime"),
            ("2026-03-29T12:00:00", datetime, "it needs a time zone"),
            (5, date, "value: 5 is not datetime.date"),
            ("x", timedelta, "'x' is not datetime.timedelta"),
            (True, timedelta, "True is not datetime.timedelta"),
            (1e300, timedelta, "1e+300 is not datetime.timedelta"),
            ("x", UUID, "'x' is not uuid.UUID"),
            ("x", Decimal, "'x' is not decimal.Decimal"),
            ("NaN", Decimal, "'NaN' is not decimal.Decimal"),
            ("?", bytes, "'?' is not bytes"),
            (5, PurePath, "5 is not pathlib."),
            ("green", Color, "'green' is not"),
            ({"a": 1}, list[int], "{'a': 1} is not list[int]"),
            ("red", list, "'red' is not list"),
            ("red", set[str], "'red' is not set[str]"),
            ([[]], set, "unhashable"),
            ([1], tuple[int, int], "[1] is not tuple[int, int]"),
            ([1], tuple[()], "[1] is not tuple[()]"),
            ([1], dict[str, int], "[1] is not dict[str, int]"),
            ({"x": 1}, dict[int, int], "x: 'x' is not int"),
            ({"a": [1, "x"]}, dict[str, list[date]], "a[0]: 1 is not datetime.date"),
            ("x", date | int, "'x' is not"),
            (True, date | int, "True is not"),
            ("b", Literal["a"], "'b' is not"),
            (True, Literal[1], "True is not"),
            ([1], Point, "when missing"),
            ([1, "2026-03-29", "a", "b"], Point, "4 items"),
            ({"side": -1}, Square, "side must be 0 or more"),
            ({}, Square, "side missing"),
            ({"side": 1, "colour": 1}, Square, "unexpected keyword argument 'colour'"),
            ([], Square, "[] is not"),
            ({"name": "a"}, Movie, "shown_at missing"),
            (
                {
                    "id": str(ID),
                    "placed_at": "2026-03-29T12:00:00Z",
                    "lines": [{"sku": "a", "price": []}],
                },
                Order,
                "lines[0].price: [] is not decimal.Decimal",
            ),
        ],
    )
    def test_a_value_that_does_not_fit_is_a_type_error_with_place_value_and_type(
        self, value, annotation, words
    ):
        with pytest.raises(TypeError) as refused:
            restore(value, annotation)
        assert words in str(refused.value)

    def test_the_order_of_a_union_counts_each_time(self):
        """Python holds `A | B` and `B | A` for equal."""
        text = "2026-03-29"
        assert restore(text, list[str] | date | str) == date(2026, 3, 29)
        assert restore(text, str | date | list[str]) == text
        assert restore(text, date | str | list[str]) == date(2026, 3, 29)

    def test_a_hint_that_cannot_be_resolved_counts_as_missing(self):
        @dataclass
        class Local:
            when: date
            other: Nowhere  # noqa: F821

        found = restore({"when": "2026-03-29", "other": "x"}, Local)
        assert found == Local(date(2026, 3, 29), "x")

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is of Python 3.12")
    def test_a_type_alias_is_what_it_names_and_may_name_itself(self):
        names: dict[str, Any] = {"date": date}
        exec("type Days = list[Days] | date", names)
        assert restore([["2026-03-29"]], names["Days"]) == [[date(2026, 3, 29)]]
        exec("type Broken = Nowhere", names)
        assert restore("x", names["Broken"]) == "x"

    def test_what_is_too_deep_is_a_value_error(self):
        deep: dict[str, Any] = {"name": "a"}
        for _ in range(2_000):
            deep = {"name": "a", "children": [deep]}
        with pytest.raises(ValueError, match="nested too deeply"):
            restore(deep, Node)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
OFFSETS = st.integers(-23 * 60, 23 * 60).map(lambda n: timezone(timedelta(minutes=n)))
MOMENTS = st.datetimes(
    min_value=datetime(2, 1, 1),  # noqa: DTZ001
    max_value=datetime(9998, 1, 1),  # noqa: DTZ001
    timezones=OFFSETS | st.just(UTC),
)
SPANS = st.timedeltas(timedelta(days=-49_000), timedelta(days=49_000))
SCALARS = [  # annotation, values
    (str, st.text()),
    (int, st.integers()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (type(None), st.none()),
    (datetime, MOMENTS),
    (date, st.dates()),
    (time, st.times(timezones=st.none() | OFFSETS)),
    (timedelta, SPANS),
    (UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Word, st.sampled_from(Word)),
    (Shape, st.sampled_from(Shape)),
    (Right, st.sampled_from([Right.READ, Right.WRITE, Right.READ | Right.WRITE])),
    (bytes, st.binary()),
    (
        PurePosixPath,
        st.text(st.characters(exclude_characters="\0", codec="utf-8")).map(PurePosixPath),
    ),
    (PureWindowsPath, st.sampled_from(["", "C:/a b", "a\\b"]).map(PureWindowsPath)),
    (Point, st.builds(Point, st.integers(), st.dates(), st.text())),
    (
        Line,
        st.builds(
            Line,
            st.text(),
            st.decimals(allow_nan=False, allow_infinity=False),
            st.frozensets(st.text()),
        ),
    ),
    (
        Order,
        st.builds(
            Order,
            st.uuids(),
            MOMENTS,
            st.lists(st.builds(Line, st.text(), st.just(Decimal(1)), st.just(frozenset()))),
            st.none() | st.sampled_from(Color),
        ),
    ),
    (
        Node,
        st.recursive(
            st.builds(Node, st.text(), st.just([])),
            lambda inner: st.builds(Node, st.text(), st.lists(inner)),
            max_leaves=5,
        ),
    ),
]
KEYS = [
    (str, st.text()),
    (int, st.integers()),
    (UUID, st.uuids()),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
]


def containers(inner):
    """Strategies of (annotation, strategy of values) around such ones."""
    kind, values = inner
    pairs = [
        (list[kind], st.lists(values, max_size=4)),
        (tuple[kind, ...], st.lists(values, max_size=4).map(tuple)),
        (tuple[kind, int], st.tuples(values, st.integers())),
        (kind | None, st.none() | values),
    ]
    pairs += [(dict[key, kind], st.dictionaries(keys, values, max_size=4)) for key, keys in KEYS]
    return st.sampled_from(pairs)


def hashable(pair):
    return pair[0] not in (Order, Node)


TYPED = st.recursive(
    st.sampled_from(SCALARS)
    | st.sampled_from([pair for pair in SCALARS if hashable(pair)]).flatmap(
        lambda pair: st.sampled_from(
            [(set[pair[0]], st.sets(pair[1])), (frozenset[pair[0]], st.frozensets(pair[1]))]
        )
    ),
    lambda inner: inner.flatmap(containers),
    max_leaves=3,
).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))


@given(TYPED)
def test_what_was_encoded_is_restored_by_its_type(typed):
    annotation, value = typed
    body = encode(value)
    assert restore(decode(body), annotation) == value
    assert encode_carefully(value) == body


@pytest.mark.parametrize(
    ("annotation", "values"), SCALARS, ids=lambda it: getattr(it, "__name__", "")
)
def test_each_type_is_restored(annotation, values):
    @given(values)
    def round_trip(value):
        found = restore(decode(encode(value)), annotation)
        assert found == value
        assert type(found) is type(value)

    round_trip()


@given(PLAIN)
def test_plain_data_is_what_the_json_module_makes_of_it(value):
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assert encode(value) == text.encode()
    assert decode(encode(value)) == value
    assert restore(value, Any) is value


@given(
    st.recursive(
        st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.none()
                | st.booleans()
                | st.floats()
                | st.integers(-1, 2)
                | st.sampled_from(["1", "true", "a", "1.5"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
)
def test_the_quick_way_and_the_careful_way_agree(value):
    def outcome(way):
        try:
            return way(value)
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    assert outcome(encode) == outcome(encode_carefully)


def close_order(order_id, reason="late", *, notify=False): ...


def later(order: Order, at: datetime | None = None, *more: date, **others: UUID): ...


def by_position(a, b: date = None, /, c=3): ...  # noqa: RUF013


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
            (by_position, (1,), {"c": 1}, r"by_position\(\): a can only go by position"),
            (lambda *a, b=1: None, (1,), {"b": 1}, r"\*args can only go by position"),
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
