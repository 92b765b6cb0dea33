"""`doctor`: looks for what keeps a node from working, and names a remedy for each finding.

It changes nothing: it does not create or migrate a store, and joins no other nodes.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, NamedTuple

import click

from tickwheel.cli.exit_codes import OK as EXIT_OK
from tickwheel.cli.exit_codes import OTHER
from tickwheel.cli.host_checks import (
    ERROR,
    OK,
    WARNING,
    Finding,
    check_descriptors,
    check_files,
    check_time_zones,
    check_tls,
    duration,
)
from tickwheel.cli.output import Output, examples, with_output
from tickwheel.cli.serve import load_config, setting_options
from tickwheel.cli.store import open_store, store_of
from tickwheel.client.requests import is_loopback
from tickwheel.durable.coordinator import CoordinatorUnavailable
from tickwheel.durable.directory.configuration import service_from_row
from tickwheel.durable.directory.directory import check_usable
from tickwheel.durable.directory.vault import PLAIN, Vault
from tickwheel.durable.implementations import channels_for, coordinator_for
from tickwheel.durable.store import SHARED_SESSION, Window
from tickwheel.errors import TickwheelError
from tickwheel.values.store_url import SQLITE, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tickwheel.config import Config
    from tickwheel.durable.coordinator import NodeRow
    from tickwheel.durable.registry import ServiceRow, Token
    from tickwheel.durable.store import Store

MAX_OFFSET_MS = 1_000  # between the clocks of the host and of the database
LATE_MS = 60_000  # after which a due task should have been called
SOON_MS = 7 * 86_400_000  # before which a token's end is worth a warning
NAMES = 10  # shown of a list


class State(NamedTuple):
    """What was read from the store."""

    now_ms: int
    services: list[ServiceRow]
    nodes: list[NodeRow]
    tokens: list[Token]
    zones: set[str]  # of the schedules
    waiting: dict[
        str, int | None
    ]  # by service with live tasks: the oldest unclaimed one's due time
    no_answer: str | None  # why the coordinator does not name the nodes
    unusable: dict[str, str]  # services that cannot be called with these settings, and why


@click.command(
    epilog=examples(
        "tickwheel doctor",
        "tickwheel doctor --store postgresql://tick@db/tick",
        "tickwheel doctor --config production.toml --json | jq 'select(.level != \"ok\")'",
    )
)
@setting_options()
@with_output
def doctor(out: Output, config_file: str | None, **flags: object) -> int:
    """Check the store, this host and the settings.

    Each finding has its remedy. It takes the flags of `tickwheel serve`, and changes nothing. It
    ends with 1 if there is an error; warnings do not count.
    """
    config, origins = load_config(flags, config_file)
    findings = [*asyncio.run(check_store(config))]
    findings += check_files(config, origins)
    findings += check_tls(config)
    if out.as_json:
        out.items((one._asdict() for one in findings), Finding._fields)
    else:
        out.text(Finding._fields, findings)
    return OTHER if any(one.level == ERROR for one in findings) else EXIT_OK


async def check_store(config: Config) -> list[Finding]:
    """Return what is found in the store; if it cannot be opened, only why."""
    store = store_of(config)
    try:
        version = await store.schema_version()
        found = [*check_schema(store, version)]
        if version != store.schema_needed:
            return [*found, *check_time_zones(), *check_descriptors(config)]
        async with open_store(store):
            await store.require_writable()
            found.append(Finding("store", OK, f"{store.where} can be read and written"))
            state = await read_state(store, config)
            return [*found, *check_clock(store), *check_pooler(store), *check_state(state, config)]
    except TickwheelError as error:
        return [store_finding(error), *check_time_zones(), *check_descriptors(config)]


def store_finding(error: TickwheelError) -> Finding:
    """Return why the store cannot be used."""
    check, remedy = "store", "start the database, or correct --store and its user's rights"
    if SHARED_SESSION in str(error):
        check = "pooler"
        remedy = "set pool_mode = session there, or connect to PostgreSQL directly"
    return Finding(check, ERROR, str(error), remedy)


def check_schema(store: Store, version: int | None) -> Iterator[Finding]:
    """Compare the version of the tables with the program's."""
    needed = store.schema_needed
    if version is None:
        yield Finding(
            "schema", ERROR, f"there is no store in {store.where}",
            "`tickwheel migrate` and `tickwheel serve` create it; or correct --store",
        )  # fmt: skip
    elif version < needed:
        yield Finding(
            "schema", ERROR, f"the tables have version {version}, and this program needs {needed}",
            "run `tickwheel migrate`; `tickwheel serve` does it at its start",
        )  # fmt: skip
    elif version > needed:
        yield Finding(
            "schema", ERROR, f"the tables have version {version}, and this program knows {needed}",
            "install the version of tickwheel that the other nodes have",
        )  # fmt: skip
    else:
        yield Finding("schema", OK, f"the tables have version {version}")


