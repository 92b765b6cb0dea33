"""The channel of message brokers: what all of them have in common.

A due task becomes a message, which is published and then confirmed by the broker. A technology
(`Broker`) knows how its endpoints read, how to connect, and how to publish a batch with confirms.
This module does the rest: messages, connections, back-pressure, answers.

- A message that the broker has not confirmed is never recorded as delivered. If the connection
  fails between the message and its confirm, the message is sent again: delivery is at least once.
- One connection serves all services with the same server and credentials. At most `MAX_IN_FLIGHT`
  messages wait for its confirms; a broker that is full or stuck so holds back its own services.
- A connection without any confirm for `STUCK_SECONDS` is closed, and its messages are retried.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import json
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

from tickwheel.clock import SystemClock
from tickwheel.durable.channel import UNSENT, Answer, Delivery
from tickwheel.durable.channels.message import (
    check_secrets,
    format_time,
    headers_of,
    hidden_in,
    local_name,
    redact,
    service_headers,
)
from tickwheel.durable.log import logger
from tickwheel.durable.metrics import Histogram
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.errors import TargetRefused
from tickwheel.values.endpoint import parse_endpoint
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import CallTrace, Tracer
    from tickwheel.durable.channels.http.target import Targets
    from tickwheel.values.endpoint import Endpoint
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

CONNECT_SECONDS = 10.0  # for DNS, TCP, TLS and the handshake together
STUCK_SECONDS = 10.0  # without any confirm, while messages wait for one
CLOSE_SECONDS = 1.0  # for a broker to confirm the end of a connection
MAX_IN_FLIGHT = 4096  # messages of one connection
MAX_PLANS = 10_000
ERROR_CHARACTERS = 500

_encode = json.JSONEncoder(ensure_ascii=False).encode

EVENT_TYPE = "tickwheel.task.due"
EVENT_JSON = "application/cloudevents+json"


class Address(NamedTuple):
    """A host of an endpoint, and an address of it that may be connected to."""

    name: str
    ip: str
    port: int


class Connection(Protocol):
    """An open connection to a broker."""

    async def publish(self, route: Any, messages: Sequence[Message]) -> None:
        """Publish all messages, then wait for their confirms; end each message.

        - Other calls may publish at the same time.
        - An exception means that the connection is of no use any more: it is closed, and every
          message that has not ended is retried.
        """

    async def close(self) -> None:
        """Close the connection; messages without a confirm stay without one."""


class Broker(Protocol):
    """One technology: how its endpoints read, and how to connect."""

    schemes: Mapping[str, int]
    """The schemes of its URLs, each with its default port."""

    event_prefix: str | None
    """Prefix of the headers of a CloudEvent in binary mode; None: it has no such mode."""

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
    """A message to publish; the technology ends it by `confirm` or `refuse`.

    `id`: a broker may drop a message if it has one with the same id; see `message_id`.
    """

    __slots__ = ("_end", "body", "ended", "headers", "id", "task")

    def __init__(
        self,
        task: Task,
        body: bytes,
        headers: list[tuple[str, str]],
        end: Callable[[Answer | Mapping[str, Any]], None],
        id: str,
    ) -> None:
        self.task = task
        self.id = id
        self.body = body
        self.headers = headers
        self.ended = False
        self._end = end

    def confirm(self, place: Mapping[str, Any]) -> None:
        """The broker has taken over the message; `place` says where it is, as JSON."""
        if not self.ended:
            self.ended = True
            self._end(place)

    def refuse(self, error: str, *, healthy: bool | None = False) -> None:
        """The broker has refused the message, or nobody knows whether it has it."""
        if not self.ended:
            self.ended = True
            self._end(Answer(Event.RETRY, error=error, healthy=healthy))


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
    """

    remote = True

    def __init__(
        self,
        load: Callable[[], Broker],
        targets: Targets,
        now_ms: Callable[[], float],
        *,
        stopwatch: Clock | None = None,
    ) -> None:
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
                await plan.link.publish(connection, plan.route, messages)

    def _message(self, delivery: Delivery, plan: Plan, timestamp: int) -> Message:
        """Return the message of a task; its end is the end of the delivery."""
        started = self._stopwatch.time()
        traced = None if self.trace is None else TracedMessage(self.trace, delivery)

        def end(outcome: Answer | Mapping[str, Any]) -> None:
            plan.latency.observe(self._stopwatch.time() - started)
            plan.link.mark_progress()
            answer = outcome
            if not isinstance(answer, Answer):
                answer = confirmed_answer(plan.service, answer)
            elif answer.error:
                answer = answer._replace(error=redact(answer.error, plan.hidden))
            if traced is not None:
                traced.end(answer)
            delivery.end(answer)

        task = self._with_body(delivery.task, plan.service)
        headers = headers_of(task, plan.service, plan.headers, timestamp)
        if plan.service.cloudevents == "binary":
            prefix = self._technology().event_prefix
            headers += [(f"{prefix}{name}", text) for name, text in event_of(task, plan.service)]
        if traced is not None:
            headers += traced.headers
        return Message(task, task.body, headers, end, message_id(delivery.task, plan.service))

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
            link = self._links[endpoint] = Link(self._technology(), endpoint, self._targets)
        plan = Plan(
            service, link, route, message_headers(service), hidden_in(service),
            self.latencies[service.name],
        )  # fmt: skip
        self._plans[service.name] = plan
        if before is not None and before.link is not link:
            self._close_unused()
        return plan


