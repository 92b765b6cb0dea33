"""The checks of `doctor` that need no store: time zones, descriptors, files of this host, TLS."""

from __future__ import annotations

import math
import os
import ssl
import stat
import zoneinfo
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.client.requests import is_loopback
from tickwheel.clock import WallClock
from tickwheel.config import without_password
from tickwheel.durable.permits.descriptors import CALLS_SHARE, CONNECTIONS_SHARE, hard_limit
from tickwheel.values.store_url import SQLITE, kind_of, sqlite_path

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tickwheel.config import Config

OK, WARNING, ERROR = "ok", "warning", "error"
DAY_SECONDS = 86_400
CERTIFICATE_DAYS = 30  # before its end, after which it is worth a warning
ANY_ZONE = "Europe/Berlin"


class Finding(NamedTuple):
    """One result; `remedy` is empty if there is nothing to do."""

    check: str
    level: str
    finding: str
    remedy: str = ""


def check_time_zones(used: Iterable[str] = ()) -> Iterator[Finding]:
    """Check that this host has the time zones, and those that schedules use."""
    missing = [zone for zone in sorted({ANY_ZONE, *used}) if not has_zone(zone)]
    if missing:
        yield Finding(
            "time zones", ERROR, f"this host does not know {', '.join(missing[:10])}",
            "install the time zones: pip install tzdata, or the system's package tzdata",
        )  # fmt: skip
    else:
        yield Finding("time zones", OK, "the time zones are there")


def has_zone(name: str) -> bool:
    """Return whether this host knows a time zone."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def check_descriptors(config: Config, *, services: bool = True) -> Iterator[Finding]:
    """Compare the limit of open files with the settings that need them.

    `services`: there are some to call; task functions need no files.
    """
    limit = hard_limit()
    wanted = config.max_connections / CONNECTIONS_SHARE
    if services:
        wanted = max(wanted, config.max_calls / CALLS_SHARE)
    if limit >= wanted:
        shown = "no limit" if limit == math.inf else f"{limit:.0f}"
        yield Finding("file descriptors", OK, f"{shown}")
        return
    connections = min(config.max_connections, int(limit * CONNECTIONS_SHARE))
    calls = min(config.max_calls, int(limit * CALLS_SHARE))
    yield Finding(
        "file descriptors", WARNING,
        f"a process may open {limit:.0f}: that is {connections} connections and {calls} calls",
        f"raise the limit to {math.ceil(wanted)} (LimitNOFILE= of systemd, ulimit -n), or lower"
        " max_connections and max_calls",
    )  # fmt: skip


def check_files(config: Config, origins: Mapping[str, str]) -> Iterator[Finding]:
    """Check that no other user can read payloads, keys and passwords."""
    private = [config.tls_key, config.grpc_key]
    if kind_of(config.store) == SQLITE:
        path = sqlite_path(config.store)
        private += [path, Path(f"{path}-wal")]
    kind, _, file = origins["store"].partition(" ")
    if kind == "file" and config.store != without_password(config.store):
        private.append(Path(file))
    readable = [path for path in private if path is not None and others_read(path)]
    for path in readable:
        yield Finding(
            "file modes", WARNING, f"other users of this host can read {path}",
            f"chown {path} to the service's user, then chmod 600; make its directory private",
        )  # fmt: skip
    if not readable:
        yield Finding("file modes", OK, "no other user can read the store's files and keys")


def others_read(path: Path) -> bool:
    """Return whether a file exists that everybody, or a group of others, may read, by its mode.

    A group of this process may read it: a key of root's is often readable by the service's group.
    """
    if os.name != "posix":
        return False
    try:
        about = path.stat()
    except OSError:
        return False
    own = about.st_gid in (os.getegid(), *os.getgroups())
    return bool(about.st_mode & (stat.S_IROTH if own else stat.S_IROTH | stat.S_IRGRP))


def check_tls(config: Config) -> Iterator[Finding]:
    """Check the certificates and authorities of the server and of its calls."""
    if config.tls_cert is None or config.tls_key is None:
        yield from check_plain_text(config)
    else:
        yield check_pair(config.tls_cert, config.tls_key)
    if config.grpc_cert is not None and config.grpc_key is not None:
        yield check_pair(config.grpc_cert, config.grpc_key)
    for authorities in (config.grpc_client_ca, config.grpc_ca):
        if authorities is not None:
            yield check_authorities(authorities)


def check_plain_text(config: Config) -> Iterator[Finding]:
    """Check that what travels without TLS does not leave this host."""
    for address in (config.listen, config.grpc_listen):
        if address is None:
            continue
        if is_loopback(address.host):
            yield Finding("TLS", OK, f"{address} is reached from this host only")
        else:
            yield Finding(
                "TLS", WARNING, f"tokens and payloads travel in plain text to {address}",
                "set tls_cert and tls_key, or let a proxy on this host do HTTPS",
            )  # fmt: skip


def check_pair(chain: Path, key: Path) -> Finding:
    """Check that a key fits its certificate, and that no certificate of the chain ends soon."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
    except OSError as error:  # includes ssl.SSLError
        return Finding(
            "TLS", ERROR, f"{chain} and {key}: {error.strerror or error}",
            "name a certificate chain and its own key, both in PEM form and readable here",
        )  # fmt: skip
    return expiry_finding(chain, min)


def check_authorities(path: Path) -> Finding:
    """Check a file of authorities; while one is replaced, it has the old and the new one."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:
        return Finding(
            "TLS", ERROR, f"{path}: {error.strerror or error}",
            "name the certificates of the authorities, in PEM form and readable here",
        )  # fmt: skip
    return expiry_finding(path, max)


def expiry_finding(path: Path, decisive: Callable[[Iterable[dt.datetime]], dt.datetime]) -> Finding:
    """Return how long the certificates in a file are valid; `decisive` chooses one of the ends."""
    try:
        from cryptography import x509  # noqa: PLC0415 - few servers have a certificate
    except ImportError as error:
        shown = f"{error}: it is unknown when the certificates in {path} end"
        return Finding("TLS", WARNING, shown, "pip install 'tickwheel[server]'")
    ends = decisive(
        one.not_valid_after_utc for one in x509.load_pem_x509_certificates(path.read_bytes())
    )
    days = (ends.timestamp() - WallClock().time()) / DAY_SECONDS
    if days > CERTIFICATE_DAYS:
        return Finding("TLS", OK, f"the certificate in {path} is valid until {ends:%Y-%m-%d}")
    shown = f"the certificate in {path} is valid until {ends:%Y-%m-%d %H:%M} UTC"
    remedy = "renew it; the server reads its own again at SIGHUP, and the others at its start"
    return Finding("TLS", WARNING if days > 0 else ERROR, shown, remedy)


def duration(ms: float) -> str:
    """Return a duration for a sentence."""
    seconds = ms / 1000
    for size, unit in ((DAY_SECONDS, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"
