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
    def heard(self):
        return asyncio.Queue()

    async def listening(self, store, heard):
        """Have it listen, and be past the first call, which the connection itself makes."""
        store.notifications.subscribe_due(lambda: heard.put_nowait("heard"))
        await heard.get()

    async def test_a_hold_that_another_process_tells_of_is_heard(self, store, other, heard):
        store.notifications.subscribe_holds(lambda *words: heard.put_nowait(words))
        store.subscribe("hold", lambda words: words or heard.put_nowait("begun"))
        assert await heard.get() == "begun"
        await other.notifications.notify_hold("a/mail of ours ✓", 1_700_000_000_123)
        assert await heard.get() == ("a/mail of ours ✓", 1_700_000_000_123)

    async def test_a_schedule_that_another_process_puts_or_deletes_is_heard_of(
        self, store, other, heard
    ):
        store.notifications.subscribe_changes(lambda: heard.put_nowait("heard"))
        await heard.get()
        made = Schedule("s", "mail", b"1", None, 1_000, "UTC", "once", 0, 0)
        await other.schedules.put(made, LINE)
        assert await heard.get() == "heard"
        await other.schedules.delete("s", LINE)
        assert await heard.get() == "heard"

    async def test_a_word_of_another_process_is_heard(self, store, other, heard):
        await self.listening(store, heard)
        await other.notifications.notify_due([3])
        assert await heard.get() == "heard"

    async def test_what_concerns_other_shards_wakes_nobody(self, store, other, heard):
        await self.listening(store, heard)
        store.notifications.subscribe_due(lambda: heard.put_nowait("heard"), lambda: {1, 2})
        store.subscribe("due", heard.put_nowait)  # a second ear, which hears everything
        assert await heard.get() == ""
        await other.notifications.notify_due([3, 4])
        await other.notifications.notify_due([0, 2])
        assert [await heard.get() for _ in range(3)] == ["3,4", "heard", "0,2"]

    async def test_more_shards_than_a_word_can_name_are_all(self, store, other, heard):
        store.subscribe("due", heard.put_nowait)
        await heard.get()
        await other.notifications.notify_due(range(4096))
        assert await heard.get() == "*"

    async def test_who_listens_anew_takes_the_place_of_who_did(self, store, other, heard):
        await self.listening(store, heard)
        store.notifications.subscribe_due(lambda: heard.put_nowait("second"))
        await other.notifications.notify_due([1])
        assert await heard.get() == "second"
        assert heard.empty()

    async def test_after_a_lost_connection_it_looks_again(self, store, other, user, heard):
        await self.listening(store, heard)
        await user.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        )
        assert await heard.get() == "heard"
        await other.notifications.notify_due([1])
        assert await heard.get() == "heard"

    async def test_a_connection_that_is_silent_is_given_up(self, server, heard, monkeypatch):
        for name in ("HEARTBEAT_SECONDS", "ANSWER_SECONDS"):
            monkeypatch.setattr(f"tickwheel.durable.stores.postgres.listener.{name}", 0.1)
        made = []

        async with opened(server.url) as store:

            async def connect():
                made.append(await store._pool.connect())
                return made[-1]

            listener = Listener(connect)
            listener.subscribe("x", heard.put_nowait)
            await heard.get()
            server.pause()

            async def given_up():
                return made[0].is_closed()

            await until(given_up)
            server.resume()
            assert await heard.get() == ""
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

    async def test_a_word_that_cannot_be_said_is_no_error(self, store, other, monkeypatch, heard):
        await self.listening(store, heard)

        async def fetch(*_):
            raise StoreUnavailable("gone")

        with monkeypatch.context() as broken:
            broken.setattr(other, "fetch", fetch)
            await other.notifications.notify_due([1])
        await other.notifications.notify_due([2])
        assert await heard.get() == "heard"
