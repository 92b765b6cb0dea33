"""File descriptors: how many this process may open, and how it divides them.

Three fifths are for connections to the API, a fifth for calls of services over HTTP and gRPC, a
twentieth for connections to brokers, and another for DNS lookups. The rest is a reserve: the store,
the listener and the log must always get theirs.
"""

from __future__ import annotations

import math

from tickwheel.durable.log import logger

CONNECTIONS_SHARE = 0.6
CALLS_SHARE = 0.2
BROKERS_SHARE = 0.05
LOOKUPS_SHARE = 0.05
UNLIMITED_DESCRIPTORS = 1 << 20  # the soft limit to set where the hard limit is unlimited


def limit() -> float:
    """Return how many file descriptors this process may open."""
    try:
        import resource  # noqa: PLC0415 - not on Windows, which has no such limit
    except ImportError:
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def hard_limit() -> float:
    """Return how many file descriptors this process could open after `raise_limit`."""
    try:
        import resource  # noqa: PLC0415 - see above
    except ImportError:
        return math.inf
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard


def raise_limit() -> None:
    """Raise the soft limit to the hard one. Only the service calls this, never on Windows."""
    import resource  # noqa: PLC0415 - see above

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = UNLIMITED_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # some systems allow less than the hard limit
        logger.warning(
            "the limit of %d file descriptors cannot be raised to %d: %s", soft, wanted, error
        )


def within(share: float, wanted: int) -> int:
    """Return `wanted`, or this share of the descriptors if that is less; at least 1."""
    return int(max(1, min(wanted, limit() * share)))
