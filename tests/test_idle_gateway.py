"""The gateway of examples/: a short load test, in its own processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "idle_gateway.py"
CPU = re.compile(r"CPU: gateway (\S+)% of a core, of which the tracker (\S+)%")


def gateway(*options, python=()):
    return subprocess.run(
        [sys.executable, "-W", "error", *python, EXAMPLE, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_idle_user_is_reported_in_time_and_no_active_one():
    ran = gateway("--connections=300", "--timeout=2", "--rate=900", "--silent=60")
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert "300 users online" in ran.stdout
    assert "60 reported offline in " in ran.stdout
    assert "240 still online" in ran.stdout
    assert "no live one" in ran.stdout
    whole, tracker = map(float, CPU.search(ran.stdout).groups())
    assert 0 < tracker < whole


def test_without_idle_users_none_is_reported_even_if_the_rate_is_too_low():
    """The rate is raised with a message: otherwise active users would become idle."""
    ran = gateway("--connections=100", "--timeout=2", "--rate=10", "--silent=0")
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert "10 packets/s are too few to keep all users alive: 100" in ran.stdout
    assert "0 reported offline in 0 batches" in ran.stdout


def test_a_low_limit_of_open_files_reduces_the_connections_with_a_message():
    resource = pytest.importorskip("resource")
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150));"
        f"sys.argv = [{str(EXAMPLE)!r}, '--connections=500', '--timeout=2', '--silent=5'];"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] == 150:
        pytest.skip("the limit is as low already")
    dropped = "import ctypes; ctypes.CDLL(None).prctl(24, 24);"  # root could raise it again
    ran = subprocess.run(
        [sys.executable, "-c", dropped + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "500 users online" in ran.stdout:
        pytest.skip("this user may raise any limit")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "this machine allows 50 connections, not 500" in ran.stdout
    assert "50 users online" in ran.stdout


def test_a_broken_promise_is_an_exit_code():
    """The load test detects a tracker that reports no key."""
    code = (
        "import runpy, sys; from tickwheel import IdleTracker;"
        "IdleTracker._report = IdleTracker._expire;"
        f"sys.argv = [{str(EXAMPLE)!r}, '--connections=50', '--timeout=0.5', '--silent=5'];"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "WRONG: 5 silent and never reported" in ran.stdout
    assert "promise broken" in ran.stdout