class Batch:
    """Messages that wait for the confirms of one connection."""

    __slots__ = ("connection", "error", "limit")

    def __init__(self, connection: Connection, limit: asyncio.Timeout) -> None:
        self.connection = connection
        self.limit = limit
        self.error = "no confirm: the call ended before it"


class Link:
    """One connection to a broker, opened when it is needed, and again after it has failed."""

    def __init__(self, broker: Broker, endpoint: Endpoint, targets: Targets) -> None:
        self.permits = Semaphore(MAX_IN_FLIGHT, fair=True)
        self._broker = broker
        self._endpoint = endpoint
        self._targets = targets
        self._opening: asyncio.Task[Connection] | None = None
        self._batches: set[Batch] = set()
        self._progress_at = 0.0  # when a message last ended, by the loop's clock
        self._watch: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no message is under way."""
        return self.permits.free == self.permits.permits and not self._batches

    async def open(self) -> Connection:
        """Return the connection; open it if there is none. OSError names the server."""
        if self._opening is None or has_failed(self._opening):
            self._opening = asyncio.get_running_loop().create_task(self._open())
        # A caller that is cancelled must not cancel the connection of the others.
        return await asyncio.shield(self._opening)

    async def _open(self) -> Connection:
        server = self._endpoint.server
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._broker.connect(self._endpoint, await self._addresses())
        except TargetRefused:
            raise
        except TimeoutError:
            raise OSError(f"{server}: no connection within {CONNECT_SECONDS:g} s") from None
        except Exception as error:  # noqa: BLE001
            raise OSError(f"{server}: no connection: {self._describe(error)}") from None

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
    ) -> None:
        """Publish messages; retry those that the connection gives no answer to."""
        with contextlib.suppress(TimeoutError):  # by `drop`, which says why
            async with asyncio.timeout(None) as limit:
                await self._publish(Batch(connection, limit), route, messages)

    async def _publish(self, batch: Batch, route: Any, messages: Sequence[Message]) -> None:
        self._add(batch)
        try:
            await batch.connection.publish(route, messages)
        except Exception as error:  # noqa: BLE001
            if batch in self._batches:
                self.drop(batch.connection, self._describe(error))
        finally:
            self._batches.discard(batch)
            for message in messages:
                message.refuse(f"{self._endpoint.server}: {batch.error}")

    def _add(self, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        if not self._batches:
            self._progress_at = loop.time()
        self._batches.add(batch)
        if self._watch is None:
            self._watch = loop.call_later(STUCK_SECONDS, self._check_progress)

    def mark_progress(self) -> None:
        """Note that a message has ended."""
        self._progress_at = asyncio.get_running_loop().time()

    def _check_progress(self) -> None:
        """Close the connection if messages wait and none has ended for too long."""
        loop = asyncio.get_running_loop()
        self._watch = None
        if not self._batches:
            return
        left = self._progress_at + STUCK_SECONDS - loop.time()
        if left > 0:
            self._watch = loop.call_later(left, self._check_progress)
            return
        error = f"no confirm for {STUCK_SECONDS:g} s, so the connection was closed"
        logger.warning("%s: %s", self._endpoint.server, error)
        for connection in {batch.connection for batch in self._batches}:
            self.drop(connection, error)

    def drop(self, connection: Connection, error: str) -> None:
        """Close a connection, and end what waits for its confirms; the next call opens another."""
        loop = asyncio.get_running_loop()
        opening = self._opening
        if opening is not None and opening.done() and not has_failed(opening):
            self._opening = None if opening.result() is connection else opening
        for batch in [one for one in self._batches if one.connection is connection]:
            self._batches.remove(batch)
            batch.error = error
            batch.limit.reschedule(loop.time())
        closing = loop.create_task(close_quietly(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def abandon(self) -> None:
        """Close the connection, without waiting for that."""
        opening = self._opening
        if opening is None:
            return
        if not opening.done():
            opening.cancel()
        elif not has_failed(opening):
            self.drop(opening.result(), "the connection was closed before its confirm")
        self._opening = None

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


class TracedMessage:
    """The trace of one message, in a context of its own: traces of a batch are not nested."""

    __slots__ = ("_context", "_span", "_trace", "headers")

    def __init__(self, tracer: Tracer, delivery: Delivery) -> None:
        self._context = contextvars.copy_context()
        self._span: AbstractContextManager[CallTrace] = self._context.run(
            tracer, delivery.task, delivery.service
        )
        self._trace = self._context.run(self._span.__enter__)
        self.headers = self._trace.headers

    def end(self, answer: Answer) -> None:
        """End the trace with the answer."""
        self._context.run(self._trace.end, answer)
        self._context.run(self._span.__exit__, None, None, None)


def may_send(delivery: Delivery) -> bool:
    """Return whether a task may be sent; end it otherwise."""
    allowed = delivery.may_send()
    if not allowed:
        delivery.end(UNSENT)
    return allowed


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


def confirmed_answer(service: Service, place: Mapping[str, Any]) -> Answer:
    """Return the answer for a confirmed message, by the service's choice."""
    if service.confirmed == "running":
        feedback_ms = max(1, round(service.feedback_timeout * 1000))
        return Answer(Event.ACCEPT, after_ms=feedback_ms, healthy=True)
    return Answer(Event.FINISH, _encode(place), healthy=True)


