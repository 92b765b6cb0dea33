"""The channel of message brokers: what all of them have in common.

A due task becomes a message, which is published and then confirmed by the broker. A technology
(`Broker`) knows how its endpoints read, how to connect, and how to publish a batch with confirms.
This module does the rest: messages, connections, back-pressure, answers.

- A message that the broker has not confirmed is never recorded as delivered. If the connection
  fails between the message and its confirm, the message is sent again: delivery is at least once.
- One connection serves all services with the same server and credentials. At most `MAX_IN_FLIGHT`
  messages wait for its confirms; a broker that is full or stuck so holds back its own services.
- A connection on which the broker answers nothing for `STUCK_SECONDS` is closed, and its messages
  are retried. Only a confirm or a refusal is an answer: messages that are given up are none.
- A connection that died while it was idle costs no attempt: after `IDLE_SECONDS` the broker must
  answer before anything is published, and a technology raises `ConnectionDied` while the broker has
  none of the messages. If it may have some, they are retried, as new attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tickwheel.clock import SystemClock
from tickwheel.durable.channel import UNSENT, Answer, Delivery
from tickwheel.durable.channels.headers import (
    TracedMessage,
    check_secrets,
    event_document,
    event_of,
    headers_of,
    hidden_in,
    message_headers,
    message_id,
    redact,
)
from tickwheel.durable.channels.http.channel import no_room_answer
from tickwheel.durable.histogram import Histogram
from tickwheel.durable.log import logger
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.errors import TargetRefused
from tickwheel.http import NoRoom, OpenConnections
from tickwheel.values.endpoint import parse_endpoint
from tickwheel.values.service import refuse_message_options
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import Tracer
    from tickwheel.durable.channels.http.target import Targets
    from tickwheel.values.endpoint import Endpoint
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

CONNECT_SECONDS = 10.0  # for DNS, TCP, TLS and the handshake together
STUCK_SECONDS = 10.0  # at least, without any confirm, while messages wait for one
IDLE_SECONDS = 5.0  # after which a connection must answer before it is used
PING_SECONDS = 2.0  # for that answer
CLOSE_SECONDS = 1.0  # for a broker to confirm the end of a connection
MAX_IN_FLIGHT = 4096  # messages of one connection
MAX_PLANS = 10_000
ERROR_CHARACTERS = 500

_encode = json.JSONEncoder(ensure_ascii=False).encode


class Address(NamedTuple):
    """A host of an endpoint, and an address of it that may be connected to."""

    name: str
    ip: str
    port: int


class ConnectionDied(ConnectionError):
    """The connection is dead, and its messages may be published on another one.

    The broker has none of the messages that have not ended, or drops a duplicate.
    """


class Connection(Protocol):
    """An open connection to a broker."""

    async def publish(self, route: Any, messages: Sequence[Message]) -> None:
        """Publish all messages, then wait for their confirms; end each message.

        - Other calls may publish at the same time.
        - An exception means that the connection is of no use any more: it is closed, and every
          message that has not ended is retried. After `ConnectionDied` these are published again,
          once, on another connection.
        """

    async def ping(self) -> None:
        """Return if the broker answers; otherwise raise, or wait: the caller limits the time."""

    async def close(self) -> None:
        """Close the connection; messages without a confirm stay without one."""


class Broker(Protocol):
    """One technology: how its endpoints read, and how to connect."""

    schemes: Mapping[str, int]
    """The schemes of its URLs, each with its default port."""

    event_prefix: str | None
    """Prefix of the headers of a CloudEvent in binary mode; None: it has no such mode."""

    own_messages: bool
    """Whether tickwheel makes the messages; otherwise a payload is a message for other readers."""

    def split(self, endpoint: Endpoint) -> tuple[Endpoint, Any]:
        """Return the part to connect to, and the route of the messages on such a connection.

        Services whose first parts are equal share a connection. ValueError names what is wrong.
        """

    async def connect(self, endpoint: Endpoint, addresses: Sequence[Address]) -> Connection:
        """Connect to the first part of `split`; the caller limits the time.

        `addresses` are those that may be connected to, of all hosts, in order. Without TLS, connect
        to `ip`: a name could lead elsewhere the next time. With TLS, the certificate must be for
        `name`.
        """


class Message:
    """A message to publish; the technology ends it by `confirm`, `refuse` or `give_up`.

    - `id`: a broker may drop a message if it has one with the same id; see `message_id`.
    - Without `own_messages` the payload is the message, and there are no headers and no id.
    """

    __slots__ = ("_end", "_may_send", "body", "ended", "headers", "id", "task")

    def __init__(
        self,
        task: Task,
        headers: list[tuple[str, str]],
        id: str,
        may_send: Callable[[], bool],
        end: Callable[[Answer | str, bool], None],
    ) -> None:
        self.task = task
        self.id = id
        self.body = task.body
        self.headers = headers
        self.ended = False
        self._may_send = may_send
        self._end = end

    def confirm(self, place: Mapping[str, Any] | str) -> None:
        """The broker has taken over the message; `place` says where it is, or is that as JSON."""
        if not self.ended:
            self.ended = True
            self._end(place if isinstance(place, str) else _encode(place), True)

    def refuse(self, error: str, *, healthy: bool | None = False) -> None:
        """The broker has refused the message; `healthy` counts for the breaker."""
        if not self.ended:
            self.ended = True
            self._end(Answer(Event.RETRY, error=error, healthy=healthy), True)

    def give_up(self, error: str, *, healthy: bool | None = False) -> None:
        """The broker has not answered: the message was not sent, or nobody knows its fate."""
        if not self.ended:
            self.ended = True
            self._end(Answer(Event.RETRY, error=error, healthy=healthy), False)

    def may_send_again(self) -> bool:
        """Return whether the message may be published once more; end it otherwise."""
        allowed = not self.ended and self._may_send()
        if not allowed and not self.ended:
            self.ended = True
            self._end(UNSENT, False)
        return allowed


class Plan(NamedTuple):
    """The parts of a message that are the same for every message of a service."""

    service: Service
    link: Link
    route: Any
    headers: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]  # texts that no error may show, the longest first
    latency: Histogram


class BrokerChannel:
    """Publishes tasks to the brokers of one technology.

    - `load` imports the technology, when the first of its services is checked: a client library
      costs nothing until then. ImportError must name the extra to install.
    - `targets` decides which addresses may be connected to, as for HTTP.
    - `now_ms` returns the store's time, for signatures.
    - `connections` counts the open connections of all technologies. At its limit, one that has
      nothing under way is closed; if there is none, tasks are delayed.
    """

    remote = True

    def __init__(
        self,
        load: Callable[[], Broker],
        targets: Targets,
        now_ms: Callable[[], float],
        *,
        connections: OpenConnections | None = None,
        stopwatch: Clock | None = None,
    ) -> None:
        self._connections = connections or OpenConnections()
        self._connections.add(self._drop_idle)
        self.latencies: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.trace: Tracer | None = None
        self._load = load
        self._broker: Broker | None = None
        self._targets = targets
        self._now_ms = now_ms
        self._stopwatch = stopwatch or SystemClock()
        self._links: dict[Endpoint, Link] = {}
        self._plans: dict[str, Plan] = {}
        self._sends: set[asyncio.Task[None]] = set()

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return the permits of the service's connection."""
        return self._plan(service).link.permits

    def interruptible(self, service: Service) -> bool:
        """Return False: a published message cannot be called back."""
        return False

    def check(self, service: Service) -> None:
        """Raise when the endpoint, a header, a secret or an option is not valid."""
        endpoint, _ = self._split(service)
        for host, port in endpoint.hosts:
            self._targets.check_host(host, port)
        check_secrets(service)
        if not self._technology().own_messages:
            refuse_message_options(service)
        if service.cloudevents == "binary" and self._technology().event_prefix is None:
            raise ValueError(
                f"cloudevents must be 'structured' for {service.protocol!r}: there is no binary"
                " mode for it"
            )

    async def send(
        self, task: Task, service: Service, may_send: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Publish one task. If this is cancelled, the message goes on."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def end(given: Answer) -> None:
            if not answer.done():
                answer.set_result(given)

        delivery = Delivery(task, service, may_send, end)
        job = asyncio.get_running_loop().create_task(self.send_many([delivery]))
        self._sends.add(job)
        job.add_done_callback(self._sends.discard)
        return await answer

    async def send_many(self, deliveries: Sequence[Delivery]) -> None:
        """Publish the tasks of one service, and end each when its confirm has come."""
        service = deliveries[0].service
        try:
            plan = self._plan(service)
            connection = await plan.link.open()
        except (TypeError, ValueError, ImportError) as error:
            end_all(deliveries, f"{service.name} cannot be sent to: {error}")
        except NoRoom as error:
            for delivery in deliveries:
                delivery.end(no_room_answer(delivery.task, error))
        except OSError as error:
            end_all(deliveries, str(error))
        else:
            timestamp = int(self._now_ms() // 1000)
            messages = [
                self._message(delivery, plan, timestamp)
                for delivery in deliveries
                if may_send(delivery)
            ]
            if messages:
                unsent = await plan.link.publish(connection, plan.route, messages)
                if unsent:
                    await publish_again(plan, unsent)

    def _message(self, delivery: Delivery, plan: Plan, timestamp: int) -> Message:
        """Return the message of a task; its end is the end of the delivery."""
        started = self._stopwatch.time()
        traced = None if self.trace is None else TracedMessage(self.trace, delivery)

        def end(outcome: Answer | str, has_answered: bool) -> None:
            plan.latency.observe(self._stopwatch.time() - started)
            if has_answered:
                plan.link.has_answered = True
            if isinstance(outcome, str):
                answer = confirmed_answer(plan.service, outcome)
            else:
                answer = outcome._replace(error=redact(outcome.error or "", plan.hidden))
            if traced is not None:
                traced.end(answer)
            delivery.end(answer)

        task = self._with_body(delivery.task, plan.service)
        if not self._technology().own_messages:
            return Message(task, [], "", delivery.may_send, end)
        headers = headers_of(task, plan.service, plan.headers, timestamp)
        if plan.service.cloudevents == "binary":
            prefix = self._technology().event_prefix
            headers += [(f"{prefix}{name}", text) for name, text in event_of(task, plan.service)]
        if traced is not None:
            headers += traced.headers
        number = message_id(delivery.task, plan.service)
        return Message(task, headers, number, delivery.may_send, end)

    def _with_body(self, task: Task, service: Service) -> Task:
        """Return the task with the body to send: its payload, or an event around it."""
        if service.cloudevents != "structured":
            return task
        return task._replace(body=event_document(task, service))

    def forget(self, name: str) -> None:
        """Drop the plan and the latencies of a service, and connections that nobody uses."""
        self._plans.pop(name, None)
        self.latencies.pop(name, None)
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the connections that no service has, once nothing is under way on them."""
        used = {id(plan.link) for plan in self._plans.values()}
        for endpoint, link in list(self._links.items()):
            if id(link) not in used and link.is_idle:
                del self._links[endpoint]
                link.abandon()

    def _drop_idle(self) -> asyncio.Future[None] | None:
        """Close the connection that was used first of those with nothing under way."""
        links = [link for link in self._links.values() if link.is_open and link.is_idle]
        return min(links, key=lambda link: link.used_at).abandon() if links else None

    async def close(self) -> None:
        """Close the connections; a message without a confirm is retried."""
        links, self._links = list(self._links.values()), {}
        self._plans.clear()
        await asyncio.gather(*(link.close() for link in links))

    def _technology(self) -> Broker:
        if self._broker is None:
            self._broker = self._load()
        return self._broker

    def _split(self, service: Service) -> tuple[Endpoint, Any]:
        broker = self._technology()
        return broker.split(parse_endpoint(service.endpoint, service.password, broker.schemes))

    def _plan(self, service: Service) -> Plan:
        plan = before = self._plans.get(service.name)
        # Compare more than the version: a service that was deleted and put again starts at 1.
        if plan is not None and (plan.service is service or plan.service == service):
            return plan
        if len(self._plans) >= MAX_PLANS:
            self.forget(next(iter(self._plans)))
        endpoint, route = self._split(service)
        link = self._links.get(endpoint)
        if link is None:
            link = Link(self._technology(), endpoint, self._targets, self._connections)
            self._links[endpoint] = link
        plan = Plan(
            service, link, route, message_headers(service), hidden_in(service),
            self.latencies[service.name],
        )  # fmt: skip
        self._plans[service.name] = plan
        if before is not None and before.link is not link:
            self._close_unused()
        return plan


def broker_channels(
    technologies: Mapping[str, Callable[[], Broker]],
    targets: Targets,
    now_ms: Callable[[], float],
    *,
    connections: int,
) -> dict[str, BrokerChannel]:
    """Return a channel for each technology; together they have at most `connections` open."""
    shared = OpenConnections(connections)
    return {
        protocol: BrokerChannel(load, targets, now_ms, connections=shared)
        for protocol, load in technologies.items()
    }


class Batch:
    """Messages that wait for the confirms of one connection."""

    __slots__ = ("connection", "error", "limit")

    def __init__(self, connection: Connection, limit: asyncio.Timeout) -> None:
        self.connection = connection
        self.limit = limit
        self.error = "no confirm: the call ended before it"


class Link:
    """One connection to a broker, opened when it is needed, and again after it has failed."""

    def __init__(
        self, broker: Broker, endpoint: Endpoint, targets: Targets, connections: OpenConnections
    ) -> None:
        self.permits = Semaphore(MAX_IN_FLIGHT, fair=True)
        self._broker = broker
        self._endpoint = endpoint
        self._targets = targets
        self._connections = connections
        self._counted: set[Connection] = set()  # open, and not being closed
        self._opening: asyncio.Task[Connection] | None = None
        self._batches: set[Batch] = set()
        self.used_at = 0.0  # when a batch last ended, by the loop's clock
        self.has_answered = False  # whether the broker answered to a message since the last check
        self._watch: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no message is under way."""
        return self.permits.free == self.permits.permits and not self._batches

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._opening is not None and self._opening.done() and not has_failed(self._opening)

    async def open(self) -> Connection:
        """Return the connection; open it if there is none. OSError names the server."""
        loop = asyncio.get_running_loop()
        opening = self._opening
        if opening is None or has_failed(opening):
            self._opening = opening = loop.create_task(self._open())
        elif opening.done() and self._is_unproven(loop.time()):
            self._opening = opening = loop.create_task(self._prove(opening.result()))
        # A caller that is cancelled must not cancel the connection of the others.
        return await asyncio.shield(opening)

    def _is_unproven(self, now: float) -> bool:
        """Return whether the connection may have died without notice."""
        return not self._batches and now - self.used_at >= IDLE_SECONDS

    async def _prove(self, connection: Connection) -> Connection:
        """Return the connection if the broker answers on it, otherwise a new one."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await connection.ping()
        except BaseException as error:
            self._close(connection)
            if not isinstance(error, Exception):
                raise
            logger.debug("%s: an idle connection had died: %r", self._endpoint.server, error)
            return await self._open()
        self.used_at = asyncio.get_running_loop().time()
        return connection

    async def _open(self) -> Connection:
        if not await self._connections.make_room():
            raise NoRoom(
                f"{self._endpoint.server}: {self._connections.open} connections to brokers are open"
                f" and in use, and {self._connections.limit} may be open"
            )
        self._connections.open += 1
        try:
            made = await self._connect()
        except BaseException:
            self._connections.open -= 1
            raise
        self._counted.add(made)
        self.used_at = asyncio.get_running_loop().time()
        return made

    async def _connect(self) -> Connection:
        what = "TLS connection" if self._endpoint.tls else "connection"
        failed = f"{self._endpoint.server}: no {what}"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                made = await self._broker.connect(self._endpoint, await self._addresses())
        except TargetRefused:
            raise
        except TimeoutError:
            raise OSError(f"{failed} within {CONNECT_SECONDS:g} s") from None
        except Exception as error:  # noqa: BLE001
            raise OSError(f"{failed}: {self._describe(error)}") from None
        return made

    async def _addresses(self) -> list[Address]:
        found: list[Address] = []
        problem: Exception | None = None
        for host, port in self._endpoint.hosts:
            try:
                resolved = await self._targets.resolve(host, port)
            except (OSError, TargetRefused) as error:
                problem = problem or error
                continue
            found += [Address(host, one.host, one.port) for one in resolved]
        if not found and problem is not None:
            raise problem
        return found

    async def publish(
        self, connection: Connection, route: Any, messages: Sequence[Message]
    ) -> list[Message]:
        """Publish messages; retry those that the connection gives no answer to.

        Return those that may be published again, because the connection was dead before.
        """
        with contextlib.suppress(TimeoutError):  # by `drop`, which says why
            async with asyncio.timeout(None) as limit:
                return await self._publish(Batch(connection, limit), route, messages)
        return []

    async def _publish(
        self, batch: Batch, route: Any, messages: Sequence[Message]
    ) -> list[Message]:
        unsent: list[Message] = []
        self._add(batch)
        try:
            await batch.connection.publish(route, messages)
        except Exception as error:  # noqa: BLE001
            if batch in self._batches:
                self._batches.discard(batch)
                batch.error = self._describe(error)
                self.drop(batch.connection, batch.error)
            if isinstance(error, ConnectionDied):
                unsent = [message for message in messages if not message.ended]
        finally:
            self.used_at = asyncio.get_running_loop().time()
            self._batches.discard(batch)
            if not unsent:
                for message in messages:
                    message.give_up(f"{self._endpoint.server}: {batch.error}")
        return unsent

    def _add(self, batch: Batch) -> None:
        if not self._batches:
            self._watch_answers()
        self._batches.add(batch)

    def _watch_answers(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.has_answered = False
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(STUCK_SECONDS, self._check_answers)

    def _check_answers(self) -> None:
        """Close the connection if messages wait and the broker has not answered for too long."""
        self._watch = None
        if not self._batches:
            return
        if self.has_answered:
            self._watch_answers()
            return
        error = f"no confirm for {STUCK_SECONDS:g} s, so the connection was closed"
        logger.warning("%s: %s", self._endpoint.server, error)
        for connection in {batch.connection for batch in self._batches}:
            self.drop(connection, error)

    def drop(self, connection: Connection, error: str) -> asyncio.Future[None]:
        """Close a connection, and end what waits for its confirms; the next call opens another.

        Return the end of the close.
        """
        loop = asyncio.get_running_loop()
        opening = self._opening
        if opening is not None and opening.done() and not has_failed(opening):
            self._opening = None if opening.result() is connection else opening
        for batch in [one for one in self._batches if one.connection is connection]:
            self._batches.remove(batch)
            batch.error = error
            batch.limit.reschedule(loop.time())
        return self._close(connection)

    def _close(self, connection: Connection) -> asyncio.Future[None]:
        closing = asyncio.get_running_loop().create_task(close_quietly(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if connection in self._counted:  # a later call may have used it, and closes it again
            self._counted.discard(connection)
            closing.add_done_callback(self._on_closed)
        return closing

    def _on_closed(self, _: asyncio.Future[None]) -> None:
        self._connections.open -= 1

    def abandon(self) -> asyncio.Future[None] | None:
        """Close the connection, without waiting for that; return its end if there is one."""
        opening, self._opening = self._opening, None
        if opening is None or has_failed(opening):
            return None
        if not opening.done():
            opening.cancel()
            return None
        return self.drop(opening.result(), "the connection was closed before its confirm")

    async def close(self) -> None:
        """Close the connection; the messages that wait for its confirms are retried."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self.abandon()
        if self._closing:
            await asyncio.wait(self._closing)

    def _describe(self, error: Exception) -> str:
        secret = self._endpoint.password or self._endpoint.user  # a token, without a password
        text = f"{type(error).__name__}: {error}"
        return redact(text, (secret,) if secret else ())[:ERROR_CHARACTERS]


def may_send(delivery: Delivery) -> bool:
    """Return whether a task may be sent; end it otherwise."""
    allowed = delivery.may_send()
    if not allowed:
        delivery.end(UNSENT)
    return allowed


async def publish_again(plan: Plan, messages: Sequence[Message]) -> None:
    """Publish messages on another connection: the first one had died."""
    try:
        connection = await plan.link.open()
    except (OSError, ValueError) as error:
        for message in messages:
            message.give_up(str(error))
        return
    allowed = [message for message in messages if message.may_send_again()]
    if allowed:
        for message in await plan.link.publish(connection, plan.route, allowed):
            message.give_up("its connection died, and so did the next one")


def end_all(deliveries: Sequence[Delivery], error: str) -> None:
    """Retry all deliveries: nothing was sent."""
    for delivery in deliveries:
        delivery.end(Answer(Event.RETRY, error=error, healthy=False))


def has_failed(opening: asyncio.Task[Connection]) -> bool:
    """Return whether a connection could not be opened; this also retrieves the exception."""
    return opening.done() and (opening.cancelled() or opening.exception() is not None)


async def close_quietly(connection: Connection) -> None:
    """Close a connection that may be broken."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await connection.close()
    except Exception as error:  # noqa: BLE001
        logger.debug("closing a connection failed: %r", error)


def confirmed_answer(service: Service, place: str) -> Answer:
    """Return the answer for a confirmed message, by the service's choice."""
    if service.confirmed == "running":
        feedback_ms = max(1, round(service.feedback_timeout * 1000))
        return Answer(Event.ACCEPT, after_ms=feedback_ms, healthy=True, delivered_to=place)
    return Answer(Event.FINISH, place, healthy=True, delivered_to=place)
