"""The lab draws the state of its wheel, and restores the terminal."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import pytest

from tickwheel import lab as lab_module
from tickwheel.lab import PENDING_ENTRIES, Lab, draw, main, run

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COMMAND = [sys.executable, "-m", "tickwheel.lab"]


@pytest.fixture
def lab():
    """A lab with a history of 500 ticks."""
    lab = Lab(size=16, seed=1)
    for now in range(1, 501):
        lab.turn(now)
    return lab


class Time:
    """A clock that moves only during sleeps."""

    def __init__(self):
        self.now = 1000.0
        self.leave_at = float("inf")

    def clock(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return self.now >= self.leave_at


def test_nothing_is_lost_between_schedule_and_fire(lab):
    assert lab._last_item == lab.fired + lab.cancelled + len(lab.wheel)
    assert len(lab.wheel) == len(lab._entries) <= PENDING_ENTRIES
    lab.wheel._check()


def test_every_tick_is_a_wakeup_or_was_skipped(lab):
    assert lab.wakeups + lab.empty_ticks == lab.wheel.now == 500
    assert 0 < lab.wakeups <= lab.wheel.visits


def test_a_frame_shows_each_level_with_its_counts_and_pointer(lab):
    lines = draw(lab, colour=False).splitlines()
    for level in lab.wheel.snapshot():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"level {level['level']} "))
        cells = re.findall(r"...", lines[at + 1][19:])
        assert [int(cell.replace("·", "0")) for cell in cells] == level["counts"]
        assert lines[at].index("▼") == 19 + 3 * level["pointer"] + 2


def test_a_frame_shows_the_counters(lab):
    frame = draw(lab, colour=False)
    assert f"pending {len(lab.wheel)}   fired {lab.fired}   cancelled {lab.cancelled}" in frame
    assert f"visits {lab.wheel.visits}" in frame
    assert f"empty ticks skipped {lab.empty_ticks}" in frame


def test_the_log_shows_cascades(lab):
    reports = set()
    for now in range(501, 1500):
        lab.turn(now)
        reports.update(lab.news)
    assert any("cascade" in news and "from level 3 to level 2" in news for news in reports)


def test_the_same_seed_draws_the_same_frames():
    first, second, other = Lab(seed=7), Lab(seed=7), Lab(seed=8)
    for lab in (first, second, other):
        lab.turn(300)
    assert draw(first, colour=False) == draw(second, colour=False) != draw(other, colour=False)


def test_colour_changes_nothing_but_the_colour(lab):
    assert ESCAPE.sub("", draw(lab, colour=True)) == draw(lab, colour=False)


def test_plain_frames_come_once_a_second_with_an_empty_line_between(lab):
    out, time = io.StringIO(), Time()
    run(lab, out, clock=time.clock, wants_to_quit=time.wait, rate=20, frames=3)
    assert time.now == 1002.0
    assert lab.wheel.now == 540
    assert out.getvalue().count("tickwheel lab") == 3
    assert out.getvalue().count("\n\ntickwheel lab") == 2
    assert "\x1b" not in out.getvalue()


def test_it_stops_when_its_seconds_are_over(lab):
    time = Time()
    run(lab, io.StringIO(), clock=time.clock, wants_to_quit=time.wait, seconds=5)
    assert time.now == 1005.0


def test_it_stops_when_the_user_quits_and_returns_true(lab):
    time = Time()
    assert run(lab, io.StringIO(), clock=time.clock, wants_to_quit=time.wait, frames=2) is False
    time.leave_at = time.now + 3
    assert run(lab, io.StringIO(), clock=time.clock, wants_to_quit=time.wait) is True
    assert time.now == 1004.0


@pytest.mark.parametrize("options", [["--size", "1"], ["--size", "65"], ["--rate", "0"]])
def test_options_out_of_bounds_are_refused(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*options, "--once"])
    assert stopped.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_once_prints_one_plain_frame():
    printed = subprocess.run(
        [*COMMAND, "--once"], capture_output=True, check=True, encoding="utf-8", timeout=60
    )
    assert printed.stderr == ""
    assert printed.stdout.startswith("tickwheel lab")
    assert printed.stdout.count("tickwheel lab") == 1
    assert "\x1b" not in printed.stdout


@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-m", "tickwheel", "lab"]])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, b"q"])
def test_quitting_restores_the_terminal(stop, command):
    seen = watched(command, stop)
    assert seen.startswith(lab_module.OPEN_SCREEN.encode())
    assert seen.endswith(lab_module.CLOSE_SCREEN.encode())
    assert seen.count(lab_module.CLOSE_SCREEN.encode()) == 1
    assert b"Traceback" not in seen


def test_the_last_frame_stays_if_it_ends_by_itself():
    seen = watched([*COMMAND, "--frames", "2"])
    assert b"pending" in seen.partition(lab_module.CLOSE_SCREEN.encode())[2]


def test_a_single_frame_does_not_use_the_alternate_screen():
    seen = watched([*COMMAND, "--once"])
    assert b"\x1b[36m" in seen
    assert b"\x1b[?1049h" not in seen
    assert seen.count(b"tickwheel lab") == 1
    assert b"\x1b" not in watched([*COMMAND, "--once"], NO_COLOR="1")


def watched(command, stop=None, **environ):
    """Run it on a terminal, stop it by a signal or a key, and return its output."""
    terminal, inside = pty.openpty()
    lab = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside,
        env=os.environ | {"TERM": "xterm"} | environ,
    )  # fmt: skip
    os.close(inside)
    watchdog = threading.Timer(60, lab.kill)
    watchdog.start()
    seen = b""
    while chunk := read(terminal):
        seen += chunk
        if b"pending" in seen and isinstance(stop, bytes):
            os.write(terminal, stop)
            stop = None
        elif b"pending" in seen and stop:
            lab.send_signal(stop)
            stop = None
    watchdog.cancel()
    os.close(terminal)
    assert lab.wait(timeout=60) == 0
    return seen


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # raised by Linux when the other side is closed
        return b""


def test_a_reader_that_closes_the_pipe_early_is_not_an_error():
    lab = subprocess.Popen(
        [*COMMAND, "--seconds", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    lab.stdout.readline()
    lab.stdout.close()
    assert lab.wait(timeout=60) == 0
    assert lab.stderr.read() == b""
    lab.stderr.close()
