"""The broker of an app as the endpoint of a service: one URL with all hosts and options."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from kombu.utils.url import url_to_parts

if TYPE_CHECKING:
    from celery import Celery

SCHEMES = {"amqp": "amqp", "pyamqp": "amqp", "amqps": "amqps", "redis": "redis", "rediss": "rediss"}
TLS = {"amqp": "amqps", "redis": "rediss"}
# The options of kombu's Redis transport that decide where a message goes, and their defaults.
OPTIONS = {"global_keyprefix": "", "sep": "\x06\x16", "priority_steps": [0, 3, 6, 9]}


def endpoint_of(app: Celery) -> str:
    """Return the endpoint for the app's broker; raise ValueError if a service cannot have it."""
    connection = app.connection_for_write()
    brokers = [url_to_parts(url) for url in connection.alt or [app.conf.broker_write_url]]
    first = brokers[0]
    if any(one[3:6] != first[3:6] or one.scheme != first.scheme for one in brokers):
        raise ValueError(
            "the brokers of the app must have the same scheme, user, password and path"
        )
    if first.scheme not in SCHEMES:
        raise ValueError(
            f"tickwheel publishes to brokers with {', '.join(SCHEMES)}, got {first.scheme!r:.50}"
        )
    scheme = SCHEMES[first.scheme]
    if connection.ssl:
        scheme = TLS.get(scheme, scheme)
    hosts = ",".join(
        f"{one.hostname or '127.0.0.1'}{f':{one.port}' if one.port else ''}" for one in brokers
    )
    user = quote(first.username or "", safe="")
    if first.password:
        user += f":{quote(first.password, safe='')}"
    path = quote((connection.virtual_host or "").removeprefix("/"), safe="")
    query = options_of(connection.transport_options or {}) if "redis" in scheme else ""
    return f"{scheme}://{user and f'{user}@'}{hosts}/{path}{query and f'?{query}'}"


def options_of(transport_options: dict[str, object]) -> str:
    """Return the options of the transport that a message depends on, as a query."""
    found = {}
    for name, default in OPTIONS.items():
        value = transport_options.get(name, default)
        if value != default:
            found[name] = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    return urlencode(found)
