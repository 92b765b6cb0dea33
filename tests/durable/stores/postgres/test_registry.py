"""The registry on PostgreSQL: changes at the same time, and what they notify."""

import asyncio

import pytest

from contracts.stores import (
    later,
    stored,
)
from durable.postgres_stage import blocked, opened
from tickwheel.durable.registry import Audit
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.durable.stores.postgres import registry as postgres_registry
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.errors import Locked, ServiceInUse, StoreUnavailable
from tickwheel.values.task import Submission

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class TestTheRegistry:
    LINE = Audit(1, "local", "", "service.put", "mail")

    async def test_a_change_waits_for_another(self, store, user):
        await user.execute(f"BEGIN; {postgres_registry.BUMP}")
        putting = asyncio.create_task(store.registry.put_service("mail", "{}", self.LINE))
        await blocked(user)
        assert not putting.done()
        await user.execute("COMMIT")
        assert (await putting).version == 1
        assert await store.registry.version() == 2

    async def test_one_that_waits_in_vain_is_an_error_and_changes_nothing(
        self, store, user, postgres_url, monkeypatch
    ):
        monkeypatch.setitem(postgres_pool.SETTINGS, "lock_timeout", "50")
        async with opened(postgres_url) as impatient:
            await user.execute(f"BEGIN; {postgres_registry.BUMP}")
            with pytest.raises(Locked):
                await impatient.registry.put_service("mail", "{}", self.LINE)
            await user.execute("ROLLBACK")
        assert await store.registry.services() == []

    async def test_a_task_that_is_being_stored_keeps_no_service(self, store, user):
        """No submit asks for its service, so none is waited for."""
        await store.registry.put_service("mail", "{}", self.LINE)
        await user.execute("BEGIN")
        await store.within(user, Submission(later(store)))
        assert await store.registry.delete_service("mail", self.LINE) is True
        await user.execute("COMMIT")

    async def test_a_refusal_costs_no_connection(self, store):
        await store.registry.put_service("mail", "{}", self.LINE)
        await stored(store, later(store))
        backend = "SELECT pg_backend_pid()"
        before = await store.fetch(backend)
        with pytest.raises(ServiceInUse):
            await store.registry.delete_service("mail", self.LINE)
        assert await store.fetch(backend) == before

    async def test_a_notification_that_cannot_be_sent_is_no_error(self, store, monkeypatch):
        real = store.fetch

        async def fetch(statement, *values, **options):
            if statement == sql.NOTIFY:
                raise StoreUnavailable("gone")
            return await real(statement, *values, **options)

        monkeypatch.setattr(store, "fetch", fetch)
        assert await store.registry.put_service("mail", "{}", self.LINE) is not None

    async def test_what_changed_nothing_is_not_told(self, store, other):
        received = asyncio.Queue()
        store.subscribe("registry", received.put_nowait)
        assert await received.get() == ""
        await other.registry.delete_service("nobody", self.LINE)
        await other.registry.note(self.LINE)
        await other.registry.put_service("mail", "{}", self.LINE)
        await received.get()
        await other.fetch(sql.NOTIFY, other.channel("registry"), "the next")
        assert await received.get() == "the next"

    async def test_the_words_of_a_line_may_hold_anything(self, store):
        await store.registry.note(self.LINE._replace(detail="a\0b\ud800"))
        ((line,), _) = await store.registry.audit(namespace=None, cursor=None, limit=9)
        assert line.detail == "a\\0b\\ud800"
