"""The frame of `top`: drawn from two snapshots, whatever they lack."""

import functools
import io
import math
import re

import pytest
from rich.console import Console

import tickwheel
from tickwheel.cli import top as top_command
from tickwheel.cli.output import format_duration
from tickwheel.cli.top_frame import (
    Snapshot,
    block,
    draw_frame,
    format_tick,
    quantile,
)
from tickwheel.durable.histogram import Histogram


def make_snapshot(at=0.0, **more):
    parts = {"stats": {}, "wheel": {}, "services": [], "nodes": []} | more
    return Snapshot(at, **parts)


def text_of(frame, width=120):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(frame)
    return out.getvalue()


def test_an_empty_answer_can_be_drawn():
    text = text_of(draw_frame("http://h", make_snapshot(), make_snapshot(1.0)))
    assert "submitted –" in text
    assert "late p50 –" in text
    assert "the wheel is empty" in text


def test_rates_cover_the_time_between_two_snapshots():
    before = make_snapshot(
        10.0, stats={"submitted": 100, "sent": 5, "ended": {"finish": 1, "retry": 1}}
    )
    after = make_snapshot(
        12.0, stats={"submitted": 300, "sent": 5, "ended": {"finish": 4, "retry": 2}}
    )
    assert after.rates(before) == {"submitted": 100.0, "sent": 0.0, "ended": 2.0}


def test_a_restarted_server_has_no_negative_rate():
    before, after = (
        make_snapshot(0.0, stats={"submitted": 100}),
        make_snapshot(1.0, stats={"submitted": 1}),
    )
    assert after.rates(before)["submitted"] == 0
    assert before.rates(before)["submitted"] is None


def lateness(histogram):
    buckets = [[None if math.isinf(b) else b, n] for b, n in histogram.cumulative()]
    return {"lateness": {"count": histogram.count, "sum": histogram.sum, "buckets": buckets}}


def test_lateness_covers_calls_between_two_snapshots():
    histogram = Histogram()
    for _ in range(100):
        histogram.observe(10.0)
    before = make_snapshot(0.0, stats=lateness(histogram))
    assert before.lateness(before, 0.5) == pytest.approx(histogram.quantile(0.5))
    for _ in range(10):
        histogram.observe(0.003)
    after = make_snapshot(1.0, stats=lateness(histogram))
    assert after.lateness(before, 0.99) <= 0.005
    assert after.lateness(make_snapshot(), 0.5) > 1


def test_quantiles_match_the_servers_histogram():
    histogram = Histogram()
    for number in range(1000):
        histogram.observe(number / 700)
    for part in (0.0, 0.01, 0.5, 0.99, 1.0):
        assert quantile(histogram.cumulative(), part) == pytest.approx(histogram.quantile(part))
    assert quantile([], 0.5) is None
    assert quantile(Histogram().cumulative(), 0.5) is None


def test_without_a_histogram_the_servers_quantiles_are_shown():
    after = make_snapshot(1.0, stats={"lateness": {"p50": 0.001, "p99": 0.25}})
    assert after.lateness(make_snapshot(), 0.5) == 0.001
    assert "late p99 250.0 ms" in text_of(draw_frame("http://h", make_snapshot(), after))


def test_a_wheel_is_drawn_level_by_level():
    wheel = tickwheel.Wheel(tick=1, size=8)
    for expiry in (5, 5, 5, 6, 60):
        wheel.schedule(expiry, None)
    text = text_of(
        draw_frame("http://h", make_snapshot(), make_snapshot(wheel={"levels": wheel.snapshot()}))
    )
    first, second = (line for line in text.splitlines() if line.startswith("level"))
    assert first.split()[:5] == ["level", "1", "tick", "1", "ms"]
    assert "·····"[1:] + "█▃·" in first
    assert second.split()[3:6] == ["8", "ms", "1"]


@pytest.mark.parametrize(
    ("width", "pointer", "count"), [(120, 0, 1), (80, 7, 2), (60, 31, 2), (40, 40, 4)]
)
def test_a_level_wider_than_the_terminal_wraps_into_equal_lines(width, pointer, count):
    level = {"level": 1, "tick": 1, "pointer": pointer, "counts": [0] * 64}
    frame = draw_frame("http://h", make_snapshot(), make_snapshot(wheel={"levels": [level]}))
    lines = text_of(frame, width).splitlines()[5:]
    start = len("level 1  tick 1 ms  0  ")
    bars = [line[start:].rstrip() for line in lines if "·" in line]
    assert sum(bar.count("·") for bar in bars) == 63
    assert max(map(len, lines)) <= width
    assert len(bars) == count
    assert max(map(len, bars)) == 64 // count


