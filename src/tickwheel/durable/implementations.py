"""The implementations: stores and coordinators by URL, channels by protocol.

This is the only module that names them. Each one is imported when it is needed.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from tickwheel.clock import ManualClock
from tickwheel.durable.channels.local import LocalChannel
from tickwheel.durable.channels.missing import MissingChannel, MissingPackage
from tickwheel.durable.coordinators.solo import SoloCoordinator
from tickwheel.durable.log import logger
from tickwheel.durable.permits import descriptors
from tickwheel.values.store_url import MEMORY, POSTGRES, SQLITE, kind_of, sqlite_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.metadata import EntryPoint
    from os import PathLike
    from typing import Any

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.channels.broker import Broker
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.function import TaskFunction
    from tickwheel.durable.store import Store


def store_at(url: str, *, shards: int, clock: Clock | None = None) -> Store:
    """Return the store that a URL names, not open yet."""
    return STORES[kind_of(url)](url, shards, clock)


def _sqlite_store(url: str, shards: int, clock: Clock | None) -> Store:
    from tickwheel.durable.stores.sqlite.store import SqliteStore  # noqa: PLC0415

    return SqliteStore(sqlite_path(url), shards=shards, clock=clock)


def _postgres_store(url: str, shards: int, clock: Clock | None) -> Store:
    try:
        from tickwheel.durable.stores.postgres.store import PostgresStore  # noqa: PLC0415
    except ImportError as missing:
        raise ImportError(
            f"{missing}; for PostgreSQL: pip install 'tickwheel[postgres]'"
        ) from missing
    if clock is not None and not isinstance(clock, ManualClock):
        raise ValueError(
            "on PostgreSQL the time is the database's: clock= is a ManualClock there, for tests,"
            f" got {clock!r:.100}"
        )
    return PostgresStore(url, shards=shards, manual=clock)


def _memory_store(url: str, shards: int, clock: Clock | None) -> Store:
    from tickwheel.durable.stores.sqlite.memory import MemoryStore  # noqa: PLC0415

    return MemoryStore(shards=shards, clock=clock)


STORES = {SQLITE: _sqlite_store, POSTGRES: _postgres_store, MEMORY: _memory_store}


def coordinator_for(
    url: str, name: str | None, clock: Clock | None = None
) -> Callable[..., Coordinator]:
    """Return the factory of a coordinator; None names the first that fits the store.

    It takes the store, the node's name, and as keywords its weight and address. Nodes with a
    manual clock have no time in common: only "solo" fits them.
    """
    fitting = COORDINATORS[kind_of(url)]
    if isinstance(clock, ManualClock):
        fitting = {"solo": fitting["solo"]}
    if name is None:
        name = next(iter(fitting))
    kind, is_url, _ = name.partition("://")
    if kind not in fitting or bool(is_url) != (kind == "zookeeper"):
        raise ValueError(
            "coordinator must be 'solo', or on PostgreSQL 'postgres' or a URL such as"
            f" zookeeper://host1:2181,host2:2181/path, got {kind!r:.100} for {kind_of(url)}"
        )
    return fitting[kind](name if is_url else url)


def _solo(url: str) -> Callable[..., Coordinator]:
    return SoloCoordinator


def _solo_with_lock(url: str) -> Callable[..., Coordinator]:
    return functools.partial(SoloCoordinator, lock=Path(f"{sqlite_path(url)}-lock"))


def _postgres(url: str) -> Callable[..., Coordinator]:
    from tickwheel.durable.coordinators.postgres import PostgresCoordinator  # noqa: PLC0415

    return PostgresCoordinator


def _zookeeper(url: str) -> Callable[..., Coordinator]:
    try:
        from tickwheel.durable.coordinators.zookeeper import (  # noqa: PLC0415
            ZooKeeperCoordinator,
        )
    except ImportError as missing:
        raise ImportError(
            f"{missing}; for ZooKeeper: pip install 'tickwheel[zookeeper]'"
        ) from missing
    return functools.partial(ZooKeeperCoordinator, url=url)


COORDINATORS = {
    SQLITE: {"solo": _solo_with_lock},
    POSTGRES: {"postgres": _postgres, "solo": _solo, "zookeeper": _zookeeper},
    MEMORY: {"solo": _solo},
}


ENTRY_POINTS = "tickwheel.channels"
MAX_BROKER_CONNECTIONS = 1_000  # of one process; a low limit of file descriptors lowers it

# By protocol, which is also the extra to install: the module and the class of a `Broker`.
BROKERS: dict[str, tuple[str, str]] = {
    "rabbitmq": ("tickwheel.durable.channels.rabbitmq", "RabbitMQ"),
    "celery": ("tickwheel.durable.channels.celery", "Kombu"),
    "redis": ("tickwheel.durable.channels.redis", "RedisStreams"),
    "kafka": ("tickwheel.durable.channels.kafka", "KafkaTopics"),
    "nats": ("tickwheel.durable.channels.nats", "JetStream"),
}


def channels_for(
    functions: Mapping[str, TaskFunction[..., Any]],
    now_ms: Callable[[], float],
    *,
    threads: int,
    allow_private: bool,
    allow: tuple[str, ...],
    own_port: int | None,
    max_calls: int,
    own: Mapping[str, Channel],
    grpc_tls: Sequence[str | PathLike[str] | None] | None = None,
) -> dict[str, Channel]:
    """Return the channels by protocol; one without its package refuses every service.

    `own` has the user's channels. These come before the channels of installed packages, which are
    entry points of the group `tickwheel.channels`; neither can replace a channel of this package.
    """
    channels = built_in_channels(
        functions, now_ms, threads=threads, allow_private=allow_private, allow=allow,
        own_port=own_port, max_calls=max_calls, grpc_tls=grpc_tls,
    )  # fmt: skip
    for protocol in own:
        if protocol in channels:
            raise ValueError(f"the protocol {protocol!r} has a channel already: choose a new name")
    offered = {
        entry.name: _package_channel(entry)
        for entry in _entry_points()
        if entry.name not in channels and entry.name not in own
    }
    return {**channels, **offered, **own}


def built_in_channels(
    functions: Mapping[str, TaskFunction[..., Any]],
    now_ms: Callable[[], float],
    *,
    threads: int,
    allow_private: bool,
    allow: tuple[str, ...],
    own_port: int | None,
    max_calls: int,
    grpc_tls: Sequence[str | PathLike[str] | None] | None,
) -> dict[str, Channel]:
    """Return the channels of this package."""
    channels: dict[str, Channel] = {"local": LocalChannel(functions, threads)}
    try:
        from tickwheel.durable.channels.broker import broker_channels  # noqa: PLC0415
        from tickwheel.durable.channels.grpc.channel import GrpcChannel  # noqa: PLC0415
        from tickwheel.durable.channels.grpc.endpoint import tls_files  # noqa: PLC0415
        from tickwheel.durable.channels.http.channel import HttpChannel  # noqa: PLC0415
        from tickwheel.durable.channels.http.lookups import (  # noqa: PLC0415
            MAX_HUNG_LOOKUPS,
            MAX_PROMPT_LOOKUPS,
            Lookups,
        )
        from tickwheel.durable.channels.http.target import Targets  # noqa: PLC0415
    except ImportError as missing:
        extras = {"http": "client", "grpc": "grpc"} | {protocol: protocol for protocol in BROKERS}
        absent = {
            protocol: MissingChannel(MissingPackage.of(protocol, extra, missing))
            for protocol, extra in extras.items()
        }
        return {**channels, **absent}
    calls = descriptors.within(descriptors.CALLS_SHARE, max_calls)

    @functools.cache  # logged once, and only if there is a service to call
    def log_limit() -> None:
        if calls < max_calls:
            logger.info(
                "%d calls at once instead of %d: this process may have %d file descriptors",
                calls, max_calls, descriptors.limit(),
            )  # fmt: skip

    lookups = Lookups(
        descriptors.within(descriptors.LOOKUPS_SHARE, MAX_PROMPT_LOOKUPS + MAX_HUNG_LOOKUPS)
    )
    targets = Targets(allow_private=allow_private, allow=allow, own_port=own_port, lookup=lookups)
    brokers = broker_channels(
        {protocol: functools.partial(_broker, protocol) for protocol in BROKERS}, targets, now_ms,
        connections=descriptors.within(descriptors.BROKERS_SHARE, MAX_BROKER_CONNECTIONS),
    )  # fmt: skip
    http = HttpChannel(targets, now_ms, max_calls=calls, on_check=log_limit)
    grpc = GrpcChannel(
        targets, now_ms, http.calls, connections=http.connections, tls=tls_files(grpc_tls),
        on_check=log_limit,
    )  # fmt: skip
    return {**channels, **brokers, "http": http, "grpc": grpc}


def _broker(protocol: str) -> Broker:
    """Import the technology of a protocol, or name its extra."""
    module, name = BROKERS[protocol]
    try:
        return getattr(importlib.import_module(module), name)()  # type: ignore[no-any-return]
    except ImportError as missing:
        raise MissingPackage.of(protocol, protocol, missing) from missing


@functools.cache
def _entry_points() -> tuple[EntryPoint, ...]:
    """Return the channels that installed packages offer; finding them takes milliseconds."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _package_channel(entry: EntryPoint) -> Channel:
    """Return the channel that a package offers; one that cannot be made refuses every service."""
    try:
        return entry.load()()  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001
        logger.exception("the channel %r (%s) cannot be used", entry.name, entry.value)
        return MissingChannel(
            MissingPackage(
                f"services of protocol {entry.name!r} cannot be used: {entry.value} could not be"
                f" loaded ({type(error).__name__}: {error})"
            )
        )
