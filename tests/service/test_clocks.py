"""A node with a wrong clock uses the database's clock for its calls."""

import time
from datetime import datetime

import pytest

from false_clock import FalseClock
from receivers import date
from service.harness import metric
from tickwheel.values.signature import InvalidSignature, new_secret, verify

MINUTES = 600.0  # seconds by which the node's clock is off
NEARLY = 60.0  # seconds: far more than a call takes, far less than MINUTES


@pytest.fixture(params=[MINUTES, -MINUTES], ids=["fast", "slow"])
def server(request, tmp_path, postgres_url, make_server):
    clock = FalseClock(tmp_path)
    clock.set(request.param)
    server = make_server(postgres_url, environment=clock.environment)
    offset = metric(server.get("/metrics").body.decode(), "tickwheel_clock_offset_seconds")
    assert abs(offset + request.param) < NEARLY, "the node's clock is off, and a metric shows it"
    return server


def test_its_signed_calls_pass_verification(server, receiver):
    secret = new_secret()

    async def verifying(call):
        try:
            verify([secret], call.request.headers, call.request.body, now=time.time())
        except InvalidSignature as error:
            await call.answer(401, str(error).encode())
        else:
            await call.answer(200)

    server.service("signed", receiver.on("/signed", verifying), secret=secret, max_attempts=1)
    (task_id,) = server.now("signed")
    ended = server.ended(task_id)
    assert (ended["state"], ended["error"]) == ("finished", None)


def test_a_retry_after_date_is_read_by_the_databases_clock(server, receiver):
    until = int(time.time()) + 3600

    async def busy(call):
        await call.answer(503, headers=[("Retry-After", date(until))])

    server.service("busy", receiver.on("/busy", busy))
    (task_id,) = server.now("busy")
    receiver.wait(lambda: receiver.requests)
    task = server.task_in(task_id, "delay")
    due_at = datetime.fromisoformat(task["due_at"]).timestamp()
    assert until <= due_at < until + NEARLY
