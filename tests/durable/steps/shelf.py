"""A loader alone, on a real store and a clock that a test sets."""

from durable.stage import a_task
from tickwheel.durable import State
from tickwheel.durable.steps.horizon import Horizon
from tickwheel.durable.steps.loader import Loader
from tickwheel.values.service import Service
from tickwheel.values.task import Ids, Submission


class Owner:
    """A coordinator that owns the given shards."""

    def __init__(self, epochs):
        self.epochs = epochs

    def owned(self):
        return self.epochs

    claimable = owned

    def lent(self):
        return {}


class Shelf:
    """A loader on a real store, and a clock set by hand; no other step."""

    def __init__(self, store, clock, wall, epochs, **options):
        self.store, self.clock, self.wall = store, clock, wall
        self.owner = Owner(epochs)
        self.services = {name: Service(name) for name in ("mail", "bill")}
        self.running, self.added = set(), []
        options = {"length_ms": 60_000, "cap": 1_000, **options}
        self.horizon = Horizon(
            store.now_ms, self.running, self.services, self.added.append, **options
        )
        self.loader = Loader(store, self.owner, self.horizon, self.services)
        self._ids = Ids()

    async def put(self, *delays, service="mail", shard=0):
        """Store tasks that are due after these delays in seconds; return their ids."""
        now = int(self.store.now_ms())
        tasks = [
            a_task(
                id=self._ids.make(now, shard), service=service, state=State.DELAY, shard=shard,
                due_at_ms=now + round(delay * 1000), attempt=0,
            )
            for delay in delays
        ]  # fmt: skip
        await self.store.insert([Submission(task) for task in tasks], {})
        return [task.id for task in tasks]

    def postpone_overdue(self):
        """Let short reads start near the oldest unclaimed task, as if more would take long."""
        self.loader._overdue_read_at_ms = int(self.store.now_ms())
        self.loader._overdue_interval_ms = 1 << 60

    def delays(self):
        """Return the seconds until each task in memory is due, in order."""
        now = self.store.now_ms()
        return sorted((entry.expiry - now) / 1000 for entry in self.horizon.entries.values())

    def fire(self):
        """Take the tasks that have come due; return their ids."""
        self.horizon.advance(lambda _: False)
        names = self.horizon.waiting_services()
        return [due.id for name in names for due, _ in self.horizon.take(name, 1_000_000)]
