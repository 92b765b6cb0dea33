"""The gRPC channel: it calls `CallbackService.Call` of a service when a task is due.

The status of the call is the outcome, by the same rules as over HTTP. An error becomes a short text
that names the host, without any secret or metadata. This module loads grpcio at the first call or
check, since that takes time and memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from tickwheel.clock import Clock, SystemClock
from tickwheel.durable.channel import UNSENT, Answer
from tickwheel.durable.channels.grpc.endpoint import TlsFiles, origin_of
from tickwheel.durable.channels.headers import (
    check_secrets,
    headers_of,
    hidden_in,
    service_headers,
)
from tickwheel.durable.channels.http.channel import MAX_PLANS, Plan, answer_to_error
from tickwheel.durable.channels.missing import MissingPackage
from tickwheel.durable.histogram import Histogram
from tickwheel.errors import TargetRefused
from tickwheel.http import OpenConnections
from tickwheel.values.service import refuse_message_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.channel import Tracer
    from tickwheel.durable.channels.grpc.calls import Calls
    from tickwheel.durable.channels.http.target import Targets
    from tickwheel.durable.permits.semaphore import Semaphore
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

NOT_METADATA = frozenset({"content-type", "user-agent"})  # gRPC sets these itself
_METADATA_NAME = re.compile(r"(?!grpc-)[a-z0-9_.-]+(?<!-bin)")


class GrpcChannel:
    """Calls services over gRPC.

    - Delivery is at least once: a callee recognises repeated attempts by their task id.
    - The channel connects only to addresses that `targets` has checked, and uses no proxy.
    - `calls` are the permits for calls under way, and `connections` counts the open connections;
      it shares both with the HTTP channel.
    - `now_ms` returns the store's time, for signatures.
    """

    remote = True

    def __init__(
        self,
        targets: Targets,
        now_ms: Callable[[], float],
        calls: Semaphore,
        *,
        connections: OpenConnections | None = None,
        tls: TlsFiles | None = None,
        stopwatch: Clock | None = None,
        on_check: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_check = on_check
        self.latencies: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.trace: Tracer | None = None
        self._targets = targets
        self._now_ms = now_ms
        self._permits = calls
        self._connections = connections or OpenConnections(calls.permits)
        self._tls = tls or TlsFiles()
        self._stopwatch = stopwatch or SystemClock()
        self._plans: dict[str, Plan] = {}
        self._calls: Calls | None = None

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return the permits for calls, which all services share."""
        return self._permits

    def interruptible(self, service: Service) -> bool:
        """Return True: a cancelled call resets its stream."""
        return True

    def check(self, service: Service) -> None:
        """Raise when the endpoint, a header or a secret of the service is not valid."""
        origin = origin_of(service.endpoint)
        self._targets.check_host(origin.host, origin.port)
        check_secrets(service)
        check_metadata(service)
        refuse_message_options(service)
        self._load()
        self._on_check()

    async def send(
        self, task: Task, service: Service, may_send: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Call the service with the task's payload, and return the meaning of its status.

        The deadline of the call is the attempt's timeout. The caller also cancels this when the
        attempt times out.
        """
        try:
            plan = self._plan(service)
        except (TypeError, ValueError, ImportError, OSError) as error:
            return answer_to_error(f"{service.name} cannot be called: {error}")
        if self.trace is None:
            return await self._send(task, plan, [], may_send)
        with self.trace(task, service) as trace:
            answer = await self._send(task, plan, trace.headers, may_send)
            trace.end(answer)
            return answer

    async def _send(
        self, task: Task, plan: Plan, extra: list[tuple[str, str]], may_send: Callable[[], bool]
    ) -> Answer:
        started = self._stopwatch.time()
        calls = self._load()
        timeout = plan.service.timeout_of(task.timeout_ms)
        try:
            async with calls.connection(plan.service.endpoint, self._targets) as connection:
                if not may_send():
                    return UNSENT
                timestamp = int(self._now_ms() // 1000)
                metadata = headers_of(task, plan.service, plan.headers, timestamp) + extra
                if timeout is not None:
                    timeout = max(0.0, timeout - (self._stopwatch.time() - started))
                return await connection.call(task, plan, metadata, timeout)
        except TargetRefused as error:
            return answer_to_error(str(error))
        except OSError as error:  # such as: the name has no address
            return answer_to_error(f"{plan.host}: {error.strerror or error}")
        finally:
            plan.latency.observe(self._stopwatch.time() - started)

    def forget(self, name: str) -> None:
        """Drop the plan and the latencies of a service that was deleted."""
        self._plans.pop(name, None)
        self.latencies.pop(name, None)

    async def close(self) -> None:
        """Close the connections."""
        self._plans.clear()
        if self._calls is not None:
            calls, self._calls = self._calls, None
            await calls.close()

    def _load(self) -> Calls:
        """Return the calls; load grpcio at the first use."""
        if self._calls is None:
            try:
                from tickwheel.durable.channels.grpc.calls import Calls  # noqa: PLC0415
            except ImportError as missing:
                raise MissingPackage.of("grpc", "grpc", missing) from missing
            self._calls = Calls(self._tls, self._connections)
        return self._calls

    def _plan(self, service: Service) -> Plan:
        plan = self._plans.get(service.name)
        if plan is not None and (plan.service is service or plan.service == service):
            return plan
        self.check(service)
        if len(self._plans) >= MAX_PLANS:
            self.forget(next(iter(self._plans)))
        host = origin_of(service.endpoint).host
        headers = tuple(one for one in service_headers(service) if one[0] not in NOT_METADATA)
        plan = Plan(service, host, headers, hidden_in(service), self.latencies[service.name])
        self._plans[service.name] = plan
        return plan


def check_metadata(service: Service) -> None:
    """Raise ValueError for a header that gRPC cannot send as metadata."""
    for name, _ in service.headers:
        if not _METADATA_NAME.fullmatch(name.lower()):
            raise ValueError(
                f"the header {name!r:.120} cannot be metadata of gRPC: it must be letters, digits"
                " or -_., not start with grpc- and not end with -bin"
            )
