"""TLS and credentials of a Kafka cluster, as options of aiokafka. Pure, but for the TLS files."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tickwheel.values.endpoint import Endpoint

SCHEMES = {"kafka": 9092, "kafkas": 9093}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


def check_security(endpoint: Endpoint) -> None:
    """Raise ValueError unless a user has a password, and a known mechanism to prove it."""
    if bool(endpoint.user) != bool(endpoint.password):
        raise ValueError("the credentials of a Kafka URL must be user:password")
    mechanism = mechanism_of(endpoint)
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}, got {mechanism!r:.50}")


def mechanism_of(endpoint: Endpoint) -> str:
    """Return how a user proves the password: PLAIN, unless the URL names another."""
    return endpoint.option("mechanism", MECHANISMS[0])


def security_options(endpoint: Endpoint) -> dict[str, Any]:
    """Return the options for TLS and credentials; `ca`, `cert` and `key` name files."""
    protocol = ("SASL_" if endpoint.user else "") + ("SSL" if endpoint.tls else "PLAINTEXT")
    options: dict[str, Any] = {"security_protocol": protocol}
    if endpoint.user:
        options["sasl_mechanism"] = mechanism_of(endpoint)
        options["sasl_plain_username"] = endpoint.user
        options["sasl_plain_password"] = endpoint.password
    if endpoint.tls:
        context = ssl.create_default_context(cafile=endpoint.option("ca") or None)
        if cert := endpoint.option("cert"):
            context.load_cert_chain(cert, endpoint.option("key") or None)
        options["ssl_context"] = context
    return options


def host_and_port(host: str, port: int) -> str:
    """Return an address as Kafka's clients read it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
