"""Classes of every kind that the JSON modules convert."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from typing import NamedTuple, NewType, NotRequired, TypedDict
from uuid import UUID

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
    date: date = None  # type: ignore[assignment]  # called as its type is

    def __post_init__(self):
        if self.side < 0:
            raise ValueError("side must be 0 or more")
        self.area = self.side**2


class Movie(TypedDict):
    name: str
    shown_at: datetime
    director: NotRequired[UUID]


OrderId = NewType("OrderId", UUID)


class Unknown:
    """A class that the JSON modules do not convert."""
