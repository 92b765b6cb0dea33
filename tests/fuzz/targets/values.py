"""JSON from others: TypeError or ValueError, or a value that encodes and restores again."""

import enum
import json
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Literal, NamedTuple
from uuid import UUID

from fuzz.source import Source
from tickwheel.consumer.request import task_request
from tickwheel.values.json.encode import decode, encode, exceeds_depth
from tickwheel.values.json.restore import restore


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Pair(NamedTuple):
    left: int
    right: str = "r"


@dataclass
class Order:
    number: int
    due: datetime | None = None
    lines: tuple["Order", ...] = ()


TYPES = (
    datetime, date, time, timedelta, UUID, Decimal, Path, bytes, Colour, Pair, Order, str | int,
    set[int], frozenset[str], dict[str, datetime], dict[int, list[date]], tuple[int, ...],
    tuple[UUID, bool], list[Order | None], Literal["a", 1], int | Decimal, bytes | None, float,
)  # fmt: skip


def depth_of(value):
    deep, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        deep += 1
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return deep


def run(data):
    source = Source(data)
    kind = source.pick((*TYPES, None))
    body = source.rest()
    try:
        value = decode(body)
    except ValueError:
        return
    deep = depth_of(value)
    assert exceeds_depth(body, 5) == (deep > 5), deep
    try:
        if kind is None:
            task_request(body)
            return
        made = restore(value, kind)
        text = encode(made)
    except (TypeError, ValueError):
        return
    again = restore(decode(text), kind)
    assert again == made or "NaN" in json.dumps(value) or made != made, (made, again)  # noqa: PLR0124