async def read_state(store: Store, config: Config) -> State:
    """Read what the checks need."""
    now = int(store.now_ms())
    names = await store.services()
    windows = [Window(name, 1, 0) for name in names]
    due = await store.due(windows, range(store.shards), now, now)
    coordinator = coordinator_for(config.store, config.coordinator)(store, "doctor")
    nodes: list[NodeRow] = []
    no_answer: str | None = None
    try:
        nodes = await coordinator.nodes()
    except CoordinatorUnavailable as error:
        no_answer = str(error)
    services = await store.registry.services()
    return State(
        now,
        services,
        nodes,
        await store.registry.tokens(),
        await zones_of(store),
        dict.fromkeys(names) | {one.service: one.due_at_ms for one in due},
        no_answer,
        {} if config.submit_only else await read_unusable(services, store, config),
    )


async def read_unusable(rows: Iterable[ServiceRow], store: Store, config: Config) -> dict[str, str]:
    """Return why services cannot be called; `check_secret_key` reports those that do not open."""
    try:
        vault = Vault(config.secret_key)
    except ImportError:
        vault = Vault()
    channels = channels_for(
        {}, store.now_ms, threads=1, allow_private=config.allow_private_targets,
        allow=config.allow_target, own_port=config.listen.port, max_calls=config.max_calls, own={},
        grpc_tls=(config.grpc_ca, config.grpc_cert, config.grpc_key),
    )  # fmt: skip
    unusable = {}
    try:
        for row in rows:
            try:
                service = service_from_row(row, vault.open)
            except ValueError:
                continue
            try:
                check_usable(service, channels)
            except Exception as error:  # noqa: BLE001 - as when a node reads the service
                unusable[row.name] = str(error) or type(error).__name__
    finally:
        for channel in channels.values():
            await channel.close()
    return unusable


async def zones_of(store: Store) -> set[str]:
    """Return the time zones of all schedules."""
    zones: set[str] = set()
    after = (-1, "")
    while page := await store.schedules.timings(after):
        zones |= {one.tz for one in page}
        after = page[-1].changed, page[-1].name
    return zones


def check_clock(store: Store) -> Iterator[Finding]:
    """Compare the clock of the database with the host's."""
    offset = getattr(store, "offset_ms", None)
    if offset is None:
        yield Finding("clock", OK, "the time is this host's")
    elif abs(offset) > MAX_OFFSET_MS:
        ahead = "ahead of" if offset > 0 else "behind"
        yield Finding(
            "clock", WARNING,
            f"the database's clock is {duration(abs(offset))} {ahead} this host's: tasks follow the"
            " database's, and times that programs here compute are wrong by that",
            "let NTP set the clocks of both hosts",
        )  # fmt: skip
    else:
        yield Finding("clock", OK, f"the database's clock differs by {duration(abs(offset))}")


def check_pooler(store: Store) -> Iterator[Finding]:
    """Report a pooler that keeps sessions; one that does not has been refused already."""
    pooled = getattr(store, "pooled", None)
    if pooled:
        yield Finding(
            "pooler", OK, "a connection pooler is in between, and keeps a session for each client"
        )
    elif pooled is not None:
        yield Finding("pooler", OK, "there is no connection pooler in between")


