"""Calls of `CallbackService`: connections to checked addresses, and the meaning of a status."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from tickwheel import __version__
from tickwheel.durable.channel import Answer
from tickwheel.durable.channels.grpc.endpoint import origin_of
from tickwheel.durable.channels.http.channel import (
    MAX_RETRY_AFTER_MS,
    answer_to_error,
    excerpt_of,
    result_in,
)
from tickwheel.v1.callback_pb2 import CallRequest, CallResponse
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.durable.channels.grpc.endpoint import Origin, TlsFiles
    from tickwheel.durable.channels.http.channel import Plan
    from tickwheel.durable.channels.http.target import Targets
    from tickwheel.http import Address, OpenConnections
    from tickwheel.values.task import Task

Code = grpc.StatusCode
METHOD = "/tickwheel.v1.CallbackService/Call"
DETAILS = "grpc-status-details-bin"  # the metadata with a google.rpc.Status
MAX_RESPONSE_BYTES = 1 << 20  # a larger response fails the attempt
RECONNECT_MS = 100, 1000  # the first and the longest pause after a failed connect
IDLE_MS = 15_000  # as over HTTP: firewalls forget an idle connection without telling either end
# Pings are sent during a call only, and less often than every 5 minutes: a server with the usual
# settings closes a connection with more of them. The timeout is for the answer to a ping, and for
# TCP to confirm any data.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 330_000, 20_000
# As 4xx over HTTP: the service works, and refuses this task.
HEALTHY = {
    Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.PERMISSION_DENIED,
    Code.UNAUTHENTICATED, Code.FAILED_PRECONDITION, Code.ABORTED, Code.OUT_OF_RANGE,
    Code.RESOURCE_EXHAUSTED,
}  # fmt: skip
# As 429 and 503 over HTTP: with a delay, nothing is sent to the service until it has passed.
HOLDING = {Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}
PENDING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_ADDRESS = re.compile(r"ipv[46]:\S*: ")  # would tell a stranger about the internal network
_CONNECT = re.compile(r"failed to connect to all addresses; last error: (?:[A-Z_]+: )?")


class Connection:
    """One HTTP/2 connection to checked addresses; it closes after its last call, once retired."""

    def __init__(
        self, origin: Origin, addresses: list[Address], credentials: grpc.ChannelCredentials | None
    ) -> None:
        self.addresses = addresses
        self.users = 0
        self.used_at = 0.0
        self.timed_out = False  # a call had no answer in time: perhaps nobody is there
        self._origin = origin
        options: list[tuple[str, Any]] = [
            ("grpc.default_authority", str(origin)),
            ("grpc.client_idle_timeout_ms", IDLE_MS),
            ("grpc.enable_http_proxy", 0),
            # Without a policy, it repeats only a request that no server has processed: one that was
            # never sent, or was refused by a server that was closing the connection.
            ("grpc.enable_retries", 1),
            ("grpc.http2.max_pings_without_data", 0),  # no limit: a call may be long
            ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # only TCP uses it
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.primary_user_agent", f"tickwheel/{__version__}"),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        target = target_of(addresses)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options)
        else:
            options.append(("grpc.ssl_target_name_override", origin.host))
            self._channel = grpc.aio.secure_channel(target, credentials, options)
        self._call = self._channel.unary_unary(
            METHOD,
            request_serializer=CallRequest.SerializeToString,
            response_deserializer=CallResponse.FromString,
        )

    async def until_connected(self) -> None:
        """Return when the connection is open, or could not be opened."""
        state = self._channel.get_state(try_to_connect=True)
        while state in PENDING:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def call(
        self, task: Task, plan: Plan, metadata: list[tuple[str, str]], timeout: float | None
    ) -> Answer:
        """Call the service, and return the meaning of its status."""
        request = request_of(task)
        try:
            response = await self._call(request, metadata=metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            self.timed_out |= error.code() is Code.DEADLINE_EXCEEDED
            return answer_to_status(error, task, plan, self._origin)
        except asyncio.CancelledError:
            self.timed_out = True  # dispatch may notice it before the deadline of the call
            task_now = asyncio.current_task()
            if task_now is None or task_now.cancelling():
                raise
            return answer_to_error(f"{plan.host}: the connection was closed during the call")
        return answer_to_response(response, plan)

    async def close(self) -> None:
        """Close it, and end its calls."""
        await self._channel.close()


class Calls:
    """The connections of this process, by origin; `total` counts them, with those of others.

    A connection leads to the addresses that were checked when it was opened. When a name leads
    elsewhere, or a call had no answer in time, new calls get a new connection, and the old one
    closes after its last call.
    """

    def __init__(self, tls: TlsFiles, total: OpenConnections) -> None:
        self._credentials: grpc.ChannelCredentials | None = None
        self._tls = tls
        self._total = total
        self._connections: dict[Origin, Connection] = {}  # the last used one is the last
        self._retired: set[Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()
        if tls != (None, None, None):
            self._credentials = credentials_of(tls)  # raises now for files that are not valid
        total.add(self._drop_idle)

    @asynccontextmanager
    async def connection(self, endpoint: str, targets: Targets) -> AsyncIterator[Connection]:
        """Give a connection to a checked address of the endpoint, open or failed."""
        origin = origin_of(endpoint)
        addresses = await targets.resolve(origin.host, origin.port)
        connection = await self._open(origin, addresses)
        connection.users += 1
        try:
            await connection.until_connected()
            yield connection
        finally:
            connection.users -= 1
            connection.used_at = asyncio.get_running_loop().time()
            if connection.timed_out and self._connections.get(origin) is connection:
                self._retired.add(self._connections.pop(origin))
            if not connection.users and connection in self._retired:
                self._close(connection)

    async def _open(self, origin: Origin, addresses: list[Address]) -> Connection:
        if not self._leads_to(origin, addresses):
            await self._total.make_room()  # another call may open the connection meanwhile
        if self._leads_to(origin, addresses):
            connection = self._connections.pop(origin)
        else:
            self._close_unused()
            connection = Connection(origin, addresses, self._credentials_for(origin.scheme))
            self._total.open += 1
            if origin in self._connections:
                self._retire(self._connections.pop(origin))
        self._connections[origin] = connection
        return connection

    def _leads_to(self, origin: Origin, addresses: list[Address]) -> bool:
        """Return whether there is a connection to these addresses."""
        known = self._connections.get(origin)
        return known is not None and known.addresses == addresses

    def _close_unused(self) -> None:
        """Close connections whose last call is long over: their services may be deleted."""
        before = asyncio.get_running_loop().time() - IDLE_MS / 1000
        for origin, connection in list(self._connections.items()):
            if connection.users or connection.used_at > before:
                break
            self._close(self._connections.pop(origin))

    def _drop_idle(self) -> asyncio.Future[None] | None:
        """Close the connection that was used first of those without a call; return its end."""
        for origin, connection in self._connections.items():
            if not connection.users:
                del self._connections[origin]
                return self._close(connection)
        return None

    def _credentials_for(self, scheme: str) -> grpc.ChannelCredentials | None:
        if scheme == "grpc":
            return None
        if self._credentials is None:
            self._credentials = credentials_of(self._tls)
        return self._credentials

    def _retire(self, connection: Connection) -> None:
        self._retired.add(connection)
        if not connection.users:
            self._close(connection)

    def _close(self, connection: Connection) -> asyncio.Task[None]:
        self._retired.discard(connection)
        closing = asyncio.get_running_loop().create_task(connection.close())
        self._closing.add(closing)
        closing.add_done_callback(self._on_closed)
        return closing

    def _on_closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        self._total.open -= 1

    async def close(self) -> None:
        """Close all connections, and end their calls."""
        for connection in (*self._connections.values(), *self._retired):
            self._close(connection)
        self._connections.clear()
        await asyncio.gather(*self._closing)


def target_of(addresses: list[Address]) -> str:
    """Return gRPC's name for numeric addresses: it tries them in order, the families in turn.

    Such a name has one family. If there are both, IPv4 addresses get their form in IPv6, which
    leads to the same address.
    """
    hosts = [one.host for one in addresses]
    if not any(":" in host for host in hosts):
        return "ipv4:" + ",".join(f"{one.host}:{one.port}" for one in addresses)
    mapped = [host if ":" in host else f"::ffff:{host}" for host in hosts]
    port = addresses[0].port
    return "ipv6:" + ",".join(f"[{host}]:{port}" for host in mapped)


def credentials_of(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Return the credentials for calls with TLS."""
    ca, cert, key = (None if path is None else path.read_bytes() for path in tls)
    return grpc.ssl_channel_credentials(ca, key, cert)


