"""Calls and messages for a receiver: refused, or verified and handled once, never an exception."""

import base64
import hashlib
import hmac
import json

from fuzz.source import Source
from tickwheel import ManualClock
from tickwheel.receiver import Accepted, Gone, Receiver, Retry, Settlement

KEY = b"a key of thirty-two random bytes"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
NOW = 1_700_000_000
NAMES = (
    "webhook-id", "webhook-timestamp", "webhook-signature", "tickwheel-service",
    "tickwheel-attempt", "tickwheel-epoch", "tickwheel-due-at", "content-type", "x-other",
)  # fmt: skip
RESULTS = (({"a": 1}, 200), (None, 204), (Accepted(), 202), (Retry(5), 409), (Gone(), 410))
DONE = {200, 204}
OUTCOMES = {200: "finished", 204: "finished", 202: "", 409: "failed", 410: "failed"}


def signature(headers, body):
    """Return the right signature of a call, made by the text of the specification."""
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}."
    signed = text.encode("utf-8", "surrogatepass") + body
    return "v1," + base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()


def choose_call(source):
    """Return the headers and the body of a call, valid or with some changes."""
    headers = {
        "webhook-id": "a" * 32, "webhook-timestamp": str(NOW), "tickwheel-service": "mail",
        "tickwheel-attempt": "1", "tickwheel-epoch": "2",
        "tickwheel-due-at": "2026-01-01T00:00:00Z", "webhook-signature": "v1,",
    }  # fmt: skip
    for _ in range(source.number() % 4):
        name = source.pick(NAMES)
        if source.number() % 4:
            headers[name] = source.text()
        else:
            headers.pop(name, None)
    signed = source.pick((True, False)) and headers.keys() >= {"webhook-id", "webhook-timestamp"}
    body = source.rest()
    if signed:
        headers["webhook-signature"] = signature(headers, body)
    return headers, body


def run(data):
    source = Source(data)
    unsigned, as_bytes, as_pairs = (bool(source.number() & 1) for _ in range(3))
    result, status = source.pick(RESULTS)
    headers, body = choose_call(source)
    given = headers
    if as_bytes:
        given = {
            name.encode(): text.encode("utf-8", "surrogatepass") for name, text in given.items()
        }
    given = list(given.items()) if as_pairs else given
    options = {"unsigned": True} if unsigned else {"secrets": SECRET}
    receiver, handled, reports = Receiver(clock=ManualClock(NOW), **options), [], []

    def handle(delivery):
        handled.append(delivery)
        return result

    def feedback(*args, **details):
        reports.append((args, details))

    first, second = (receiver.answer(given, body, handle) for _ in range(2))
    settled = receiver.consume(given, body, handle, feedback=feedback)
    if not handled:
        assert first.status in (400, 401), first
        assert first.status == json.loads(first.body)["status"]
        assert (second, settled, reports) == (first, Settlement.REJECT, [])
        return
    assert first.status == status
    if status in DONE:
        assert second == first._replace(headers=[*first.headers, ("tickwheel-duplicate", "true")])
    assert len(handled) == (1 if status in DONE else 3)
    assert settled is Settlement.ACKNOWLEDGE  # its outcome was reported, or will be
    assert [args for args, _ in reports] == [(handled[0].task_id, OUTCOMES[status])] * (
        status != 202
    )
    if not unsigned and not as_bytes:
        assert signature(headers, body) in headers["webhook-signature"]
        assert abs(int(headers["webhook-timestamp"]) - NOW) <= 300
    if body and "content-type" not in headers:
        assert handled[0].payload == json.loads(body.decode())
