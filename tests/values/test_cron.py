"""Cron and Interval: tables for the rules, a scan of every minute and cronsim for the rest."""

import copy
import dataclasses
import pickle
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim, CronSimError
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.errors import OutOfRange
from tickwheel.values.cron import NICKNAMES, Cron, Interval
from tickwheel.values.schedule import parse_cron, rule

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def ms(text):
    """Milliseconds since 1970, of ISO text with an offset."""
    return int(datetime.fromisoformat(text).timestamp()) * 1_000


def local(moment_ms, tz):
    return datetime.fromtimestamp(moment_ms / 1_000, ZoneInfo(tz)).strftime("%m-%d %H:%M %z")


def firings(expression, tz, after, until):
    return [local(moment, tz) for moment in Cron(expression, tz).between(ms(after), ms(until))]


def next_days(expression, after="2026-01-01T00:00Z", count=3):
    moment, days = ms(after), []
    for _ in range(count):
        moment = Cron(expression).after(moment)
        days.append(datetime.fromtimestamp(moment / 1_000, UTC).strftime("%Y-%m-%d %H:%M"))
    return days


class TestExpressions:
    @pytest.mark.parametrize(
        ("expression", "days"),
        [
            ("* * * * *", ["2026-01-01 00:01", "2026-01-01 00:02", "2026-01-01 00:03"]),
            ("*/25 * * * *", ["2026-01-01 00:25", "2026-01-01 00:50", "2026-01-01 01:00"]),
            ("10/25 * * * *", ["2026-01-01 00:10", "2026-01-01 00:35", "2026-01-01 01:10"]),
            ("10-40/15 3 * * *", ["2026-01-01 03:10", "2026-01-01 03:25", "2026-01-01 03:40"]),
            ("5,1-2 0 * * *", ["2026-01-01 00:01", "2026-01-01 00:02", "2026-01-01 00:05"]),
            ("0 9-17/8 * * mon-fri", ["2026-01-01 09:00", "2026-01-01 17:00", "2026-01-02 09:00"]),
            ("0 0 * jan,JUL sun", ["2026-01-04 00:00", "2026-01-11 00:00", "2026-01-18 00:00"]),
            ("0 0 * * 7", ["2026-01-04 00:00", "2026-01-11 00:00", "2026-01-18 00:00"]),
            ("0 0 * * fri-sun", ["2026-01-02 00:00", "2026-01-03 00:00", "2026-01-04 00:00"]),
            ("0 0 L * *", ["2026-01-31 00:00", "2026-02-28 00:00", "2026-03-31 00:00"]),
            ("0 0 L,30 2,4 *", ["2026-02-28 00:00", "2026-04-30 00:00", "2027-02-28 00:00"]),
            ("0 0 * * mon#2", ["2026-01-12 00:00", "2026-02-09 00:00", "2026-03-09 00:00"]),
            ("0 0 * * 1#5", ["2026-03-30 00:00", "2026-06-29 00:00", "2026-08-31 00:00"]),
            ("0 0 * * friL", ["2026-01-30 00:00", "2026-02-27 00:00", "2026-03-27 00:00"]),
            ("0 0 * * 5L", ["2026-01-30 00:00", "2026-02-27 00:00", "2026-03-27 00:00"]),
            ("0 0 31 * *", ["2026-01-31 00:00", "2026-03-31 00:00", "2026-05-31 00:00"]),
            ("0 0 29 2 *", ["2028-02-29 00:00", "2032-02-29 00:00", "2036-02-29 00:00"]),
        ],
    )
    def test_an_expression_fires_when_it_says(self, expression, days):
        assert next_days(expression) == days

    def test_day_and_weekday_both_given_are_one_or_the_other(self):
        assert next_days("0 0 13 * fri", count=4) == [
            "2026-01-02 00:00",
            "2026-01-09 00:00",
            "2026-01-13 00:00",
            "2026-01-16 00:00",
        ]

    def test_a_day_or_weekday_that_starts_with_a_star_must_match_too(self):
        assert next_days("0 0 */2 * fri", count=2) == ["2026-01-09 00:00", "2026-01-23 00:00"]
        assert next_days("0 0 1-7 * */6", count=2) == ["2026-01-03 00:00", "2026-01-04 00:00"]

    @pytest.mark.parametrize("nickname", NICKNAMES)
    def test_a_nickname_is_its_expression(self, nickname):
        assert next_days(nickname) == next_days(NICKNAMES[nickname])
        assert str(Cron(nickname)) == nickname

    def test_29_february_is_found_over_the_end_of_a_century_that_has_none(self):
        assert next_days("0 0 29 2 *", "2097-01-01T00:00Z", 1) == ["2104-02-29 00:00"]

    def test_the_rarest_day_is_found_40_years_away(self):
        rarest = "0 0 */28 2 mon#5"  # 29 February, a Monday
        assert next_days(rarest, "2072-03-01T00:00Z", 1) == ["2112-02-29 00:00"]

    def test_after_is_strict(self):
        noon = ms("2026-01-01T12:00Z")
        cron = Cron("0 12 * * *")
        assert cron.after(noon - 1) == noon
        assert cron.after(noon) == noon + DAY
        assert cron.after(noon + 1) == noon + DAY
        hourly = Cron("0 * * * *")
        assert hourly.after(noon - 1) == noon
        assert hourly.after(noon) == noon + HOUR
        assert hourly.after(noon + 1) == noon + HOUR

    def test_times_before_1970_are_times(self):
        assert Cron("0 0 * * *").after(-1) == 0
        assert Cron("0 0 * * *").after(-DAY - 1) == -DAY

    @pytest.mark.parametrize(
        ("expression", "field", "allowed"),
        [
            ("60 * * * *", "minute '60'", "0 to 59"),
            ("x * * * *", "minute 'x'", "0 to 59"),
            ("-1 * * * *", "minute '-1'", "0 to 59"),
            ("1,,2 * * * *", "minute ''", "0 to 59"),
            ("²5 * * * *", "minute '²5'", "0 to 59"),
            ("*/0 * * * *", "minute '*/0'", "1 to 60"),
            ("*/90 * * * *", "minute '*/90'", "1 to 60"),
            ("*/ * * * *", "minute '*/'", "1 to 60"),
            ("*/1/2 * * * *", "minute '*/1/2'", "1 to 60"),
            ("* 24 * * *", "hour '24'", "0 to 23"),
            ("* 9-24 * * *", "hour '9-24'", "0 to 23"),
            ("* 17-9 * * *", "hour '17-9'", "0 to 23"),
            ("* mon * * *", "hour 'mon'", "0 to 23"),
            ("* * 0 * *", "day '0'", "1 to 31"),
            ("* * 32 * *", "day '32'", "1 to 31"),
            ("* * L/2 * *", "day 'l/2'", "1 to 31"),
            ("* * LW * *", "day 'lw'", "1 to 31"),
            ("* * ? * *", "day '?'", "1 to 31"),
            ("* * * 13 *", "month '13'", "1 to 12, or jan to dec"),
            ("* * * 0 *", "month '0'", "1 to 12"),
            ("* * * january *", "month 'january'", "1 to 12"),
            ("* * * * 8", "weekday '8'", "0 to 7, or sun to sat"),
            ("* * * * L", "weekday 'l'", "0 to 7"),
            ("* * * * mon#6", "weekday 'mon#6'", "1 to 5"),
            ("* * * * mon#0", "weekday 'mon#0'", "1 to 5"),
            ("* * * * #1", "weekday '#1'", "0 to 7"),
            ("* * * * sat-mon", "weekday 'sat-mon'", "0 to 7"),
            ("9999999999999999999 * * * *", "minute '9999999999999999999'", "0 to 59"),
        ],
    )
    def test_a_bad_field_is_named_with_what_is_allowed(self, expression, field, allowed):
        with pytest.raises(ValueError) as refused:
            Cron(expression)
        assert field in str(refused.value)
        assert allowed in str(refused.value)

    @pytest.mark.parametrize("expression", ["", "* * * *", "0 * * * * *", "  "])
    def test_any_number_of_fields_but_five_is_refused(self, expression):
        with pytest.raises(ValueError, match=r"5 fields \(minute hour day month weekday\)"):
            Cron(expression)

    def test_an_unknown_nickname_is_refused_with_those_there_are(self):
        with pytest.raises(ValueError, match="'@reboot': there are @hourly, @daily"):
            Cron("@reboot")

    @pytest.mark.parametrize(
        "expression",
        ["0 0 30 2 *", "0 0 31 2,4,6,9,11 *", "0 0 */30 2 mon#5", "0 0 31 4 */2"],
    )
    def test_an_expression_that_never_fires_is_refused(self, expression):
        with pytest.raises(ValueError, match="never fires"):
            Cron(expression)

    @pytest.mark.parametrize(
        "tz", ["Europe/Atlantis", "", "Europe", "../etc/passwd", "UTC\0", "+02:00", "\ud800"]
    )
    def test_an_unknown_time_zone_is_refused_by_name(self, tz):
        with pytest.raises(ValueError) as refused:
            Cron("* * * * *", tz)
        assert f"unknown time zone {tz!r}" in str(refused.value)
        with pytest.raises(ValueError) as refused_alike:
            rule(None, 5_000, tz, 0)
        assert str(refused_alike.value) == str(refused.value)

    def test_schedules_share_an_expression_and_keep_no_interval(self):
        assert rule("5 4 * * *", None, "UTC", 1) is rule("5 4 * * *", None, "UTC", 2)
        kept = parse_cron.cache_info().currsize
        assert rule(None, 5_000, "UTC", 7) == Interval(5, 7)
        assert parse_cron.cache_info().currsize == kept

    def test_what_is_not_text_is_refused(self):
        with pytest.raises(TypeError, match="must be a str, got 5"):
            Cron(5)
        with pytest.raises(TypeError, match="must be the name of a time zone, got None"):
            Cron("* * * * *", None)
        for moment in (1.5, True, "1", None):
            with pytest.raises(TypeError, match="moment_ms must be an int"):
                Cron("* * * * *").after(moment)

    def test_a_time_that_no_calendar_knows_is_refused(self):
        cron = Cron("0 0 29 2 *")
        for moment in (-(10**15), 10**15):
            with pytest.raises(OutOfRange, match="moment_ms must be"):
                cron.after(moment)
        with pytest.raises(OutOfRange, match="does not fire between"):
            cron.after(ms("9998-01-01T00:00Z"))
        assert list(cron.between(ms("9996-01-01T00:00Z"), 10**15)) == [ms("9996-02-29T00:00Z")]


