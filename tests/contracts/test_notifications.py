"""The contract of notifications, on every store: one process wakes another."""

import asyncio

import pytest

from contracts.stores import AUDIT, PATIENCE, schedule
from tickwheel.durable.registry import Audit, Token

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

LINE = Audit(1_000, "local", "", "service.put", "mail")
TOKEN = Token("id-ci", "ci", "digest", "", ("read",), None, 5)
CHANGES = {
    "put_service": lambda store: store.registry.put_service("mail", "{}", LINE),
    "put_token": lambda store: store.registry.put_token(TOKEN, LINE),
    "put_schedule": lambda store: store.schedules.put(
        schedule(store, created_at_ms=int(store.now_ms() * 1000) % 10**12), AUDIT
    ),
}


async def repeat_until(event, notify):
    """Notify until it has an effect: a subscription may take a moment to begin."""
    async with asyncio.timeout(PATIENCE):
        while not event.is_set():
            await notify()
            try:
                await asyncio.wait_for(event.wait(), 0.1)
            except TimeoutError:
                continue


class TestDue:
    async def test_one_store_notifies_another(self, store, opened):
        other = await opened()
        notified = asyncio.Event()
        store.notifications.subscribe_due(notified.set)
        await repeat_until(notified, lambda: other.notifications.notify_due([0]))

    async def test_a_subscriber_may_name_its_shards(self, store, opened):
        other = await opened()
        notified = asyncio.Event()
        store.notifications.subscribe_due(notified.set, lambda: {3: 1, 5: 1})
        await repeat_until(notified, lambda: other.notifications.notify_due([4, 5]))

    async def test_a_notification_without_a_subscriber_is_no_error(self, store):
        await store.notifications.notify_due([0, 1])
        await store.notifications.notify_due([])
        await store.notifications.notify_hold("mail", 5)


class TestChanges:
    @pytest.mark.parametrize("change", CHANGES)
    async def test_a_change_in_one_process_notifies_another(self, store, opened, change):
        other = await opened()
        notified = asyncio.Event()
        store.notifications.subscribe_due(lambda: None)  # as the node that dispatches does
        store.notifications.subscribe_changes(notified.set)
        await repeat_until(notified, lambda: CHANGES[change](other))

    async def test_a_subscriber_to_changes_takes_nothing_from_the_node_that_dispatches(
        self, store, opened
    ):
        notified = asyncio.Event()
        store.notifications.subscribe_due(notified.set)
        other = await opened()
        other.notifications.subscribe_changes(lambda: None)
        third = await opened()
        await repeat_until(notified, lambda: third.notifications.notify_due([0]))


class TestHolds:
    async def test_a_subscription_to_holds_is_no_error(self, store):
        """Whether a hold arrives depends on the store: on SQLite only one process dispatches."""
        store.notifications.subscribe_holds(lambda service, until_ms: None)
        await store.notifications.notify_hold("mail", 5)
