"""Health and reflection: services that anybody may call, with few and small requests.

Health has `Check`, as probes use it, and no `Watch`: clients that would watch then assume that the
server works. A caller that takes too long gives way to a newer one. A caller that never reads its
answers keeps its requests pending, so each address may have few of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from tickwheel.web.grpc.methods import SERVICE
from tickwheel.web.grpc.requests import Readers, address_of
from tickwheel.web.problems import HttpError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.web.app import App

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
MAX_READERS = 8
MAX_QUESTIONS = 100  # in one stream of reflection
MAX_PENDING, MAX_PENDING_OF_ADDRESS = 256, 16


class Discovery:
    """Answers probes, and questions about the services here."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._readers = Readers(MAX_READERS)
        self._pending: Counter[str] = Counter()  # requests by address
        self._reflection = reflection.ReflectionServicer([SERVICE, HEALTH, REFLECTION])

    def handlers(self) -> tuple[Any, Any]:
        """Return the handlers of both services."""
        check = grpc.stream_unary_rpc_method_handler(self._check)
        info = grpc.stream_stream_rpc_method_handler(self._info)
        return (
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
            grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": info}),
        )

    async def _admit(self, context: Any) -> None:
        """Count a request until its answer is read; refuse it beyond the limits."""
        address = address_of(context.peer())
        pending = self._pending
        if pending[address] >= MAX_PENDING_OF_ADDRESS or pending.total() >= MAX_PENDING:
            message = "too many requests whose answers nobody reads"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        pending[address] += 1
        context.add_done_callback(lambda _: self._end(address))

    def _end(self, address: str) -> None:
        self._pending[address] -= 1
        if not self._pending[address]:
            del self._pending[address]

    async def _check(self, _: Any, context: Any) -> bytes:
        await self._admit(context)
        request = await self._read(context, health_pb2.HealthCheckRequest)
        if request is None or request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        kinds = health_pb2.HealthCheckResponse
        ready = not self._app.stopping and not self._app.node.health.unready()
        status = kinds.SERVING if ready else kinds.NOT_SERVING
        return bytes(kinds(status=status).SerializeToString())

    async def _info(self, _: Any, context: Any) -> None:
        await self._admit(context)

        async def questions() -> AsyncIterator[Any]:
            for _ in range(MAX_QUESTIONS):
                question = await self._read(context, reflection_pb2.ServerReflectionRequest)
                if question is None:
                    return
                yield question

        async for answer in self._reflection.ServerReflectionInfo(questions(), context):
            await context.write(answer.SerializeToString())

    async def _read(self, context: Any, kind: Any) -> Any:
        """Return the next message, or None at the end."""
        try:
            return kind.FromString(await self._readers.read(context))
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read")
        except HttpError as error:
            if error.code == "timeout":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return None
