"""File descriptors: how many this process may have, and how they are divided.

Three fifths are for connections of the API, a fifth for calls of services, a twentieth for lookups
of names. The rest is a reserve: the store, the listener and the log must always get theirs.
"""

from __future__ import annotations

import math

from tickwheel.durable.log import logger

CONNECTIONS_SHARE = 0.6
CALLS_SHARE = 0.2
LOOKUPS_SHARE = 0.05
MOST_DESCRIPTORS = 1 << 20  # that are asked for where there is no limit


def limit() -> float:
    """Return how many file descriptors this process may have."""
    try:
        import resource  # noqa: PLC0415 - not on Windows, which has no such limit
    except ImportError:
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raise the limit as far as this process may; only the service calls it, not on Windows."""
    import resource  # noqa: PLC0415 - see above

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:  # some systems allow less than they say
        logger.warning("the limit of %d file descriptors stays: %s", soft, error)


def within(share: float, wanted: int) -> int:
    """Return `wanted`, or as many as this share of the descriptors is; 1 at least."""
    return int(max(1, min(wanted, limit() * share)))