class TestValue:
    def test_it_prints_as_its_expression(self):
        cron = Cron(" */5  9-17 * * MON-fri ", tz="Europe/Berlin")
        assert str(cron) == "*/5 9-17 * * MON-fri"
        assert repr(cron) == "Cron('*/5 9-17 * * MON-fri', tz='Europe/Berlin')"

    def test_it_is_equal_and_hashable_by_expression_and_zone(self):
        cron = Cron("0 0 * * *", "Europe/Berlin")
        assert cron == Cron("0  0 * * *", tz="Europe/Berlin")
        assert hash(cron) == hash(Cron("0 0 * * *", "Europe/Berlin"))
        assert cron != Cron("0 0 * * *")
        assert cron != Cron("0 1 * * *", "Europe/Berlin")
        assert Interval(5) == Interval(5.0) != Interval(5, anchor_ms=1)
        assert len({Interval(5), Interval(5.0)}) == 1

    @pytest.mark.parametrize("schedule", [Cron("0 0 * * *", "Europe/Berlin"), Interval(5)])
    def test_it_cannot_be_changed_and_can_be_copied(self, schedule):
        for field in dataclasses.fields(schedule):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(schedule, field.name, "x")
        for copied in (copy.copy(schedule), pickle.loads(pickle.dumps(schedule))):
            assert copied == schedule
            assert copied.after(0) == schedule.after(0)