def check_state(state: State, config: Config) -> Iterator[Finding]:
    """Check what was read from the store."""
    yield from check_time_zones(state.zones)
    yield from check_tokens(state, config)
    yield from check_secret_key(state.services, config)
    if state.no_answer is not None:
        yield Finding(
            "coordinator", ERROR, state.no_answer, "start ZooKeeper, or correct --coordinator"
        )
    else:
        yield from check_nodes(state, config)
        yield from check_functions(state, config)
    yield from check_targets(state)
    yield from check_capacity(state)
    yield from check_descriptors(config, services=bool(state.services))


def check_tokens(state: State, config: Config) -> Iterator[Finding]:
    """Check who may call the API."""
    local = is_loopback(config.listen.host)
    if config.open_access:
        level = OK if local else ERROR
        yield Finding(
            "tokens", level, f"anybody who reaches {config.listen} may do everything",
            "" if local else "create tokens, and remove insecure_without_tokens",
        )  # fmt: skip
        return
    valid = [one for one in state.tokens if (one.expires_at_ms or state.now_ms + 1) > state.now_ms]
    if not valid:
        needed = not local or bool(state.tokens)
        yield Finding(
            "tokens", ERROR if needed else OK,
            "there is no valid token" + ("" if needed else ": programs on this host need none"),
            "tickwheel tokens create NAME --scope admin" if needed else "",
        )  # fmt: skip
        return
    yield Finding("tokens", OK, f"{len(valid)} valid")
    for one in valid:
        if one.expires_at_ms is not None and one.expires_at_ms < state.now_ms + SOON_MS:
            left = duration(one.expires_at_ms - state.now_ms)
            yield Finding(
                "tokens", WARNING, f"the token {one.name!r} ({one.id}) ends in {left}",
                "create another, give it to its user, and revoke this one",
            )  # fmt: skip


def check_secret_key(services: Iterable[ServiceRow], config: Config) -> Iterator[Finding]:
    """Check that the secrets of services are sealed, and that this key opens them."""
    try:
        vault = Vault(config.secret_key)
    except ImportError as error:
        yield Finding("secret key", ERROR, str(error), "pip install 'tickwheel[server]'")
        return
    closed, plain = [], []
    for row in services:
        try:
            service_from_row(row, vault.open)
        except ValueError as error:
            closed.append(f"{row.name}: {error}")
        if PLAIN in row.config:
            plain.append(row.name)
    for reason in closed[:NAMES]:
        yield Finding(
            "secret key", ERROR, reason,
            "set TICKWHEEL_SECRET_KEY as on the other nodes, older keys after a comma",
        )  # fmt: skip
    if plain:
        yield Finding(
            "secret key", WARNING, f"secrets are in plain text in the store: of {listed(plain)}",
            "set TICKWHEEL_SECRET_KEY, and put these services again",
        )  # fmt: skip
    if not closed and not plain:
        given = "is set" if config.secret_key else "is not set, and no service has a secret"
        yield Finding("secret key", OK, f"TICKWHEEL_SECRET_KEY {given}")


def check_nodes(state: State, config: Config) -> Iterator[Finding]:
    """Check that a process dispatches."""
    live = live_nodes(state)
    dead = [one.name for one in state.nodes if one.state == "unregistered" and one.shards]
    if live:
        yield Finding("nodes", OK, f"{len(live)} running: {listed(live)}")
    elif dead:
        yield Finding(
            "nodes", WARNING, f"no process dispatches; the last was {listed(dead)}",
            "start a node: tickwheel serve, or a program with a Scheduler"
            + other_coordinator(config),
        )  # fmt: skip
    else:
        level = WARNING if state.waiting else OK
        yield Finding(
            "nodes", level, "no process dispatches",
            "start a node: tickwheel serve, or a program with a Scheduler" if state.waiting else "",
        )  # fmt: skip


