"""The example's receiver, as a process on a real socket."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "http_receiver.py"


@contextmanager
def run_example(**environment):
    """Run the example on a free port; yield the process, a way to call it, and its output."""
    command = [sys.executable, "-W", "error", str(EXAMPLE), "0"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TICKWHEEL_")}
    with subprocess.Popen(
        command, env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            first = process.stdout.readline()
            port = int(first.rstrip("/\n").rpartition(":")[2])

            def post(headers, body, path="/"):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                read = answer.status, answer.read()
                connection.close()
                return read

            post.port, post.pid = port, process.pid
            yield first, post, process.stdout.readline
        finally:
            process.terminate()
            process.communicate(timeout=30)


@pytest.fixture
def signed(secret):
    with run_example(TICKWHEEL_WEBHOOK_SECRET=secret) as example:
        yield example


def test_the_example_prints_and_answers_a_call(signed, call):
    first, post, line = signed
    assert first.startswith("receiving signed calls on http://127.0.0.1:")
    assert post(*call({"to": "ada"})) == (200, b'{"received":{"to":"ada"}}')
    assert line().startswith("mail: {'to': 'ada'}, attempt 1 of task 0198c0de")


def test_the_example_with_a_secret_accepts_only_signed_calls(signed, call):
    _, post, line = signed
    headers, body = call(1)
    assert post(headers | {"webhook-signature": "v1,AAAA"}, body)[0] == 401
    assert line().startswith("refused, 401")
    del headers["webhook-signature"]
    with run_example() as (first, post, line):
        assert first.startswith("receiving any call, signed or not, on")
        assert post(headers, body) == (200, b'{"received":1}')


def test_the_example_accepts_tasks_for_feedback(signed, call):
    _, post, line = signed
    assert post(*call(1), path="/?feedback=1") == (202, b"")
    line()
    assert "tickwheel feedback 0198c0de" in line()


def test_the_example_accepts_hundreds_of_calls_at_once(signed):
    """The backlog holds them while the process cannot accept connections."""
    _, post, _ = signed
    os.kill(post.pid, signal.SIGSTOP)
    try:
        with ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", post.port), 10))
    finally:
        os.kill(post.pid, signal.SIGCONT)
