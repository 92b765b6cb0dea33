"""`Cron` and `Interval`: the next firing of a schedule.

Pure: no clock, no store, no tasks. Moments are UTC, as integer milliseconds since 1970: a function
takes an int and returns the first firing after it.

When the clocks of a zone change, for example in Berlin:

- A skipped local time fires once, at the next valid instant: `30 2 * * *` fires at 03:00 on the day
  on which 02:00 becomes 03:00. Several skipped times are one firing, also together with a regular
  firing at that instant.
- A repeated local time fires once, the first time.
- An expression for every hour of the day (`*`, or an equivalent) follows elapsed time instead: it
  fires whenever the local clock shows a time that it names. `*/15 * * * *` fires every fifteen
  minutes through the repeated hour and the skipped one.
"""

from __future__ import annotations

from calendar import monthrange
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tickwheel.arguments import as_int, int_text, nanoseconds
from tickwheel.errors import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH_DAY = EPOCH.toordinal()
DAY_SECONDS = 86_400
DAY_MINUTES = 1_440
FIRST_YEAR, LAST_YEAR = 2, 9998  # a year inside the range of datetime, to leave room for offsets
FIRST_MS, LAST_MS = (
    (date(year, 1, 1).toordinal() - EPOCH_DAY) * DAY_SECONDS * 1_000
    for year in (FIRST_YEAR, LAST_YEAR + 1)
)
MILLISECOND_NS = 1_000_000


