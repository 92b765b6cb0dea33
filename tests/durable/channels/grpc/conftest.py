"""A channel, and a callee for its calls."""

import pytest
import pytest_asyncio

from callees import Callee
from durable.channels.http.calling import now_ms_of
from durable.stage import START
from tickwheel import ManualClock
from tickwheel.durable.channels.grpc.channel import GrpcChannel
from tickwheel.durable.channels.grpc.endpoint import TlsFiles
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.permits.semaphore import Semaphore
from web.authority import Authority


@pytest.fixture
def callee():
    with Callee() as callee:
        yield callee


def channel_with(targets=None, **options):
    targets = targets or Targets(allow_private=True)
    calls = Semaphore(10, fair=True)
    return GrpcChannel(targets, now_ms_of(ManualClock(START)), calls, **options)


@pytest_asyncio.fixture
async def channel():
    channel = channel_with()
    yield channel
    await channel.close()


@pytest_asyncio.fixture
async def make_channel():
    """Make channels with other targets or certificates."""
    made = []

    def make(**options):
        made.append(channel_with(**options))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def tls_files(authority):
    return TlsFiles(authority.ca, authority.cert, authority.key)