def message_headers(service: Service) -> tuple[tuple[str, str], ...]:
    """Return the headers that are the same for every message of a service."""
    headers = service_headers(service)
    if service.cloudevents != "structured":
        return headers
    return (("content-type", EVENT_JSON), *headers[1:])


def message_id(task: Task, service: Service) -> str:
    """Return the id of a message, for brokers that drop a message which they have already.

    If a confirmed message finishes its task, only a lost confirm leads to another attempt: that has
    the same id. The checksum tells apart a payload that was replaced in between. If the task runs
    until feedback, each attempt is a message of its own.
    """
    part = task.attempt if service.confirmed == "running" else f"{zlib.crc32(task.body):08x}"
    return f"{task.id}-{part}"


def event_of(task: Task, service: Service) -> list[tuple[str, str]]:
    """Return the attributes of a task as a CloudEvent; a repeated attempt is the same event."""
    return [
        ("specversion", "1.0"),
        ("id", task.id),
        ("source", f"/tickwheel/{quote(local_name(service))}"),
        ("type", EVENT_TYPE),
        ("time", format_time(task.due_at_ms)),
    ]


def event_document(task: Task, service: Service) -> bytes:
    """Return a task as a CloudEvent in JSON; its data is the payload, byte for byte."""
    attributes = dict(event_of(task, service))
    try:
        json.loads(task.body)
    except ValueError:
        data = b'"data_base64":"' + base64.b64encode(task.body) + b'"'
    else:
        attributes["datacontenttype"] = "application/json"
        data = b'"data":' + task.body
    return json.dumps(attributes).encode()[:-1] + b"," + data + b"}"