class TestClockChanges:
    """Berlin 2026: 29 March, 02:00 becomes 03:00; 25 October, 03:00 becomes 02:00."""

    def test_a_skipped_time_fires_once_at_the_next_valid_instant(self):
        assert firings("30 2 * * *", "Europe/Berlin", "2026-03-27T12:00Z", "2026-03-31T00:00Z") == [
            "03-28 02:30 +0100",
            "03-29 03:00 +0200",
            "03-30 02:30 +0200",
        ]
        assert Cron("30 2 * * *", "Europe/Berlin").after(ms("2026-03-28T12:00Z")) == ms(
            "2026-03-29T01:00Z"
        )

    def test_several_skipped_times_are_one_firing(self):
        assert firings(
            "0,30 2 * * *", "Europe/Berlin", "2026-03-29T00:00Z", "2026-03-29T23:00Z"
        ) == ["03-29 03:00 +0200"]

    def test_a_skipped_time_that_meets_a_regular_one_is_one_firing(self):
        found = firings("0,30 2,3 * * *", "Europe/Berlin", "2026-03-29T00:00Z", "2026-03-29T12:00Z")
        assert found == ["03-29 03:00 +0200", "03-29 03:30 +0200"]

    def test_a_repeated_time_fires_once_the_first(self):
        found = firings("0,30 2 * * *", "Europe/Berlin", "2026-10-24T12:00Z", "2026-10-26T12:00Z")
        assert found == [
            "10-25 02:00 +0200",
            "10-25 02:30 +0200",
            "10-26 02:00 +0100",
            "10-26 02:30 +0100",
        ]

    def test_a_time_in_the_second_pass_is_followed_by_the_next_day(self):
        cron = Cron("* 2 * * *", "Europe/Berlin")
        assert cron.after(ms("2026-10-25T01:10Z")) == ms("2026-10-26T01:00Z")

    def test_every_hour_goes_on_through_the_skipped_hour(self):
        assert firings("0 * * * *", "Europe/Berlin", "2026-03-29T00:00Z", "2026-03-29T03:00Z") == [
            "03-29 03:00 +0200",
            "03-29 04:00 +0200",
            "03-29 05:00 +0200",
        ]

    def test_every_hour_goes_on_through_the_repeated_hour(self):
        assert firings("0 * * * *", "Europe/Berlin", "2026-10-24T23:00Z", "2026-10-25T02:00Z") == [
            "10-25 02:00 +0200",
            "10-25 02:00 +0100",
            "10-25 03:00 +0100",
        ]

    @pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25", "2026-07-01"])
    @pytest.mark.parametrize("hours", ["*", "*/1", "0-23"])
    def test_steps_of_minutes_under_every_hour_are_steps_of_elapsed_time(self, day, hours):
        cron = Cron(f"*/15 {hours} * * *", "Europe/Berlin")
        start = ms(f"{day}T00:00Z")
        assert list(cron.between(start, start + DAY)) == list(
            range(start + 15 * MINUTE, start + DAY + 1, 15 * MINUTE)
        )

    def test_every_second_hour_goes_by_the_clock(self):
        assert firings(
            "0 */2 * * *", "Europe/Berlin", "2026-03-28T23:00Z", "2026-03-29T03:00Z"
        ) == [
            "03-29 03:00 +0200",  # for 02:00
            "03-29 04:00 +0200",
        ]
        assert firings(
            "0 */2 * * *", "Europe/Berlin", "2026-10-24T22:00Z", "2026-10-25T03:00Z"
        ) == [
            "10-25 02:00 +0200",
            "10-25 04:00 +0100",
        ]

    def test_half_an_hour_is_skipped_on_lord_howe(self):
        """2026-10-04: 02:00 becomes 02:30."""
        span = ("2026-10-03T14:00Z", "2026-10-03T17:00Z")
        assert firings("15 2 * * *", "Australia/Lord_Howe", *span) == ["10-04 02:30 +1100"]
        assert firings("15,30 2 * * *", "Australia/Lord_Howe", *span) == ["10-04 02:30 +1100"]
        assert firings("*/15 * * * *", "Australia/Lord_Howe", *span)[4:8] == [
            "10-04 01:45 +1030",
            "10-04 02:30 +1100",
            "10-04 02:45 +1100",
            "10-04 03:00 +1100",
        ]

    def test_half_an_hour_is_repeated_on_lord_howe(self):
        """2026-04-05: 02:00 becomes 01:30."""
        span = ("2026-04-04T14:00Z", "2026-04-04T16:00Z")
        assert firings("15,45 1 * * *", "Australia/Lord_Howe", *span) == [
            "04-05 01:15 +1100",
            "04-05 01:45 +1100",
        ]
        assert firings("*/15 * * * *", "Australia/Lord_Howe", *span) == [
            "04-05 01:15 +1100",
            "04-05 01:30 +1100",
            "04-05 01:45 +1100",
            "04-05 01:30 +1030",
            "04-05 01:45 +1030",
            "04-05 02:00 +1030",
            "04-05 02:15 +1030",
            "04-05 02:30 +1030",
        ]

    def test_a_zone_of_half_an_hour_fires_on_its_own_hours(self):
        cron = Cron("0 * * * *", "Asia/Kolkata")
        assert cron.after(ms("2026-01-01T00:00Z")) == ms("2026-01-01T00:30Z")

    def test_the_southern_hemisphere_changes_the_other_way(self):
        assert firings(
            "30 2 * * *", "America/Santiago", "2026-04-04T00:00Z", "2026-04-06T00:00Z"
        ) == [
            "04-04 02:30 -0300",
            "04-05 02:30 -0400",
        ]
        found = firings("30 0 * * *", "America/Santiago", "2026-09-05T00:00Z", "2026-09-07T12:00Z")
        assert found == ["09-05 00:30 -0400", "09-06 01:00 -0300", "09-07 00:30 -0300"]

    def test_a_skipped_midnight_fires_when_the_day_begins(self):
        found = firings("@daily", "America/Santiago", "2026-09-05T12:00Z", "2026-09-07T12:00Z")
        assert found == ["09-06 01:00 -0300", "09-07 00:00 -0300"]

    def test_the_day_that_samoa_skipped_fires_once_when_it_was_over(self):
        found = firings("0 9,18 * * *", "Pacific/Apia", "2011-12-29T12:00Z", "2012-01-01T00:00Z")
        assert found == [
            "12-29 09:00 -1000",
            "12-29 18:00 -1000",
            "12-31 00:00 +1400",  # for both of the 30th
            "12-31 09:00 +1400",
            "12-31 18:00 +1400",
            "01-01 09:00 +1400",
        ]
        assert Cron("0 9 30 12 *", "Pacific/Apia").after(ms("2011-12-01T00:00Z")) == ms(
            "2011-12-30T10:00Z"
        )

    def test_every_hour_of_the_day_that_samoa_skipped_is_not_made_up(self):
        cron = Cron("0 * 30 12 *", "Pacific/Apia")
        assert cron.after(ms("2011-12-01T00:00Z")) == ms("2012-12-30T00:00+14:00")
        start = ms("2011-12-30T00:00Z")
        hourly = Cron("0 * * * *", "Pacific/Apia").between(start, start + DAY)
        assert list(hourly) == list(range(start + HOUR, start + DAY + 1, HOUR))

    def test_a_repeated_hour_before_a_far_firing_is_no_obstacle(self):
        cron = Cron("30 * 1 1 *", "Europe/Berlin")
        assert cron.after(ms("2026-10-25T00:45Z")) == ms("2026-12-31T23:30Z")


