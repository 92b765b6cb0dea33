"""A service's configuration as JSON: what is stored, what is shown, and what a change keeps. Pure.

Stored, its secrets and the values of its headers are sealed; shown, they are a placeholder. A
configuration that leaves them out, or has the placeholder, keeps those that are stored, as long as
the endpoint stays on its origin; None removes them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tickwheel.values.changes import changes
from tickwheel.values.service import PLACEHOLDER, Backoff, Breaker, Service

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel.durable.registry import ServiceRow

MAX_SECRETS = 5
UNREADABLE = "this node cannot open it: its key may be missing from TICKWHEEL_SECRET_KEY"
TIMEOUT = 30.0  # of what is called over a network, unless it says
KEPT_APART = {"name", "version", "secrets", "headers"}
PLAIN = [field.name for field in fields(Service) if field.name not in KEPT_APART]
NOTED = {"gone_at_ms"}  # which nobody configures
PORTS = {"http": 80, "https": 443}


def configured(name: str, config: Mapping[str, Any], stored: Service | None) -> Service:
    """Return the service that a configuration describes; raise for what cannot be right.

    - `secret` is one, or a list, the newest first; `headers` is a mapping.
    - Left out, or where they have the placeholder, both are the stored ones; None removes them.
      The stored ones stay with their origin: for another, both must be given.
    """
    given = {"timeout": TIMEOUT, **masked(stored), **config}
    secrets = kept_secrets(given["secret"], stored)
    headers = kept_headers(given["headers"] or {}, stored)
    check_origin(given, stored)
    del given["secret"], given["headers"]
    unknown = given.keys() - set(PLAIN) | given.keys() & NOTED
    if unknown:
        known = sorted({*PLAIN, "headers", "secret"} - NOTED)
        raise TypeError(f"a service has no {min(unknown)!r}; it has {known}")
    if "backoff" in given:
        given["backoff"] = backoff_of(given["backoff"])
    given["breaker"] = breaker_of(given.get("breaker", Breaker()))
    return Service(name, secrets=secrets, headers=headers, **given)


def backoff_of(value: Any) -> Backoff:
    """Return a backoff of a mapping, or of what `Backoff.of` takes; None: the default."""
    if isinstance(value, dict):
        return Backoff(**{**value, "delays": tuple(value.get("delays", ()))})
    return Backoff() if value is None else Backoff.of(value)


def breaker_of(value: Any) -> Breaker | None:
    """Return a breaker, of a mapping, too; None: none."""
    if isinstance(value, dict):
        return Breaker(**value)
    if value is not None and not isinstance(value, Breaker):
        raise TypeError(f"breaker must be a Breaker, a mapping or None, got {value!r:.100}")
    return value


def masked(service: Service | None) -> dict[str, Any]:
    """Return the fields of a service that are secret, as everybody may see them."""
    if service is None:
        return {"secret": None, "headers": {}}
    return {
        "secret": PLACEHOLDER if service.secrets else None,
        "headers": {name: PLACEHOLDER for name, _ in service.headers},
    }


def kept_fields(given: Mapping[str, Any]) -> list[str]:
    """Return the fields of which something stored is to be kept."""
    secret = given["secret"] or []
    fields = ["secret"] if PLACEHOLDER in ([secret] if isinstance(secret, str) else secret) else []
    headers = (given["headers"] or {}).items()
    return fields + [f"the header {name!r:.100}" for name, value in headers if value == PLACEHOLDER]


def check_origin(given: Mapping[str, Any], stored: Service | None) -> None:
    """Raise when a stored secret would be sent to another origin."""
    before = "" if stored is None else stored.endpoint
    kept = kept_fields(given)
    if kept and origin_of(before) != origin_of(given.get("endpoint", "")):
        raise ValueError(  # without the endpoint: one that is wrong may hold a password
            "the endpoint is on another origin (scheme, host and port) than before, and stored"
            f" secrets go to no other origin: give {', '.join(kept):.500} again, or null for none"
        )


def origin_of(endpoint: Any) -> str:
    """Return scheme, host and port of an endpoint; of what is no URL the whole.

    Stored secrets are bound to it: another form for the same endpoint would close them for good.
    """
    try:
        parts = urlsplit(endpoint)
        port = parts.port or PORTS.get(parts.scheme)
    except (ValueError, TypeError, AttributeError):
        return str(endpoint)
    return f"{parts.scheme}://{parts.hostname}:{port}" if parts.hostname else str(endpoint)


def owner_of(name: str, endpoint: str, field: str) -> str:
    """Return the one place where a secret belongs: what it is sealed for."""
    return json.dumps([name, origin_of(endpoint), field])


def kept_secrets(secret: str | Sequence[str] | None, stored: Service | None) -> tuple[str, ...]:
    """Return secrets, those that are stored where the placeholder stands."""
    given = [] if secret is None else [secret] if isinstance(secret, str) else list(secret)
    secrets: list[str] = []
    for one in given:
        if not isinstance(one, str):
            raise TypeError("a secret must be a str")
        if one == PLACEHOLDER and (stored is None or not stored.secrets):
            raise ValueError("there is no stored secret to keep")
        if one == PLACEHOLDER and stored and PLACEHOLDER in stored.secrets:
            raise ValueError(f"the stored secret cannot be kept: {UNREADABLE}")
        secrets += stored.secrets if one == PLACEHOLDER and stored else [one]
    return tuple(dict.fromkeys(secrets))[:MAX_SECRETS]  # of too many the oldest go


def kept_headers(headers: Mapping[str, str], stored: Service | None) -> tuple[tuple[str, str], ...]:
    """Return headers, with the values that are stored where the placeholder stands."""
    if not hasattr(headers, "items"):
        raise TypeError("headers must be a mapping of names to values")
    known = dict(stored.headers) if stored else {}
    found = []
    for name, value in headers.items():
        if not isinstance(value, str):
            raise TypeError("the values of headers must be str")
        if value == PLACEHOLDER:
            if name not in known:
                raise ValueError(f"the header {name!r:.100} has no stored value to keep")
            value = known[name]  # noqa: PLW2901
            if value == PLACEHOLDER:
                raise ValueError(f"the header {name!r:.100} cannot be kept: {UNREADABLE}")
        found.append((name, value))
    return tuple(found)


def stored_form(service: Service, seal: Callable[[str, str], str]) -> str:
    """Return the JSON to store; `seal` is given a secret, and the owner that it is for."""

    def sealed(secret: str, field: str) -> str:
        return seal(secret, owner_of(service.name, service.endpoint, field))

    config = plain_form(service)
    config["secret"] = [sealed(one, "secret") for one in service.secrets]
    config["headers"] = {name: sealed(value, f"header {name}") for name, value in service.headers}
    return json.dumps(config)


def shown_form(service: Service) -> dict[str, Any]:
    """Return what everybody may see, and may give back."""
    config = plain_form(service)
    for name in NOTED:
        del config[name]
    return config | masked(service)


def plain_form(service: Service) -> dict[str, Any]:
    """Return the configuration without what is secret."""
    config = {name: getattr(service, name) for name in PLAIN}
    config["backoff"] = asdict(service.backoff)
    config["breaker"] = None if service.breaker is None else asdict(service.breaker)
    return config


def service_changes(before: Service | None, after: Service | None) -> str:
    """Return what a change of a service has changed, for the audit log; None: there is none."""

    def fields_of(service: Service | None) -> dict[str, Any]:
        if service is None:
            return {}
        config = {"secret": service.secrets or None, "headers": dict(service.headers)}
        return config | plain_form(service)

    return changes(fields_of(before), fields_of(after), secret=("secret", "headers"))


def restored(row: ServiceRow, unseal: Callable[[str, str], str]) -> Service:
    """Return the service of a stored row."""
    config = json.loads(row.config)

    def opened(text: str, field: str) -> str:
        return unseal(text, owner_of(row.name, config.get("endpoint", ""), field))

    secrets = tuple(opened(one, "secret") for one in config.pop("secret", []))
    sealed = config.pop("headers", {}).items()
    headers = tuple((name, opened(value, f"header {name}")) for name, value in sealed)
    backoff = known_fields(Backoff, config.pop("backoff", {}))
    backoff["delays"] = tuple(backoff.get("delays", ()))
    breaker = config.pop("breaker", None)
    return Service(
        row.name,
        **{
            **known_fields(Service, config),
            "backoff": Backoff(**backoff),
            "breaker": None if breaker is None else Breaker(**known_fields(Breaker, breaker)),
            "secrets": secrets,
            "headers": headers,
            "version": row.version,
        },
    )


def known_fields(made: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a stored mapping that this version knows; a later one may add to it."""
    names = {field.name for field in fields(made)}
    return {name: value for name, value in config.items() if name in names}
