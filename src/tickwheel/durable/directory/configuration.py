"""A service's configuration as JSON: as it is stored, shown, and changed. Pure.

The stored form seals the secrets, the values of the headers and the endpoint's password; the public
form has a placeholder for them. A change that omits them, or has the placeholder, keeps the stored
ones, as long as the endpoint stays on its origin; None removes them.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tickwheel.values.changes import changes
from tickwheel.values.endpoint import split_password
from tickwheel.values.service import (
    PLACEHOLDER,
    REMOTE_TIMEOUT_SECONDS,
    Backoff,
    Breaker,
    Service,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel.durable.registry import ServiceRow

MAX_SECRETS = 5
UNREADABLE = "this node cannot open it: its key may be missing from TICKWHEEL_SECRET_KEY"
SEPARATE_FIELDS = {"name", "version", "secrets", "headers", "password"}
CONFIG_FIELDS = [field.name for field in fields(Service) if field.name not in SEPARATE_FIELDS]
NOT_CONFIGURABLE = {"gone_at_ms"}
PORTS = {"http": 80, "https": 443}
_HOSTS = re.compile(  # the scheme, and several hosts
    r"([a-z][a-z0-9+.-]*://)(?:[^/?#@]*@)?([^/?#@,]+(?:,[^/?#@,]+)+)(?:[/?].*)?", re.IGNORECASE
)


def service_from_config(name: str, config: Mapping[str, Any], stored: Service | None) -> Service:
    """Return the service that a configuration describes; raise for an invalid one.

    - `secret` is one secret, or a list with the newest first; `headers` is a mapping.
    - An omitted field, or the placeholder, keeps the stored value; None removes it. Stored values
      belong to an origin: a service that moves to another needs them again.
    """
    given = {"timeout": REMOTE_TIMEOUT_SECONDS, **masked_secrets(stored), **config}
    secrets = merge_secrets(given["secret"], stored)
    headers = merge_headers(given["headers"] or {}, stored)
    check_origin(given, stored)
    password = ""
    if isinstance(given.get("endpoint"), str):
        given["endpoint"], password = split_password(given["endpoint"])
        password = merge_password(password, stored)
    del given["secret"], given["headers"]
    unknown = given.keys() - set(CONFIG_FIELDS) | given.keys() & NOT_CONFIGURABLE
    if unknown:
        known = sorted({*CONFIG_FIELDS, "headers", "secret"} - NOT_CONFIGURABLE)
        raise TypeError(f"a service has no {min(unknown)!r}; it has {known}")
    if "backoff" in given:
        given["backoff"] = backoff_of(given["backoff"])
    given["breaker"] = breaker_of(given.get("breaker", Breaker()))
    return Service(name, secrets=secrets, headers=headers, password=password, **given)


def backoff_of(value: Any) -> Backoff:
    """Return a backoff, from a mapping or an argument of `Backoff.of`; the default for None."""
    if isinstance(value, dict):
        return Backoff(**{**value, "delays": tuple(value.get("delays", ()))})
    return Backoff() if value is None else Backoff.of(value)


def breaker_of(value: Any) -> Breaker | None:
    """Return a breaker, from a mapping or as it is; None for no breaker."""
    if isinstance(value, dict):
        return Breaker(**value)
    if value is not None and not isinstance(value, Breaker):
        raise TypeError(f"breaker must be a Breaker, a mapping or None, got {value!r:.100}")
    return value


def masked_secrets(service: Service | None) -> dict[str, Any]:
    """Return a service's secret fields with placeholders for their values."""
    if service is None:
        return {"secret": None, "headers": {}}
    return {
        "secret": PLACEHOLDER if service.secrets else None,
        "headers": {name: PLACEHOLDER for name, _ in service.headers},
    }