def live_nodes(state: State) -> list[str]:
    """Return the names of the nodes that the coordinator knows to be running."""
    return [one.name for one in state.nodes if one.state != "unregistered"]


def other_coordinator(config: Config) -> str:
    """Return what to add to the remedy for missing nodes: another coordinator may know them."""
    if kind_of(config.store) == SQLITE:
        return ""
    return "; if one runs, name its --coordinator (one with solo is never known here)"


def check_functions(state: State, config: Config) -> Iterator[Finding]:
    """Find tasks of names that are neither a service nor a function of a known node.

    On SQLite only the owner of the shards is known. The others stand by, and run what it cannot.
    """
    known = {row.name for row in state.services}
    known |= {name for node in state.nodes for name in node.functions}
    unknown = sorted(state.waiting.keys() - known)
    level, more, remedy = ERROR, "", "start the program that has it"
    if not live_nodes(state):
        remedy += other_coordinator(config)
    elif kind_of(config.store) == SQLITE:
        level, more = WARNING, "; processes that stand by are not known"
        remedy = "if no process that stands by has it: " + remedy
    for name in unknown[:NAMES]:
        yield Finding(
            "functions", level,
            f"there are tasks of {name!r}, which is neither a service nor a function of a known"
            f" node{more}",
            f"{remedy}; or put the service, or cancel --service {name}",
        )  # fmt: skip
    if len(unknown) > NAMES:
        yield Finding("functions", level, f"and {len(unknown) - NAMES} more names", "as above")
    if not unknown:
        yield Finding("functions", OK, "every task has a service or a function")


def check_targets(state: State) -> Iterator[Finding]:
    """Name the services that a node with these settings cannot call; another one may do so."""
    for name, reason in [*state.unusable.items()][:NAMES]:
        extra = re.search(r"pip install '[^']+'", reason)
        if extra is not None:
            remedy = extra[0]
        elif "--allow-target" in reason:
            remedy = "pass --allow-target with its network, or --allow-private-targets, to `serve`"
        else:
            remedy = f"correct it: tickwheel services put {name}"
        yield Finding("services", WARNING, f"{name} cannot be called from here: {reason}", remedy)
    if len(state.unusable) > NAMES:
        more = f"and {len(state.unusable) - NAMES} more services"
        yield Finding("services", WARNING, more, "as above")


def check_capacity(state: State) -> Iterator[Finding]:
    """Find services and functions whose due tasks are not called."""
    found = bool(state.unusable)
    late = {
        name: state.now_ms - due
        for name, due in state.waiting.items()
        if due is not None and state.now_ms - due > LATE_MS
    }
    for row in state.services:
        if row.name not in state.waiting:
            continue
        enabled = service_from_row(row, lambda text, _: text).enabled
        if not enabled:
            found = True
            yield Finding(
                "services", WARNING, f"{row.name} is disabled, and has tasks",
                f"tickwheel services enable {row.name}",
            )  # fmt: skip
        elif row.name in late:
            found = True
            yield late_finding(
                row.name, late[row.name],
                "see `tickwheel top`: raise its concurrency or rate, add nodes, or fix its"
                " endpoint",
            )  # fmt: skip
    functions = sorted(late.keys() - {row.name for row in state.services})
    for name in functions[:NAMES]:
        yield late_finding(
            name, late[name],
            "start a process that runs it, with enabled=True; if its concurrency is used up, raise"
            " it, or add processes",
        )  # fmt: skip
    if len(functions) > NAMES:
        yield Finding(
            "services", WARNING, f"and {len(functions) - NAMES} more functions", "as above"
        )
    if not found and not functions:
        yield Finding(
            "services", OK,
            "no service with tasks is disabled, and no task is late by more than a minute",
        )  # fmt: skip


def late_finding(name: str, late_ms: int, remedy: str) -> Finding:
    """Return that the oldest task of a service or function is overdue."""
    text = f"a task of {name} has been due for {duration(late_ms)}"
    return Finding("services", WARNING, text, remedy)


def listed(names: list[str]) -> str:
    """Return names for a sentence, the first few of them."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
