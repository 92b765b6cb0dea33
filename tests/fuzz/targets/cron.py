"""Cron expressions: a ValueError, or firings that go up, in UTC as cronsim's."""

from datetime import UTC, datetime
from itertools import islice, pairwise

from cronsim import CronSim, CronSimError

from fuzz.source import Source
from tickwheel.errors import OutOfRange
from tickwheel.values.cron import Cron

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia")
FIRINGS = 5
YEAR_2000, YEARS_MS = 946_684_800_000, 3_155_760_000_000  # a start is within a hundred years


def cronsim_firings(expression, start_ms):
    """Return the firings by cronsim in ms; None if it refuses the expression."""
    try:
        sim = CronSim(expression, datetime.fromtimestamp(start_ms // 1_000, UTC))
        return [int(found.timestamp()) * 1_000 for found in islice(sim, FIRINGS)]
    except CronSimError:
        return None


def run(data):
    source = Source(data)
    tz, start = source.pick(ZONES), YEAR_2000 + source.number(8) % YEARS_MS
    expression = source.rest().decode("utf-8", "surrogateescape")
    try:
        cron = Cron(expression, tz)
    except ValueError as error:
        assert len(str(error)) < 400
        return
    assert Cron(str(cron), tz) == cron
    firings = []
    try:
        for _ in range(FIRINGS):
            firings.append(cron.after(firings[-1] if firings else start))
    except OutOfRange:
        pass
    assert all(early < late for early, late in pairwise([start, *firings])), firings
    if firings:
        assert list(cron.between(start, firings[-1])) == firings
    theirs = cronsim_firings(str(cron), start) if tz == "UTC" else None
    assert theirs in (None, firings), f"{expression!r} after {start}: {firings}, cronsim {theirs}"
