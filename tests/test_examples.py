"""Each example runs, ends by itself, and prints its key lines."""

import subprocess
import sys
from pathlib import Path

import pytest

from pulse import undisturbed

SLOW = "blocked the timer for "  # logged when the machine stands still during a callback
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
KEY_LINES = {
    "broker": [
        "producer gets:  ok 0",
        "producer gets:  timeout 1",
        "consumer gets:  ok 4 five!,and five more",
        "consumer gets:  timeout 4",
        "admin gets:  ok",
        "consumer gets:  gone 4",
        "consumer gets:  shutdown",
    ],
    "game_buffs": [
        "  9.00 s  Mira refreshes shield: 10 s more",
        " 19.00 s  Mira loses shield",
        " 25.00 s  Mira is dispelled of haste, stealth",
        "3600 frames, 8 firings, 3 cancelled",
    ],
    "heartbeats": ["ben is missing: nothing for 0.35 s", "cleo is back", "ada has left"],
    "idle_gateway": [
        "200 users online, on 1 addresses; 20 go silent",
        "20 reported offline in ",
        "every silent user was reported in time, and no live one",
    ],
    "line_channel": [
        'the warehouse got {"order":7}',
        "attempt 1: retry, the warehouse is closed",
        "attempt 2: finish, None",
        "the task is finished",
    ],
    "order_expiry": [
        "o-1 is paid in time: True, and is cancelled",
        "o-2 gets an hour more: True",
        "order o-3 has expired",
        "o-4 is failed after 3 failures:",
        "  3: fail, ConnectionError: the bank did not answer attempt 3",
        "o-5 is failed at once: there is nothing to charge",
        "still to come: order:o-2",
    ],
    "order_expiry_sync": [
        "two orders are stored",
        "the first shop was killed: True",
        "found again: order:o-1, order:o-2",
        "o-2 is paid in time: True",
        "order:o-2: cancelled",
        "order:o-1: finished, order o-1 has expired",
    ],
    "request_timeouts": [
        "bob: sleep 9.0 -> 503 took too long",
        "bob: sleep 0.1 -> 200 ok",
        "alice: the server hung up",
        "burst: 50 clients, 1000 requests, no timeout fired",
    ],
}


def test_each_example_is_known_here():
    # These need a server or a broker, or serve until Ctrl-C: other tests run them.
    others = {"http_receiver", "queue_worker", "grpc_callee", "grpc_client"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*KEY_LINES, *others}


@pytest.mark.parametrize("name", KEY_LINES)
def test_an_example_prints_its_key_lines(name):
    command = [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"]
    for run in undisturbed():
        with run:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            errors = [line for line in ran.stderr.splitlines() if SLOW not in line]
            assert (ran.returncode, errors) == (0, [])
            for line in KEY_LINES[name]:
                assert line in ran.stdout, ran.stdout


@pytest.mark.parametrize("name", KEY_LINES)
def test_an_example_documents_itself_and_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert text.startswith('"""')
    assert f"    python examples/{name}.py\n" in text