def request_of(task: Task) -> CallRequest:
    """Return the request for a task."""
    request = CallRequest(
        task_id=task.id,
        service=task.service.rpartition("/")[2],
        payload=task.body.decode(),
        attempt=task.attempt,
        epoch=task.epoch,
    )
    request.due_at.FromMilliseconds(task.due_at_ms)
    return request


def answer_to_response(response: CallResponse, plan: Plan) -> Answer:
    """Return the answer for a call that succeeded."""
    if response.accepted:
        feedback_ms = max(1, round(plan.service.feedback_timeout * 1000))
        return Answer(Event.ACCEPT, after_ms=feedback_ms, healthy=True)
    return Answer(Event.FINISH, result_in(response.result.encode()), healthy=True)


def answer_to_status(error: grpc.aio.AioRpcError, task: Task, plan: Plan, origin: Origin) -> Answer:
    """Return the answer for a status other than OK."""
    code = error.code()
    timeout = plan.service.timeout_of(task.timeout_ms)
    if code is Code.DEADLINE_EXCEEDED and timeout is not None:
        return answer_to_error(f"timed out after {timeout:g} s")  # as dispatch says
    details = _ADDRESS.sub("", error.details() or "")
    text = excerpt_of(details.encode("utf-8", "replace"), plan.hidden)
    if _CONNECT.match(text):
        return answer_to_error(f"cannot connect to {origin}: {_CONNECT.sub('', text)}")
    after_ms = retry_after_ms(error)
    return Answer(
        Event.RETRY,
        error=f"{plan.host} answered {code.name}" + (f": {text}" if text else ""),
        least_ms=after_ms,
        healthy=code in HEALTHY,
        hold_ms=after_ms if code in HOLDING else None,
    )


def retry_after_ms(error: grpc.aio.AioRpcError) -> int | None:
    """Return the delay in a status's google.rpc.RetryInfo, at most a day; None without one."""
    for name, value in error.trailing_metadata() or ():
        if name != DETAILS or not isinstance(value, bytes):
            continue
        try:
            details = Status.FromString(value).details
            for one in details:
                info = RetryInfo()
                if one.Unpack(info):
                    wait_ms = int(info.retry_delay.ToMilliseconds())
                    return min(max(0, wait_ms), MAX_RETRY_AFTER_MS)
        except DecodeError:
            return None
    return None
