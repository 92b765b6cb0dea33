"""`restore`: a JSON value comes back as the type of its annotation."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.values.json.encode import decode, encode, encode_carefully
from tickwheel.values.json.restore import restore
from values.json.examples import (
    ID,
    NOON,
    Color,
    Labelled,
    Level,
    Line,
    Movie,
    Node,
    Order,
    OrderId,
    Point,
    Right,
    Shape,
    Square,
    Unknown,
    Word,
)


class TestRestore:
    @pytest.mark.parametrize(
        ("value", "annotation", "restored"),
        [
            ("x", Any, "x"),
            ("x", object, "x"),
            ("x", int, "x"),
            (1, str, 1),
            (1, float, 1),
            ("x", Unknown, "x"),
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
            ("x", Unknown | Color, "x"),
            ("red", Unknown | Color, Color.RED),
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
            [  # type: ignore[misc]
                (set[pair[0]], st.sets(pair[1])),  # type: ignore[valid-type]
                (frozenset[pair[0]], st.frozensets(pair[1])),  # type: ignore[valid-type]
            ]
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
