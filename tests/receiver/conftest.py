"""Calls like those of a server, signed by another implementation."""

import json
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook

from durable.stage import watchdog
from tickwheel.values.signature import new_secret

TASK_ID = "0198c0de00007000a1b2c3d4e5f60718"


@pytest.fixture(autouse=True)
def watched():
    """End a test that hangs."""
    with watchdog():
        yield


class Caller:
    """Makes the headers and the body of a call."""

    def __init__(self, secret):
        self.secret = secret

    def __call__(self, payload=None, *, at=None, body=None, task_id=TASK_ID, attempt=1, **headers):
        at = at or datetime.now(UTC)
        body = json.dumps(payload).encode() if body is None else body
        signature = Webhook(self.secret).sign(task_id, at, body.decode("utf-8", "replace"))
        made = {
            "content-type": "application/json",
            "webhook-id": task_id,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": signature,
            "tickwheel-service": "mail",
            "tickwheel-attempt": str(attempt),
            "tickwheel-due-at": "2026-11-15T12:00:00.000Z",
            "tickwheel-epoch": "7",
        }
        made |= {name.replace("_", "-"): value for name, value in headers.items()}
        return {name: value for name, value in made.items() if value is not None}, body


@pytest.fixture
def secret():
    return new_secret()


@pytest.fixture
def call(secret):
    return Caller(secret)