def test_the_busiest_services_come_first_with_control_characters_escaped():
    services = [{"name": f"s{n:02}", "enabled": True} for n in range(30)]
    services[29]["name"] = "busy\x1b[2J"
    stats = {"services": {"busy\x1b[2J": {"breaker": "open", "running": 2, "waiting": 9}}}
    text = text_of(
        draw_frame("http://h", make_snapshot(), make_snapshot(services=services, stats=stats))
    )
    assert text.index("busy\\x1b") < text.index("s00")
    assert "\x1b" not in text
    assert "and 10 more" in text


def test_a_store_does_not_know_the_settings_of_a_function():
    services = [
        {"name": "mail", "enabled": False, "concurrency": 7, "rate": None}, {"name": "resize"},
    ]  # fmt: skip
    shown = text_of(draw_frame("s", make_snapshot(), make_snapshot(services=services)))
    rows = [line.split() for line in shown.splitlines() if line.startswith(("mail", "resize"))]
    assert rows == [
        ["mail", "disabled", "–", "–", "–", "7", "–"],
        ["resize", "?", "–", "–", "–", "?", "?"],
    ]


def test_nodes_and_errors_are_shown():
    nodes = [{"name": "n-1", "shards": 64, "started_at": None, "lease_until": None}]
    text = text_of(
        draw_frame("http://h", make_snapshot(), make_snapshot(nodes=nodes), "connection refused")
    )
    assert "n-1" in text
    assert "connection refused" in text
    assert "lease" not in text
    nodes[0] |= {"started_at": "2030-01-31T12:00:00.000Z", "lease_until": None}
    text = text_of(
        draw_frame(
            "http://h", make_snapshot(), make_snapshot(nodes=nodes, stats={"uptime": 7300.0})
        )
    )
    assert "2030-01-31" in text
    assert "up 2 h" in text


def test_a_tick_has_its_unit():
    assert [format_tick(tick) for tick in (None, 1, 64, 4096, 64**3)] == [
        "?", "1 ms", "64 ms", "4.1 s", "4 min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0, "0.0 ms"),
        (0.0123, "12.3 ms"),
        (5.0, "5.0 s"),
        (600.0, "10 min"),
        (7200.0, "2 h"),
        (300_000.0, "3 d"),
    ],
)
def test_a_duration_is_formatted_for_people(seconds, text):
    assert format_duration(seconds) == text


def test_a_blocks_height_is_proportional():
    assert [block(n, 8) for n in range(9)] == list(" ▁▂▃▄▅▆▇█")
    assert block(1, 1_000_000) == "▁"


def test_top_continues_while_the_server_is_unreachable(client, monkeypatch):
    client.answers |= {"stats": {"submitted": 1}, "wheel": {}, "nodes": []}
    frames = []
    monkeypatch.setattr(top_command, "draw_frame", lambda *args: frames.append(args[3:]) or "")
    steps = iter(["ok", "away", "ok", "leave"])

    def pressed(_):
        step = next(steps)
        away = tickwheel.errors.StoreUnavailable("away")
        client.answers["stats"] = away if step == "away" else {"submitted": 1}
        return step == "leave"

    monkeypatch.setattr(top_command, "console", lambda: Console(file=io.StringIO()))
    snapshot = functools.partial(top_command.take_snapshot, client, lambda: 1.0, cluster=False)
    top_command.watch("http://fake", snapshot, snapshot(), 1.0, pressed)
    assert frames == [(), ("",), ("away",), ("",)]


def test_in_a_pipe_top_prints_one_frame(run, client, monkeypatch):
    client.answers |= {"stats": {"submitted": 1}, "wheel": {"levels": []}, "nodes": []}
    monkeypatch.setattr(top_command.time, "sleep", lambda _: None)
    assert set(run("top", "--json").json) >= {"rates", "lateness", "wheel", "services", "nodes"}
    assert "tickwheel top  http://fake" in run("top", "--once", "--table").out


def test_top_shows_the_whole_cluster(run, client, monkeypatch):
    by_node = [{"name": "n-1", "held": 11, "error": None}, {"name": "n-2", "error": "it is away"}]
    nodes = [{"name": name, "state": "active", "shards": 32} for name in ("n-1", "n-2")]
    client.answers |= {"stats": {"by_node": by_node}, "wheel": {"levels": []}, "nodes": nodes}
    monkeypatch.setattr(top_command.time, "sleep", lambda _: None)
    frame = run("top", "--cluster", "--once", "--table").out
    assert re.search(r"n-1 +active +32 +11", frame)
    assert re.search(r"n-2 +active +32 +it is away", frame.replace("–", " "))
    scopes = [call[2] for call in client.calls if call[0] in ("stats", "wheel")]
    assert scopes == [{"cluster": True}] * 4
