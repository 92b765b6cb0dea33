"""Large payloads: bounded in memory and in each statement, without delays for other services."""

import asyncio
import gc
from collections import Counter
from types import SimpleNamespace

import pytest

from durable.stage import away
from proxies import Proxy
from tickwheel.durable import Scheduler
from tickwheel.durable.batching import capacity
from tickwheel.durable.batching.capacity import AdaptiveLimit
from tickwheel.durable.permits.payloads import CLAIM_BYTES, Payloads
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.values.task import Task

pytestmark = pytest.mark.asyncio

KIB = 1 << 10
MIB = 1 << 20
LARGE = ["large", "larger"]  # functions with large payloads


def large_and_small(app, **options):
    """Two functions: `large` waits for `goes_on`; `begun` has the names in order of calls."""
    begun, goes_on = [], asyncio.Event()

    @app.task(**options)
    async def large(text):
        begun.append("large")
        await goes_on.wait()

    @app.task
    async def small(number):
        begun.append("small")

    return SimpleNamespace(large=large, small=small, begun=begun, goes_on=goes_on)


def payloads_in_memory(task_id):
    """Return how many different payloads of a task are in memory."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is Task and one.id == task_id]
    return len({id(one.body) for one in found if one.body})


@pytest.fixture
def claims(monkeypatch):
    """Records what each claim of a node asked for and got."""
    noted = []

    def note(app):
        store = app._node.store
        real = store.claim

        async def claim(wanted, node, epochs, lease_ms, most_bytes):
            found = None
            try:
                found = await real(wanted, node, epochs, lease_ms, most_bytes)
            finally:
                noted.append(SimpleNamespace(wanted=wanted, most_bytes=most_bytes, found=found))
            return found

        monkeypatch.setattr(store, "claim", claim)
        return noted

    return note


class TestOnANode:
    async def test_the_payload_bytes_of_running_calls_are_bounded(self, stage):
        app = stage.app()
        tasks = large_and_small(app, concurrency=1_000)
        async with app:
            app._node.dispatch.payloads = payloads = Payloads(4 * MIB)
            await app.submit_many([tasks.large.request("x" * 200 * KIB) for _ in range(50)])
            await stage.settle()
            under_way = len(tasks.begun)
            assert 2 * MIB <= payloads.total <= 2 * MIB + CLAIM_BYTES + 200 * KIB
            await tasks.small.submit(1)
            await stage.settle()
            assert tasks.begun == ["large"] * under_way + ["small"]
            assert app._node.dispatch.flows["large"].under_way == under_way
            tasks.goes_on.set()
            await stage.settle()
            assert tasks.begun.count("large") == 50
            assert payloads.total == 0

    async def test_a_claim_brings_one_task_of_any_size_and_a_mebibyte_of_others(
        self, stage, claims
    ):
        app = stage.app()
        tasks = large_and_small(app, concurrency=1_000)
        async with app:
            await stage.settle()
            noted = claims(app)
            requests = [tasks.large.request("x" * 400 * KIB, delay=1) for _ in range(9)]
            await app.submit_many(requests)
            stage.clock.advance(1)
            await stage.settle()
        assert [len(one.found.tasks) for one in noted] == [3, 3, 3]
        assert len(noted[1].wanted) <= 6, "about what fits is asked for when sizes are known"

    async def test_small_payloads_are_claimed_with_a_large_one(self, stage, claims):
        app = stage.app()
        tasks = large_and_small(app, concurrency=1_000)
        app.task(name="larger")(len)
        async with app:
            await stage.settle()
            for one in ({"service": name, "payload": "x" * 900 * KIB} for name in LARGE):
                await app.submit_many([one])
                await stage.settle()
            await tasks.small.submit(0)
            await stage.settle()
            noted = claims(app)
            await app.submit_many(
                [
                    *[
                        {"service": name, "payload": "x" * 900 * KIB, "delay": 1}
                        for name in LARGE * 2
                    ],
                    *[tasks.small.request(number, delay=1) for number in range(100)],
                ]
            )
            stage.clock.advance(1)
            await stage.settle()
            assert [one.service for one in noted[0].wanted][:2] != ["small"] * 2
            tasks.goes_on.set()
            await stage.settle()
        first = Counter(task.service for task in noted[0].found.tasks)
        assert first["small"] == 100
        assert first.total() in (101, 102)

    async def test_an_idle_thread_keeps_no_payload(self, stage):
        app = stage.app()

        @app.task
        def plain(text):
            pass

        async with app:
            task_id = (await plain.submit("x" * 900 * KIB)).id
            async with asyncio.timeout(30):
                await app.wait(task_id)
                while payloads_in_memory(task_id):  # the thread ends its turn in its own time
                    await asyncio.sleep(0.01)

    async def test_a_finished_call_frees_its_payload_while_the_store_is_unavailable(self, stage):
        app = stage.app()
        tasks = large_and_small(app)
        async with app:
            real = app._node.store.record
            app._node.store.record = away(real, 1_000_000)
            task_id = (await tasks.large.submit("x" * 900 * KIB)).id
            await stage.settle()
            assert payloads_in_memory(task_id) == 1
            tasks.goes_on.set()
            await stage.settle()
            assert app._node.feedback.unrecorded == {task_id}
            assert payloads_in_memory(task_id) == 0
            app._node.store.record = real
            async with asyncio.timeout(30):
                while app._node.feedback.unrecorded:  # the pause before the next try is the loop's
                    await asyncio.sleep(0.01)

    async def test_claims_shrink_after_a_failure_and_grow_again(self, stage, claims):
        app = stage.app()
        tasks = large_and_small(app)
        async with app:
            await stage.settle()
            app._node.store.claim = away(app._node.store.claim, 9)
            noted = claims(app)
            await app.submit_many([tasks.small.request(number) for number in range(1_000)])
            await stage.advance(60)
        assert [len(one.wanted) for one in noted[:9]] == [100, 100, 100, 100, 62, 31, 15, 7, 3]
        assert [one.most_bytes for one in noted[:10]] == [CLAIM_BYTES >> n for n in range(10)]
        assert [len(one.found.tasks) for one in noted[9:14]] == [1, 3, 7, 15, 31]
        assert len(tasks.begun) == 1_000


class TestOverASlowLink:
    """Real bytes at a bounded rate between a node and PostgreSQL; a call has one second."""

    @pytest.fixture(autouse=True)
    def hurry(self, monkeypatch, watched):
        monkeypatch.setattr(postgres_pool, "CALL_SECONDS", 1.0)
        monkeypatch.setattr(capacity, "QUICK_SECONDS", 0.25)

    @pytest.fixture
    def link(self, postgres_server):
        with Proxy(postgres_server.port) as proxy:
            yield proxy

    async def run_all(self, link, url, rate, payload, count):
        """Run large tasks, due already, over the link, and small ones too; return the order."""
        app, other = (
            Scheduler(link.url_for(url), coordinator="solo"),
            Scheduler(url, dispatch=False),
        )
        tasks = large_and_small(app)
        tasks.goes_on.set()
        async with asyncio.timeout(60), other:
            await other.submit_many([{"service": "large", "payload": payload}] * count)
            async with app:
                link.rate = rate
                while tasks.begun.count("large") < count:
                    await other.submit("small", tasks.begun.count("small"))
                    await asyncio.sleep(0.1)
                while (await other.stats())["store"]["live"]:
                    await asyncio.sleep(0.1)
                link.heal()
        return tasks.begun

    async def test_large_payloads_all_run_and_delay_no_other_service(self, link, postgres_url):
        """One claim of all of them would take one and a half seconds."""
        begun = await self.run_all(link, postgres_url, 4 * MIB, "x" * (MIB - KIB), 6)
        assert begun.count("large") == 6, "each ran once"
        assert "small" in begun[: len(begun) - begun[::-1].index("large") - 1]

    async def test_a_claim_that_times_out_is_repeated_in_smaller_parts(self, link, postgres_url):
        """A claim of one task and a quarter of a mebibyte would take one and a half seconds."""
        begun = await self.run_all(link, postgres_url, 840 * KIB, "x" * 256 * KIB, 6)
        assert begun.count("large") == 6


async def test_a_portion_halves_after_failures_and_doubles_after_quick_full_calls():
    limit = AdaptiveLimit(1_000)
    assert limit.size == 1_000
    for expected in (500, 250, 125):
        limit.record_failure()
        assert limit.size == expected
    limit.record_success(125, 9.0)
    limit.record_success(62, 0.1)
    assert limit.size == 125
    for expected in (250, 500, 1_000, 1_000):
        limit.record_success(limit.size // 2 + 1, 0.1)
        assert limit.size == expected
    for _ in range(100):
        limit.record_failure()
    assert limit.size == 1
