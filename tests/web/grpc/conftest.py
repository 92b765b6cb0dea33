"""The gRPC API in this process, on a SQLite store, and a client made of the generated code."""

import grpc
import pytest_asyncio

from tickwheel.config import Config, Listen
from tickwheel.durable.scheduler import Scheduler
from tickwheel.v1 import tasks_pb2_grpc
from tickwheel.web.access import Guard
from tickwheel.web.app import App, Limits
from tickwheel.web.grpc.server import GrpcServer
from web.serving import made_token, revoked, stored


class Stage:
    """A scheduler, the gRPC API on it, and a connection."""

    def __init__(self, scheduler, app, server, channel):
        self.scheduler = scheduler
        self.app = app
        self.server = server
        self.requests = server._requests
        self.address = f"127.0.0.1:{server.port}"
        self.channel = channel
        self.stub = tasks_pb2_grpc.TaskServiceStub(channel)

    async def token(self, *scopes, **options):
        """Create a token; return the metadata of a request with it."""
        token, text = made_token(*scopes, **options)
        await stored(self.scheduler.node.store, token)
        await self.scheduler.node.directory.refresh()
        return (("authorization", f"Bearer {text}"),)

    async def revoke(self, metadata):
        """Revoke the token in the metadata of a request."""
        await revoked(self.scheduler.node.store, metadata[0][1].removeprefix("Bearer "))
        await self.scheduler.node.directory.refresh()


@pytest_asyncio.fixture
async def make_stage(tmp_path):
    """Make a stage with limits, settings and services of a test."""
    made = []

    async def make(*, limits=None, local=True, connections=100, rate=None, services=("mail",)):
        scheduler = Scheduler(
            f"sqlite:///{tmp_path}/tasks.db", allow_private_targets=True, grace=0.5
        )
        await scheduler.start()
        for name in services:
            await scheduler.put_service(name, endpoint="http://127.0.0.1:9/", enabled=False)
        guard = Guard(scheduler.node.directory, local=local, open_access=False, rate=rate)
        app = App(scheduler, guard, limits or Limits())
        server = GrpcServer(app, Config(grpc_listen=Listen("127.0.0.1", 0)), connections)
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        made.append(Stage(scheduler, app, server, channel))
        return made[-1]

    yield make
    for stage in made:
        await stage.channel.close()
        await stage.server.stop(0)
        await stage.scheduler.stop()


@pytest_asyncio.fixture
async def stage(make_stage):
    return await make_stage()