def fields_to_keep(given: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that keep a stored value."""
    secret = given["secret"] or []
    fields = ["secret"] if PLACEHOLDER in ([secret] if isinstance(secret, str) else secret) else []
    if split_password(str(given.get("endpoint")))[1] == PLACEHOLDER:
        fields.append("the endpoint's password")
    headers = (given["headers"] or {}).items()
    return fields + [f"the header {name!r:.100}" for name, value in headers if value == PLACEHOLDER]


def check_origin(given: Mapping[str, Any], stored: Service | None) -> None:
    """Raise when a stored secret would be sent to another origin."""
    before = "" if stored is None else stored.endpoint
    kept = fields_to_keep(given)
    if kept and origin_of(before) != origin_of(given.get("endpoint", "")):
        raise ValueError(  # without the endpoint, which may hold a password
            "the endpoint is on another origin (scheme, host and port) than before, and stored"
            f" secrets go to no other origin: give {', '.join(kept):.500} again, or null for none"
        )


def origin_of(endpoint: Any) -> str:
    """Return scheme, host and port of an endpoint, or all of it if it is not a URL.

    Stored secrets are bound to this text: another spelling of the same origin could never open
    them.
    """
    try:
        parts = urlsplit(endpoint)
        port = parts.port or PORTS.get(parts.scheme)
    except (ValueError, TypeError, AttributeError):
        hosts = _HOSTS.fullmatch(str(endpoint))
        return f"{hosts[1]}{hosts[2]}".lower() if hosts else str(endpoint)
    return f"{parts.scheme}://{parts.hostname}:{port}" if parts.hostname else str(endpoint)


def owner_of(name: str, endpoint: str, field: str) -> str:
    """Return the owner that a secret is sealed for: a service, an origin and a field."""
    return json.dumps([name, origin_of(endpoint), field])


def merge_secrets(secret: str | Sequence[str] | None, stored: Service | None) -> tuple[str, ...]:
    """Return the secrets, with the stored ones in place of the placeholder."""
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
    return tuple(dict.fromkeys(secrets))[:MAX_SECRETS]  # drop the oldest


def merge_password(password: str, stored: Service | None) -> str:
    """Return the endpoint's password, or the stored one in place of the placeholder."""
    if password != PLACEHOLDER:
        return password
    if stored is None or not stored.password:
        raise ValueError("the endpoint has no stored password to keep")
    if stored.password == PLACEHOLDER:
        raise ValueError(f"the endpoint's password cannot be kept: {UNREADABLE}")
    return stored.password


def merge_headers(
    headers: Mapping[str, str], stored: Service | None
) -> tuple[tuple[str, str], ...]:
    """Return the headers, with the stored values in place of placeholders."""
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


def sealed_config(service: Service, seal: Callable[[str, str], str]) -> str:
    """Return the JSON to store; `seal(secret, owner)` encrypts each secret."""

    def seal_field(secret: str, field: str) -> str:
        return seal(secret, owner_of(service.name, service.endpoint, field))

    config = config_without_secrets(service)
    config["secret"] = [seal_field(one, "secret") for one in service.secrets]
    config["headers"] = {
        name: seal_field(value, f"header {name}") for name, value in service.headers
    }
    if service.password:
        config["password"] = seal_field(service.password, "password")
    return json.dumps(config)


def public_config(service: Service) -> dict[str, Any]:
    """Return the configuration without secret values; a client may send it back as a change."""
    config = config_without_secrets(service)
    for name in NOT_CONFIGURABLE:
        del config[name]
    return config | masked_secrets(service)


def config_without_secrets(service: Service) -> dict[str, Any]:
    """Return the configuration without the secret fields."""
    config = {name: getattr(service, name) for name in CONFIG_FIELDS}
    config["backoff"] = asdict(service.backoff)
    config["breaker"] = None if service.breaker is None else asdict(service.breaker)
    return config


def service_changes(before: Service | None, after: Service | None) -> str:
    """Return the changes of a service for the audit log; None stands for no service."""

    def fields_of(service: Service | None) -> dict[str, Any]:
        if service is None:
            return {}
        secrets = {"secret": service.secrets or None, "headers": dict(service.headers)}
        return secrets | {"password": service.password or None} | config_without_secrets(service)

    secret = ("secret", "headers", "password")
    return changes(fields_of(before), fields_of(after), secret=secret)


def service_from_row(row: ServiceRow, unseal: Callable[[str, str], str]) -> Service:
    """Return the service of a stored row."""
    config = json.loads(row.config)

    def unseal_field(text: str, field: str) -> str:
        return unseal(text, owner_of(row.name, config.get("endpoint", ""), field))

    secrets = tuple(unseal_field(one, "secret") for one in config.pop("secret", []))
    sealed = config.pop("headers", {}).items()
    headers = tuple((name, unseal_field(value, f"header {name}")) for name, value in sealed)
    password = config.pop("password", "")
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
            "password": unseal_field(password, "password") if password else "",
            "version": row.version,
        },
    )


def known_fields(made: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that this version knows; a later version may have stored more."""
    names = {field.name for field in fields(made)}
    return {name: value for name, value in config.items() if name in names}