ZONES = {  # a change in each
    "Europe/Berlin": ["2026-03-29T01:00Z", "2026-10-25T01:00Z"],
    "America/New_York": ["2026-03-08T07:00Z", "2026-11-01T06:00Z"],
    "America/St_Johns": ["2011-03-13T03:31Z", "2010-11-07T02:31Z"],  # at one minute past midnight
    "America/Santiago": ["2026-04-05T03:00Z", "2026-09-06T04:00Z"],
    "Australia/Lord_Howe": ["2026-04-04T15:00Z", "2026-10-03T15:30Z"],
    "Africa/Casablanca": ["2026-02-15T02:00Z", "2026-03-22T02:00Z"],
    "Antarctica/Troll": ["2026-03-29T01:00Z", "2026-10-25T01:00Z"],  # two hours
    "Antarctica/Casey": ["2020-03-07T16:00Z", "2020-10-03T16:01Z"],  # three
    "Asia/Pyongyang": ["2015-08-14T15:00Z", "2018-05-04T15:00Z"],  # half an hour, for good
    "Pacific/Apia": ["2011-12-30T10:00Z"],  # a day
    "Asia/Kolkata": ["2026-03-29T00:00Z"],  # none
    "UTC": ["2026-03-29T00:00Z"],
}


def number_fields(low, high):
    number = st.integers(low, high)
    pair = st.tuples(number, number).filter(lambda p: p[0] != p[1]).map(sorted)
    step = st.integers(1, high - low + 1)
    item = st.one_of(
        number.map(str),
        pair.map(lambda p: f"{p[0]}-{p[1]}"),
        st.tuples(pair, step).map(lambda p: f"{p[0][0]}-{p[0][1]}/{p[1]}"),
        step.map(lambda n: f"*/{n}"),
    )
    return st.one_of(st.just("*"), item, st.lists(item, min_size=1, max_size=3).map(",".join))


