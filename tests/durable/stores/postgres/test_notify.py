"""Notifications on PostgreSQL: what is sent, who is called, and lost connections."""

import asyncio

import pytest

from durable.postgres_stage import opened, until
from tickwheel.durable.registry import Audit
from tickwheel.durable.stores.postgres.listener import Listener
from tickwheel.errors import StoreUnavailable
from tickwheel.values.schedule import Schedule

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

LINE = Audit(1, "local", "", "service.put", "mail")


class TestListening:
    @pytest.fixture
    def received(self):
        return asyncio.Queue()

    async def listening(self, store, received):
        """Have it listen, and be past the first call, which the connection itself makes."""
        store.notifications.subscribe_due(lambda: received.put_nowait("received"))
        await received.get()

    async def test_a_hold_of_another_process_is_received(self, store, other, received):
        store.notifications.subscribe_holds(lambda *words: received.put_nowait(words))
        store.subscribe("hold", lambda words: words or received.put_nowait("begun"))
        assert await received.get() == "begun"
        await other.notifications.notify_hold("a/mail of ours ✓", 1_700_000_000_123)
        assert await received.get() == ("a/mail of ours ✓", 1_700_000_000_123)

    async def test_a_schedule_that_another_process_puts_or_deletes_is_heard_of(
        self, store, other, received
    ):
        store.notifications.subscribe_changes(lambda: received.put_nowait("received"))
        await received.get()
        made = Schedule("s", "mail", b"1", None, 1_000, "UTC", "once", 0, 0)
        await other.schedules.put(made, LINE)
        assert await received.get() == "received"
        await other.schedules.delete("s", LINE)
        assert await received.get() == "received"

    async def test_a_notification_of_another_process_is_received(self, store, other, received):
        await self.listening(store, received)
        await other.notifications.notify_due([3])
        assert await received.get() == "received"

    async def test_what_concerns_other_shards_wakes_nobody(self, store, other, received):
        await self.listening(store, received)
        store.notifications.subscribe_due(lambda: received.put_nowait("received"), lambda: {1, 2})
        store.subscribe("due", received.put_nowait)  # a second subscriber, for all shards
        assert await received.get() == ""
        await other.notifications.notify_due([3, 4])
        await other.notifications.notify_due([0, 2])
        assert [await received.get() for _ in range(3)] == ["3,4", "received", "0,2"]

    async def test_more_shards_than_a_notification_can_name_mean_all(self, store, other, received):
        store.subscribe("due", received.put_nowait)
        await received.get()
        await other.notifications.notify_due(range(4096))
        assert await received.get() == "*"

    async def test_a_second_subscription_replaces_the_first(self, store, other, received):
        await self.listening(store, received)
        store.notifications.subscribe_due(lambda: received.put_nowait("second"))
        await other.notifications.notify_due([1])
        assert await received.get() == "second"
        assert received.empty()

    async def test_after_a_lost_connection_it_looks_again(self, store, other, user, received):
        await self.listening(store, received)
        await user.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        )
        assert await received.get() == "received"
        await other.notifications.notify_due([1])
        assert await received.get() == "received"

    async def test_a_connection_that_is_silent_is_given_up(self, server, received, monkeypatch):
        for name in ("HEARTBEAT_SECONDS", "ANSWER_SECONDS"):
            monkeypatch.setattr(f"tickwheel.durable.stores.postgres.listener.{name}", 0.1)
        made = []

        async with opened(server.url) as store:

            async def connect():
                made.append(await store._pool.connect())
                return made[-1]

            listener = Listener(connect)
            listener.subscribe("x", received.put_nowait)
            await received.get()
            server.pause()

            async def given_up():
                return made[0].is_closed()

            await until(given_up)
            server.resume()
            assert await received.get() == ""
            await listener.close()

    async def test_words_that_come_while_one_is_said_are_said_together(self, store, monkeypatch):
        said, gate = [], asyncio.Event()

        async def fetch(_, channel, words):
            said.append(words)
            await gate.wait()

        monkeypatch.setattr(store, "fetch", fetch)
        first = asyncio.create_task(store.notifications.notify_due([1]))
        await asyncio.sleep(0)
        for shard in (5, 2, 5, 3):
            await store.notifications.notify_due([shard])
        gate.set()
        await first
        assert said == ["1", "2,3,5"]

    async def test_a_notification_that_cannot_be_sent_is_no_error(
        self, store, other, monkeypatch, received
    ):
        await self.listening(store, received)

        async def fetch(*_):
            raise StoreUnavailable("gone")

        with monkeypatch.context() as broken:
            broken.setattr(other, "fetch", fetch)
            await other.notifications.notify_due([1])
        await other.notifications.notify_due([2])
        assert await received.get() == "received"
