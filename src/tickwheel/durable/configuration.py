"""A service's configuration as JSON: what is stored, what is shown, and what a change keeps. Pure.

Stored, its secrets and the values of its headers are sealed; shown, they are a placeholder, and a
configuration that comes back with the placeholder means those that are stored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from tickwheel.durable.service import PLACEHOLDER, Backoff, Breaker, Service

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel.durable.registry import ServiceRow

MAX_SECRETS = 5
UNREADABLE = "it is sealed with a key that this node does not have (TICKWHEEL_SECRET_KEY)"
TIMEOUT = 30.0  # of what is called over a network, unless it says
KEPT_APART = {"name", "version", "secrets", "headers"}
PLAIN = [field.name for field in fields(Service) if field.name not in KEPT_APART]
NOTED = {"gone_at_ms"}  # which nobody configures


def configured(name: str, config: Mapping[str, Any], stored: Service | None) -> Service:
    """Return the service that a configuration describes; raise for what cannot be right.

    - `secret` is one, or a list, the newest first; `headers` is a mapping.
    """
    given = {"timeout": TIMEOUT, **config}
    secrets = kept_secrets(given.pop("secret", None), stored)
    headers = kept_headers(given.pop("headers", None) or {}, stored)
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


def kept(config: Mapping[str, Any]) -> bool:
    """Say whether something that is stored is to be kept."""
    secret = config.get("secret") or ()
    secrets = [secret] if isinstance(secret, str) else secret
    return PLACEHOLDER in [*secrets, *(config.get("headers") or {}).values()]


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


def stored_form(service: Service, seal: Callable[[str], str]) -> str:
    """Return the JSON to store."""
    config = plain_form(service)
    config["secret"] = [seal(one) for one in service.secrets]
    config["headers"] = {name: seal(value) for name, value in service.headers}
    return json.dumps(config)


def shown_form(service: Service) -> dict[str, Any]:
    """Return what everybody may see, and may give back."""
    config = plain_form(service)
    for name in NOTED:
        del config[name]
    config["secret"] = PLACEHOLDER if service.secrets else None
    config["headers"] = {name: PLACEHOLDER for name, _ in service.headers}
    return config


def plain_form(service: Service) -> dict[str, Any]:
    """Return the configuration without what is secret."""
    config = {name: getattr(service, name) for name in PLAIN}
    config["backoff"] = asdict(service.backoff)
    config["breaker"] = None if service.breaker is None else asdict(service.breaker)
    return config


def restored(row: ServiceRow, unseal: Callable[[str], str]) -> Service:
    """Return the service of a stored row."""
    config = json.loads(row.config)
    secrets = tuple(map(unseal, config.pop("secret", [])))
    headers = tuple((name, unseal(value)) for name, value in config.pop("headers", {}).items())
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
