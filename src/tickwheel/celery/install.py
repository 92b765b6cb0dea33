"""`install`: the one call that a Celery app needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tickwheel.celery.control import RevokingBroadcast
from tickwheel.celery.messages import Messages
from tickwheel.celery.sender import DelayingSender
from tickwheel.client import Client
from tickwheel.values.service import check_name

if TYPE_CHECKING:
    from celery import Celery

DEFAULT_THRESHOLD_SECONDS = 10.0
TIMEOUT_SECONDS, RETRIES = 5.0, 2  # a caller of apply_async waits no longer for the server


def install(
    app: Celery,
    server: str | Client,
    *,
    threshold: float = DEFAULT_THRESHOLD_SECONDS,
    service: str = "celery",
    fallback: bool = True,
) -> None:
    """Store in tickwheel every message of `app` that is due in more than `threshold` seconds.

    - `server`: the URL of a tickwheel server, or a `Client` with your own token and time limits.
      By default a call to it takes at most 5 seconds.
    - When a message is due, the server publishes it to the app's broker, byte for byte as Celery
      would have sent it. Workers need no change; call this in the module that makes the app, so
      that retries inside workers are stored too.
    - `revoke` cancels a stored message, and then reaches the workers as before.
    - `service`: the tickwheel service that holds the broker's URL. The first message creates it, if
      the token may do that. Apps with different brokers need different names.
    - `fallback`: when tickwheel does not take a message, log that and send it as Celery does,
      into the memory of a worker. False raises `kombu.exceptions.OperationalError` instead.

    A second call replaces the settings of the first.
    """
    if isinstance(server, str):
        check_server(server)
        server = Client(server, timeout=TIMEOUT_SECONDS, retries=RETRIES)
    if not isinstance(server, Client):
        raise TypeError(f"server must be a URL or a Client, got {server!r:.100}")
    if not math.isfinite(threshold) or threshold < 0:
        raise ValueError(f"threshold must be 0 seconds or more, got {threshold!r}")
    check_name("service", service)
    messages = Messages(app, server, service)
    # The sender and the control are made at their first use, which may be before this call.
    sender = vars(app.amqp).get("send_task_message")
    original = sender.original if isinstance(sender, DelayingSender) else sender
    vars(app.amqp)["send_task_message"] = DelayingSender(
        app, messages, threshold, original, fallback=fallback
    )
    broadcast = app.control.broadcast
    if isinstance(broadcast, RevokingBroadcast):
        broadcast = broadcast.original
    app.control.broadcast = RevokingBroadcast(app, messages, broadcast)


def check_server(url: str) -> None:
    """Raise ValueError unless a URL is one of a server; no message shows it."""
    scheme = urlsplit(url).scheme
    if scheme not in ("http", "https"):
        raise ValueError(
            "the URL must be one of a tickwheel server, such as http://127.0.0.1:7380, got"
            f" {scheme!r:.50}; to use a database, run `tickwheel serve --store` with its URL"
        )