MINUTES, HOURS, DAYS, MONTHS = (
    number_fields(0, 59),
    number_fields(0, 23),
    number_fields(1, 31) | st.sampled_from(["L", "1,L", "15,L"]),
    number_fields(1, 12) | st.sampled_from(["jan", "jan-mar", "feb,dec"]),
)
WEEKDAYS = number_fields(0, 7) | st.one_of(
    st.sampled_from(["mon", "mon-fri", "sun,wed"]),
    st.tuples(st.integers(0, 7), st.integers(1, 5)).map(lambda p: f"{p[0]}#{p[1]}"),
    st.integers(0, 7).map(lambda n: f"{n}L"),
)
EXPRESSIONS = st.tuples(MINUTES, HOURS, DAYS, MONTHS, WEEKDAYS).map(" ".join)
NEAR = st.tuples(  # an expression that fires in the days around a change
    st.sampled_from(["*", "0", "30", "*/15", "1", "0,30", "59", "10-50/20"]) | MINUTES,
    st.sampled_from(["*", "0", "1", "2", "3", "0-3", "*/2", "23", "0,1,2,3"]) | HOURS,
    st.sampled_from(["*", "*", "*", "1-31/2", "L", "29,30,31"]),
    st.just("*"),
    st.sampled_from(["*", "*", "*", "sun", "mon-sat"]),
).map(" ".join)