@dataclass(frozen=True, slots=True, repr=False)
class Cron:
    """A cron expression of five fields (minute hour day month weekday) in a time zone.

    - A field is `*`, a number, a range `9-17`, a step `*/5`, `10-40/10` or `10/10`, or a list of
      these; months and weekdays may be names; Sunday is 0 or 7.
    - Day `L` is the last of the month; weekday `mon#2` the second Monday, `friL` the last Friday.
    - If both day and weekday are restricted, either is enough. A field that starts with `*` (`*/2`,
      too) is not restricted: then both must match. This is cron's own rule.
    - `@hourly`, `@daily` or `@midnight`, `@weekly`, `@monthly`, `@yearly` or `@annually`.
    - `tz` is an IANA name; the rules for clock changes are at the top of this module.
    - Immutable; equal when expression and zone are spelled alike.

    Cost: a few microseconds per firing, regardless of its distance.
    """

    expression: str
    tz: str = "UTC"
    _calendar: Calendar = field(init=False, compare=False)
    _zone: Zone = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.expression, str):
            raise TypeError(f"a cron expression must be a str, got {self.expression!r:.100}")
        words = self.expression.split()
        object.__setattr__(self, "expression", " ".join(words))
        object.__setattr__(self, "_calendar", _parse(self.expression))
        object.__setattr__(self, "_zone", Zone(zone_named(self.tz)))

    def after(self, moment_ms: int) -> int:
        """Return the first firing strictly after `moment_ms`."""
        found = self._after(_moment("moment_ms", moment_ms))
        if found is None:
            raise OutOfRange(f"{self} does not fire between {moment_ms} and the year {LAST_YEAR}")
        return found

    def between(self, after_ms: int, until_ms: int) -> Iterator[int]:
        """Return all firings after `after_ms`, up to and including `until_ms`, in order."""
        start, end = _moment("after_ms", after_ms), as_int("until_ms", until_ms)
        return _walk(self._after, start, end)

    def __str__(self) -> str:
        return self.expression

    def __repr__(self) -> str:
        return f"Cron({self.expression!r}, tz={self.tz!r})"

    def _after(self, moment_ms: int) -> int | None:
        if moment_ms >= LAST_MS:
            return None
        find = self._by_elapsed_time if self._calendar.every_hour else self._by_local_time
        found = find(moment_ms // 1_000)
        return None if found is None else found * 1_000

    def _by_local_time(self, moment: int) -> int | None:
        """Return the first instant after `moment` that first shows or passes a named time."""
        minute = (moment + self._zone.offset(moment)) // 60
        while (found := self._calendar.at_or_after(minute + 1)) is not None:
            at, _ = self._zone.first(found * 60)
            if at > moment:
                return at
            minute = found  # in the repeated hour: it fired the first time
        return None

    def _by_elapsed_time(self, moment: int) -> int | None:
        """Return the first instant after `moment` at which the local clock shows a named time."""
        zone, offset = self._zone, self._zone.offset(moment)
        minute = (moment + offset) // 60 + 1
        while (found := self._calendar.at_or_after(minute)) is not None:
            at = found * 60 - offset
            # Clocks go back by at most a day, so a change further away than that
            # cannot repeat a local time that has passed here.
            near = min(at, moment + DAY_SECONDS)
            later = zone.offset(near)
            if later == offset and near == at:
                return at
            if later < offset:
                moment = zone.change(moment, near)  # local times repeat from here
            else:
                at, is_shown = zone.first(found * 60)
                if is_shown:
                    return at
                moment = at  # the end of the gap that `found` is in
            offset = zone.offset(moment)
            minute = -((moment + offset) // -60)
        return None


@dataclass(frozen=True, slots=True)
class Interval:
    """Every `seconds` of elapsed time, on the grid of `anchor_ms` plus n periods.

    - The period is at least 0.001 s. A grid point between two milliseconds fires at the later one:
      never early, and without accumulating the error.
    - Immutable; equal by value.
    """

    seconds: float
    anchor_ms: int = 0
    _period_ns: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        period = nanoseconds("seconds", self.seconds)
        if period < MILLISECOND_NS:
            raise ValueError(f"seconds must be at least 0.001, got {self.seconds!r:.100}")
        object.__setattr__(self, "anchor_ms", as_int("anchor_ms", self.anchor_ms))
        object.__setattr__(self, "_period_ns", period)

    def after(self, moment_ms: int) -> int:
        """Return the first firing strictly after `moment_ms`."""
        elapsed = as_int("moment_ms", moment_ms) - self.anchor_ms
        periods = elapsed * MILLISECOND_NS // self._period_ns + 1
        return self.anchor_ms - (periods * self._period_ns // -MILLISECOND_NS)

    def between(self, after_ms: int, until_ms: int) -> Iterator[int]:
        """Return all firings after `after_ms`, up to and including `until_ms`, in order."""
        return _walk(self.after, as_int("after_ms", after_ms), as_int("until_ms", until_ms))


def _walk(after: Callable[[int], int | None], moment: int, until: int) -> Iterator[int]:
    found = after(moment)
    while found is not None and found <= until:
        yield found
        found = after(found)


def _moment(name: str, value: object) -> int:
    moment = as_int(name, value)
    if not FIRST_MS <= moment < LAST_MS:
        raise OutOfRange(
            f"{name} must be milliseconds since 1970, from the year {FIRST_YEAR} to {LAST_YEAR}, "
            f"got {int_text(moment)}"
        )
    return moment


@dataclass(frozen=True, slots=True)
class Zone:
    """A time zone in whole seconds: instants are since 1970 in UTC, local times as if in UTC.

    No zone has ever changed its clocks twice within three days, nor set them back by more than one.
    """

    tzinfo: tzinfo

    def offset(self, at: int) -> int:
        """Return the seconds that local clocks are ahead of UTC at the instant `at`."""
        return _seconds((EPOCH + timedelta(seconds=at)).astimezone(self.tzinfo).utcoffset())

    def first(self, local: int) -> tuple[int, bool]:
        """Return the first instant that shows or passes `local`, and whether it shows it."""
        wall = EPOCH.replace(tzinfo=self.tzinfo) + timedelta(seconds=local)  # fold=0: the first
        before = _seconds(wall.utcoffset())
        at = local - before
        after = self.offset(at)
        if after == before:
            return at, True
        return self.change(local - after, at), False

    def change(self, early: int, late: int) -> int:
        """Return the instant of the only change of the offset between `early` and `late`."""
        offset = self.offset(late)
        while late - early > 1:
            middle = (early + late) // 2
            if self.offset(middle) == offset:
                late = middle
            else:
                early = middle
        return late


def _seconds(offset: timedelta | None) -> int:
    assert offset is not None  # every named zone has one
    return offset.days * DAY_SECONDS + offset.seconds


def zone_named(name: str) -> tzinfo:
    """Return a time zone by its IANA name, or raise ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"tz must be the name of a time zone, got {name!r:.100}")
    if name == "UTC":
        return UTC  # needs no zone database
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # a folder's name is an OSError
        raise ValueError(
            f"unknown time zone {name!r:.100}: use an IANA name such as 'Europe/Berlin', or 'UTC'"
        ) from None


@dataclass(frozen=True, slots=True)
class Calendar:
    """The local minutes that an expression names, in any zone.

    Sets of small numbers are ints, with bit n set for n. The days of a month that match depend only
    on the weekday of its first day (Monday is 0) and on its length: 28 kinds of month, made once.
    """

    minutes: int
    hours: int
    months: int
    days: dict[tuple[int, int], int]

    @property
    def every_hour(self) -> bool:
        """Whether all hours of the day match."""
        return self.hours == (1 << 24) - 1

    def fires(self) -> bool:
        """Return whether any day ever matches: each month starts on each weekday in some year."""
        lengths = {2: (28, 29), 4: (30,), 6: (30,), 9: (30,), 11: (30,)}
        return any(
            self.days[first, length]
            for month in range(1, 13)
            if self.months >> month & 1
            for length in lengths.get(month, (31,))
            for first in range(7)
        )

    def at_or_after(self, minute: int) -> int | None:
        """Return the first match at or after `minute`, in local minutes since 1970."""
        day, of_day = divmod(minute, DAY_MINUTES)
        found = self._day(day)
        if found == day:
            time = self._time(of_day)
            if time is not None:
                return day * DAY_MINUTES + time
            found = self._day(day + 1)
        if found is None:
            return None
        return found * DAY_MINUTES + _lowest(self.hours) * 60 + _lowest(self.minutes)

    def _time(self, of_day: int) -> int | None:
        """Return the first match at or after `of_day`, in minutes since midnight."""
        hour, minute = divmod(of_day, 60)
        if self.hours >> hour & 1 and self.minutes >> minute:
            return hour * 60 + minute + _lowest(self.minutes >> minute)
        rest = self.hours >> hour + 1
        if not rest:
            return None
        return (hour + 1 + _lowest(rest)) * 60 + _lowest(self.minutes)

    def _day(self, day: int) -> int | None:
        """Return the first matching day at or after `day`, in days since 1970."""
        start = date.fromordinal(day + EPOCH_DAY)
        year, month, of_month = start.year, start.month, start.day
        while year <= LAST_YEAR:
            if self.months >> month & 1:
                rest = self.days[monthrange(year, month)] >> of_month
                if rest:
                    found = date(year, month, of_month + _lowest(rest))
                    return found.toordinal() - EPOCH_DAY
            of_month = 1
            rest = self.months >> month + 1
            if rest:
                month += 1 + _lowest(rest)
            else:
                year, month = year + 1, _lowest(self.months)
        return None


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@dataclass(frozen=True, slots=True)
class Field:
    """One of the five fields, with the numbers and names that it accepts."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()

    def bits(self, items: list[str]) -> int:
        """Return the numbers that any of `items` names, as bits."""
        return sum({1 << number for item in items for number in self._numbers(item)})

    def number(self, text: str, item: str) -> int:
        """Return the value of the number or name `text`, a part of `item`."""
        if text in self.names:
            return self.low + self.names.index(text)
        number = _digits(text)
        if number is None or not self.low <= number <= self.high:
            names = f", or {self.names[0]} to {self.names[-1]}" if self.names else ""
            raise self.error(item, f"allowed is {self.low} to {self.high}{names}")
        return number

    def error(self, item: str, allowed: str) -> ValueError:
        return ValueError(f"bad {self.name} {item!r:.100} in a cron expression: {allowed}")

    def _numbers(self, item: str) -> range:
        span, slash, step = item.partition("/")
        if span == "*":
            low, high = self.low, self.high
        elif "-" in span:
            low, high = self._range(item, *span.split("-", 1))
        else:
            low = self.number(span, item)
            high = self.high if slash else low
        return range(low, high + 1, self._step(item, step) if slash else 1)

    def _range(self, item: str, start: str, end: str) -> tuple[int, int]:
        low, high = self.number(start, item), self.number(end, item)
        if self is WEEKDAY and high == 0 < low:
            high = 7  # fri-sun
        if low > high:
            raise self.error(item, f"a range goes up, within {self.low} to {self.high}")
        return low, high

    def _step(self, item: str, text: str) -> int:
        step, most = _digits(text), self.high - self.low + 1
        if step is None or not 1 <= step <= most:
            raise self.error(item, f"a step is from 1 to {most}")
        return step


def _digits(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


MINUTE = Field("minute", 0, 59)
HOUR = Field("hour", 0, 23)
DAY_OF_MONTH = Field("day", 1, 31)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTH = Field("month", 1, 12, MONTHS)
WEEKDAY = Field("weekday", 0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat"))
LAST = 0  # as the n of `#n`


def _parse(expression: str) -> Calendar:
    text = expression.lower()
    fields = NICKNAMES.get(text, text).split()
    if text.startswith("@") and text not in NICKNAMES:
        raise ValueError(f"unknown {expression!r:.100}: there are {', '.join(NICKNAMES)}")
    if len(fields) != 5:
        raise ValueError(
            "a cron expression has 5 fields (minute hour day month weekday), "
            f"got {len(fields)}: {expression!r:.100}"
        )
    minute, hour, day, month, weekday = (text.split(",") for text in fields)
    calendar = Calendar(
        minutes=MINUTE.bits(minute),
        hours=HOUR.bits(hour),
        months=MONTH.bits(month),
        days=_days(day, weekday),
    )
    if not calendar.fires():
        raise ValueError(f"{expression!r:.100} never fires: there is no such day")
    return calendar


def _days(day: list[str], weekday: list[str]) -> dict[tuple[int, int], int]:
    """Return the matching days, by the weekday of the first of a month and by its length."""
    numbers = DAY_OF_MONTH.bits([item for item in day if item != "l"])
    last = "l" in day
    weekdays = _weekdays(weekday)
    either = not (day[0].startswith("*") or weekday[0].startswith("*"))
    days = {}
    for length in (28, 29, 30, 31):
        by_number = numbers & ((2 << length) - 1) | last << length
        for first in range(7):
            by_weekday = _on(weekdays, first, length)
            days[first, length] = by_number | by_weekday if either else by_number & by_weekday
    return days


def _weekdays(items: list[str]) -> set[tuple[int, int]]:
    """Return the named weekdays, Sunday as 0, each with its number in a month: 1 to 5 or LAST."""
    found, plain = set(), []
    for item in items:
        name, hash_sign, nth = item.partition("#")
        if hash_sign:
            if nth not in ("1", "2", "3", "4", "5"):
                raise WEEKDAY.error(item, "the number after # is from 1 to 5")
            found.add((WEEKDAY.number(name, item) % 7, int(nth)))
        elif item.endswith("l"):
            found.add((WEEKDAY.number(item[:-1], item) % 7, LAST))
        else:
            plain.append(item)
    bits = WEEKDAY.bits(plain)
    found.update(
        (weekday % 7, nth) for weekday in range(8) if bits >> weekday & 1 for nth in range(1, 6)
    )
    return found


def _on(weekdays: set[tuple[int, int]], first: int, length: int) -> int:
    """Return the days of a month that are one of `weekdays`, as bits."""
    days = 0
    for day in range(1, length + 1):
        weekday = (first + day) % 7  # Sunday is 0 here, Monday there
        is_last = day + 7 > length
        if (weekday, (day + 6) // 7) in weekdays or (is_last and (weekday, LAST) in weekdays):
            days |= 1 << day
    return days
