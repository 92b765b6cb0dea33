"""A channel, and a receiver for its calls."""

import pytest
import pytest_asyncio

from durable.channels.http.calling import now_ms_of
from durable.stage import START
from receivers import Receiver
from tickwheel import ManualClock
from tickwheel.durable.channels.http.channel import (
    HttpChannel,
)
from tickwheel.durable.channels.http.target import Targets


@pytest.fixture
def receiver():
    with Receiver() as receiver:
        yield receiver


@pytest_asyncio.fixture
async def channel():
    channel = HttpChannel(Targets(allow_private=True), now_ms_of(ManualClock(START)))
    yield channel
    await channel.close()