@cache
def minutes_around(tz, change):
    """Every minute of the days around a change, and what the local clock shows."""
    moments = range(ms(change) - 4 * DAY, ms(change) + 4 * DAY, MINUTE)
    zone = ZoneInfo(tz)
    shown = [
        datetime.fromtimestamp(at / 1_000, zone).replace(tzinfo=None, fold=0) for at in moments
    ]
    return list(zip(moments, shown, strict=True))


def scan(expression, tz, change):
    """Every firing around a change, by looking at every minute: the rules, taken by their word."""
    sheet = CronSheet(expression)
    minutes = minutes_around(tz, change)
    if sheet.is_for_every_hour:
        return [at for at, wall in minutes if sheet.matches(wall)]
    found, highest = [], minutes[0][1]
    for at, wall in minutes:
        newly_passed = range(1, (wall - highest) // timedelta(minutes=1) + 1)
        if any(sheet.matches(highest + timedelta(minutes=n)) for n in newly_passed):
            found.append(at)
        highest = max(highest, wall)
    return found


class CronSheet:
    """Which local minutes match: by the tables of cronsim's, which know no zone here."""

    def __init__(self, expression):
        self.sim = CronSim(expression, datetime(2000, 1, 1))  # noqa: DTZ001
        self.is_for_every_hour = self.sim.hours == set(range(24))

    def matches(self, wall):
        return (
            wall.minute in self.sim.minutes
            and wall.hour in self.sim.hours
            and wall.month in self.sim.months
            and self.sim.match_day(wall.date())
        )


@given(
    NEAR,
    st.sampled_from([(tz, change) for tz, changes in ZONES.items() for change in changes]),
    st.integers(-36 * 60, 12 * 60),
    st.integers(0, MINUTE - 1),
)
def test_it_fires_as_a_scan_of_every_minute_around_a_change_says(expression, where, minutes, more):
    tz, change = where
    start = ms(change) + minutes * MINUTE + more
    end = start + 30 * HOUR
    expected = [at for at in scan(expression, tz, change) if start < at <= end]
    assert list(Cron(expression, tz).between(start, end)) == expected


@given(EXPRESSIONS, st.integers(ms("1970-01-01T00:00Z"), ms("2100-01-01T00:00Z")))
def test_it_fires_as_cronsim_does_in_utc(expression, start):
    try:
        cron = Cron(expression)
    except ValueError as refused:
        assert "never fires" in str(refused)
        with pytest.raises((CronSimError, StopIteration)):
            next(CronSim(expression, datetime.fromtimestamp(start / 1_000, UTC)))
        return
    theirs = CronSim(expression, datetime.fromtimestamp(start // 1_000, UTC))
    moment = start
    for expected in islice(theirs, 5):
        moment = cron.after(moment)
        assert moment == int(expected.timestamp()) * 1_000


@settings(max_examples=50)
@given(
    EXPRESSIONS,
    st.sampled_from(sorted(ZONES)),
    st.integers(ms("1970-01-01T00:00Z"), ms("2100-01-01T00:00Z")),
)
def test_firings_go_up_and_between_is_after_again_and_again(expression, tz, start):
    try:
        cron = Cron(expression, tz)
    except ValueError:
        return
    found = [cron.after(start)]
    for _ in range(20):
        found.append(cron.after(found[-1]))
    assert start < found[0]
    assert all(early < late for early, late in pairwise(found))
    assert list(cron.between(start, found[-1])) == found
    assert list(cron.between(start, found[-1] - 1)) == found[:-1]
    assert list(cron.between(found[0], found[0])) == []


class TestInterval:
    def test_it_fires_on_the_grid_of_its_anchor(self):
        interval = Interval(90, anchor_ms=1_000)
        assert interval.after(0) == 1_000
        assert interval.after(1_000) == 91_000
        assert interval.after(90_999) == 91_000
        assert interval.after(-89_000) == 1_000
        assert list(interval.between(1_000, 271_000)) == [91_000, 181_000, 271_000]

    def test_a_period_between_milliseconds_is_never_early_and_does_not_drift(self):
        interval = Interval(1 / 3)
        assert list(islice(interval.between(0, 10_000), 4)) == [334, 667, 1_000, 1_334]
        assert Interval(0.0015).after(0) == 2

    @given(st.integers(1, 10**7), st.integers(-(10**13), 10**13), st.integers(-(10**13), 10**13))
    def test_the_next_firing_is_after_and_within_a_period(self, period_ms, anchor, moment):
        found = Interval(period_ms / 1_000, anchor).after(moment)
        assert moment < found <= moment + period_ms
        assert (found - anchor) % period_ms == 0

    @pytest.mark.parametrize("seconds", [0, -1, 0.0009, float("nan"), float("inf"), 10**12])
    def test_a_bad_period_is_a_value_error(self, seconds):
        with pytest.raises(ValueError, match="seconds must be"):
            Interval(seconds)

    @pytest.mark.parametrize("seconds", ["5", None, True, timedelta(seconds=5)])
    def test_a_period_that_is_no_number_is_a_type_error(self, seconds):
        with pytest.raises(TypeError, match="seconds must be a number"):
            Interval(seconds)

    def test_times_are_ints(self):
        with pytest.raises(TypeError, match="anchor_ms must be an int"):
            Interval(5, anchor_ms=1.5)
        with pytest.raises(TypeError, match="moment_ms must be an int"):
            Interval(5).after(1.5)
        with pytest.raises(TypeError, match="until_ms must be an int"):
            Interval(5).between(1, None)
