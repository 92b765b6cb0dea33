"""Dispatch of calls to services: concurrency, rate, breaker, holds, and gone services."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from durable.callee import BROKEN, GONE, OK, REFUSED, URL, Held, calling
from durable.stage import START_MS, away
from tickwheel.durable import State
from tickwheel.durable.steps.horizon import WINDOW

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def paused_service(stage):
    """A service in the pause of its breaker: two calls have failed, eight hang, ten tasks wait."""
    held = Held()
    app, callee = calling(stage, held)
    async with app:
        await app.put_service(
            "s", endpoint=URL, concurrency=20, timeout=3600, backoff=600,
            breaker={"failures": 2, "pause": 10, "max_pause": 60},
        )  # fmt: skip
        await app.submit_many([{"service": "s"}] * 10)
        await stage.settle()
        held.give(BROKEN, 2)
        await app.submit_many([{"service": "s"}] * 10)
        yield app, callee, held


class TestServices:
    """Services that are called over a network, and their limits."""

    async def test_a_service_is_called_with_the_submitted_payload(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_AAAA", headers={"a": "b"})
            task = await app.submit("s", {"order": 1}, delay=3)
            await stage.advance(5)
            assert (await app.get(task.id)).state is State.FINISHED
        [(at, name, called)] = callee.calls
        assert (at, name, called.id, called.payload) == (3.0, "s", task.id, {"order": 1})
        assert (callee.services[0].secrets, callee.services[0].headers) == (
            ("whsec_AAAA",), (("a", "b"),),
        )  # fmt: skip

    async def test_no_more_calls_run_than_the_concurrency_allows(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL, concurrency=3)
            await app.submit_many([{"service": "s"}] * 8)
            for done in (3, 6, 8):
                await stage.settle()
                assert len(callee.calls) == done
                held.give()

    async def test_concurrency_is_divided_by_the_live_nodes(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            app.node.coordinator.node_count = lambda: 4
            await app.put_service("s", endpoint=URL, concurrency=8)
            await app.put_service("small", endpoint=URL, concurrency=2)
            await app.submit_many([{"service": "s"}] * 8 + [{"service": "small"}] * 8)
            await stage.settle()
            assert (len(callee.times_of("s")), len(callee.times_of("small"))) == (2, 1)
            app.node.coordinator.node_count = lambda: 1  # the others have left
            await stage.advance(1)
            assert (len(callee.times_of("s")), len(callee.times_of("small"))) == (8, 2)
            held.give()
            await stage.settle()
            held.give()

    async def test_a_rate_spreads_calls_and_delays_no_other_service(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("slow", endpoint=URL, rate=4)
            await app.put_service("free", endpoint=URL)
            await app.submit_many([{"service": "slow"}] * 9)
            await app.submit("free", delay=1.1)
            await stage.advance(3)
        assert callee.times_of("slow") == pytest.approx([n / 4 for n in range(9)], abs=0.002)
        assert callee.times_of("free") == [1.1]

    async def test_a_rate_is_divided_by_the_live_nodes(self, stage):
        app, callee = calling(stage)
        async with app:
            app.node.coordinator.node_count = lambda: 2
            await app.put_service("s", endpoint=URL, rate=4)
            await app.submit_many([{"service": "s"}] * 4)
            await stage.advance(3)
        assert callee.times == pytest.approx([0, 0.5, 1, 1.5], abs=0.002)

    async def test_a_task_that_waits_for_the_rate_can_be_cancelled(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, rate=1)
            tasks = await app.submit_many([{"service": "s"}] * 3)
            await stage.settle()
            waiting = [task.id for task in tasks if task.id != callee.calls[0][2].id]
            assert [(await app.cancel(task_id)).won for task_id in waiting] == [True, True]
            await stage.advance(10)
        assert callee.times == [0.0]

    async def test_an_open_breaker_makes_no_calls_and_uses_no_attempts(self, stage):
        app, callee = calling(stage, BROKEN)
        breaker = {"failures": 3, "pause": 10, "max_pause": 30}
        async with app:
            await app.put_service(
                "s", endpoint=URL, concurrency=1, breaker=breaker, backoff=600, max_attempts=9
            )
            tasks = await app.submit_many([{"service": "s"}] * 20)
            await stage.advance(100)
            # Three failures, then one probe after each pause: 10, 20, 30, 30 seconds.
            assert callee.times == pytest.approx([0, 0, 0, 10, 30, 60, 90], abs=0.01)
            stored = [await app.get(task.id) for task in tasks]
            assert sum(task.attempt for task in stored) == 7
            assert sum(task.failures for task in stored) == 7
            assert (await app.node.stats())["services"]["s"]["breaker"] == "open"
            callee.answer = OK
            await stage.advance(30)
            assert len(callee.calls) == 20, "those that had not failed are called at once"
            assert (await app.node.stats())["services"]["s"]["breaker"] == "closed"

    async def test_calls_restart_slowly_after_an_outage(self, stage):
        app, callee = calling(stage, BROKEN)
        async with app:
            await app.put_service(
                "s", endpoint=URL, concurrency=8, breaker={"failures": 1, "pause": 10}, backoff=600
            )
            await app.submit("s")
            await stage.settle()
            await app.submit_many([{"service": "s"}] * 20)
            callee.answer = held = Held()
            await stage.advance(10)
            under_way = []
            for _ in range(5):
                under_way.append(len(held.waiting))
                held.give(OK, 1)
                await stage.settle()
            assert under_way == [1, 2, 3, 4, 5]
            while held.waiting:
                assert len(held.waiting) <= 8
                held.give()
                await stage.settle()
        assert len(callee.calls) == 21

    async def test_an_answer_from_before_the_pause_does_not_count_as_a_probe(self, stage):
        async with paused_service(stage) as (app, callee, held):
            await stage.advance(10)
            assert len(callee.calls) == 11, "one probe"
            held.give(BROKEN, 4)  # those of before, which have hung until now
            await stage.advance(5)
            assert len(callee.calls) == 11, "the probe is still under way"
            assert (await app.node.stats())["services"]["s"]["breaker"] == "half-open"
            held.give(BROKEN, 4)
            await stage.settle()
            assert len(callee.calls) == 11
            held.give(OK)  # the probe: it works again
            await stage.settle()
            assert len(callee.calls) == 13
            while held.waiting:
                held.give()
                await stage.settle()

    async def test_hanging_calls_do_not_keep_the_breaker_open(self, stage):
        async with paused_service(stage) as (_, callee, held):
            await stage.advance(9)
            callee.answer = OK  # it works again, but for the eight that hang
            await stage.advance(2)
            assert len(callee.calls) == 20
            held.give()
            await stage.settle()

    async def test_an_open_breaker_affects_no_other_service(self, stage):
        def answer(task, service):
            return BROKEN if service.name == "down" else OK

        app, callee = calling(stage, answer)
        async with app:
            for name in ("down", "up"):
                await app.put_service(name, endpoint=URL, breaker={"failures": 1, "pause": 60})
            await app.submit_many([{"service": "down"}] * 5)
            await stage.settle()
            await app.submit("up", delay=1)
            await stage.advance(2)
        assert callee.times_of("up") == [1.0]

    @pytest.mark.parametrize(("asked", "at"), [(2, 5.0), (5, 5.0), (7, 7.0), (100, 100.0)])
    async def test_a_retry_is_due_at_the_later_of_backoff_and_retry_after(self, stage, asked, at):
        app, callee = calling(stage, REFUSED._replace(least_ms=asked * 1000))
        async with app:
            await app.put_service("s", endpoint=URL, backoff=5)
            task = await app.submit("s")
            await stage.advance(at - 0.001)
            assert callee.times == [0.0]
            await stage.advance(0.001)
            assert callee.times == [0.0, at]
            assert (await app.get(task.id)).failures == 2

    async def test_a_service_that_asks_for_a_pause_is_held_as_a_whole(self, stage):
        app, callee = calling(stage, REFUSED._replace(least_ms=30_000, hold_ms=30_000))
        async with app:
            await app.put_service("s", endpoint=URL, backoff=1)
            await app.put_service("other", endpoint=URL)
            first = await app.submit("s")
            await stage.settle()
            callee.answer = OK
            others = await app.submit_many([{"service": "s", "delay": n} for n in range(1, 6)])
            await app.submit("other", delay=2)
            await stage.advance(29.999)
            assert (callee.times_of("s"), callee.times_of("other")) == ([0.0], [2.0])
            assert [(await app.get(task.id)).attempt for task in others] == [0] * 5
            await stage.advance(0.001)
            assert callee.times_of("s") == [0.0, *[30.0] * 6]
            assert (await app.get(first.id)).state is State.FINISHED

    async def test_a_pause_requested_from_another_node_holds_the_service(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            app._node.dispatch.hold("nobody", START_MS + 30_000)
            app._node.dispatch.hold("s", START_MS + 30_000)
            app._node.dispatch.hold("s", START_MS + 5_000)  # that is sooner
            await app.submit("s")
            await stage.advance(29.999)
            assert callee.times == []
            await stage.advance(0.001)
            assert callee.times == [30.0]

    async def test_a_hold_that_arrives_too_late_is_ignored(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            app._node.dispatch.hold("s", START_MS - 1)
            await app.submit("s")
            await stage.settle()
            assert callee.times == [0.0]

    async def test_the_other_nodes_are_notified_of_a_pause(self, stage):
        app, _ = calling(stage, REFUSED._replace(least_ms=30_000, hold_ms=30_000))
        async with app:
            notified = []
            app._node.coordinator.node_count = lambda: 2

            async def notify_hold(*words):
                notified.append(words)

            app._node.store.notifications.notify_hold = notify_hold
            await app.put_service("s", endpoint=URL)
            await app.submit_many([{"service": "s"} for _ in range(10)])
            await stage.settle()
            assert notified == [("s", START_MS + 30_000)]

    async def test_a_refusal_without_a_pause_delays_no_other_task(self, stage):
        app, callee = calling(stage, lambda task, _: REFUSED if task.payload == "bad" else OK)
        async with app:
            await app.put_service("s", endpoint=URL, backoff=60, concurrency=1)
            for number in range(60):
                await app.submit("s", "bad" if number % 2 else "good")
            await stage.advance(1)
        assert len(callee.calls) == 60, "a callee that says no works"

    @pytest.mark.parametrize("why", ["disabled", "open", "held"])
    async def test_ten_thousand_waiting_tasks_use_one_window_and_delay_no_other(self, stage, why):
        def answer(task, service):
            if service.name == "up" or why == "disabled":
                return OK
            return BROKEN if why == "open" else REFUSED._replace(hold_ms=3_600_000)

        app, callee = calling(stage, answer)
        async with app:
            await app.put_service(
                "down", endpoint=URL, enabled=why != "disabled", backoff=3600,
                breaker={"failures": 1, "pause": 3600, "max_pause": 3600},
            )  # fmt: skip
            await app.put_service("up", endpoint=URL)
            await app.submit("down")
            await stage.settle()
            called = len(callee.calls)
            await app.submit_many(
                [{"service": "down", "delay": number % 3} for number in range(10_000)]
            )
            ups = [await app.submit("up", delay=0.5 + number / 4) for number in range(40)]
            await stage.advance(30)
            assert callee.times_of("up") == [0.5 + number / 4 for number in range(40)]
            assert len(ups) == 40
            assert len(callee.times_of("down")) == called
            assert len(app.node.horizon.entries) <= 2 * WINDOW
            assert app.node.horizon.waiting("down") <= 2 * WINDOW
            assert (await app.counts())["live"] == 10_001

    async def test_ten_thousand_waiting_tasks_are_all_called_in_the_end(self, stage):
        app, callee = calling(stage, REFUSED._replace(hold_ms=60_000))
        async with app:
            await app.put_service("s", endpoint=URL, backoff=1)
            await app.submit("s")
            await stage.settle()
            callee.answer = OK
            await app.submit_many([{"service": "s"}] * 5_000)
            await stage.advance(59.9)
            assert len(callee.calls) == 1
            await stage.advance(10)
            assert len({task.id for _, _, task in callee.calls}) == 5_001
            assert (await app.counts())["live"] == 0

    async def test_a_timeout_counts_against_the_service(self, stage):
        held = Held()
        app, _ = calling(stage, held)
        async with app:
            await app.put_service(
                "s", endpoint=URL, timeout=5, backoff=600, breaker={"failures": 2, "pause": 60}
            )
            tasks = await app.submit_many([{"service": "s"}] * 2)
            await stage.advance(5)
            assert (await app.node.stats())["services"]["s"]["breaker"] == "open"
            assert app.node.dispatch.flows["s"].under_way == 0
            assert [(await app.get(task.id)).failures for task in tasks] == [1, 1]

    async def test_a_failed_claim_costs_no_token_and_no_probe(self, stage):
        app, callee = calling(stage, BROKEN)
        async with app:
            await app.put_service(
                "s", endpoint=URL, breaker={"failures": 1, "pause": 10}, rate=1, backoff=600
            )
            await app.submit("s")
            await stage.settle()
            await app.submit("s")
            callee.answer = OK
            await stage.advance(9)
            app.node.store.claim = away(app.node.store.claim, 1)
            await stage.advance(2)
            assert callee.times == [0.0, pytest.approx(10.1)]
            assert (await app.node.stats())["services"]["s"]["breaker"] == "closed"

    async def test_a_service_that_is_enabled_again_is_called_at_once(self, stage):
        app, callee = calling(stage, BROKEN)
        config = {"endpoint": URL, "breaker": {"failures": 1, "pause": 3600}, "backoff": 600}
        async with app:
            await app.put_service("s", config)
            await app.submit("s")
            await stage.settle()
            await app.submit("s", "waits")
            callee.answer = OK
            await stage.advance(5)
            await app.put_service("s", config, enabled=False)
            await stage.advance(5)
            assert len(callee.calls) == 1
            await app.put_service("s", config, enabled=True)
            await stage.advance(1)
            assert [task.payload for _, _, task in callee.calls] == [None, "waits"]

    async def test_a_service_with_a_new_endpoint_is_called_at_once(self, stage):
        app, callee = calling(stage, BROKEN)
        config = {"breaker": {"failures": 1, "pause": 3600}, "backoff": 600}
        async with app:
            await app.put_service("s", config, endpoint=URL)
            await app.submit("s")
            await stage.settle()
            await app.submit("s")
            callee.answer = OK
            await stage.advance(5)
            assert len(callee.calls) == 1
            await app.put_service("s", config, endpoint=f"{URL}new")
            await stage.settle()
            assert len(callee.calls) == 2

    async def test_a_change_of_a_service_keeps_the_count_of_its_running_calls(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL, concurrency=2)
            await app.submit_many([{"service": "s"}] * 6)
            await stage.settle()
            await app.put_service("s", endpoint=URL, concurrency=3)
            await stage.settle()
            assert len(callee.calls) == 3
            await app.put_service("s", endpoint=URL, concurrency=1)
            held.give(OK, 2)
            await stage.settle()
            assert len(callee.calls) == 3
            held.give()
            await stage.settle()
            assert len(callee.calls) == 4
            while held.waiting:
                held.give()
                await stage.settle()
        assert len(callee.calls) == 6

    async def test_lateness_is_measured_from_the_due_time(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, rate=1)
            await app.submit_many([{"service": "s", "delay": 1}] * 3)
            await stage.advance(5)
            lateness = (await app.node.stats())["lateness"]
            assert lateness["count"] == 3
            assert lateness["sum"] == pytest.approx(0 + 1 + 2, abs=0.01)
            assert lateness["buckets"][-1] == [None, 3]


async def no_refresh():
    """Replace a read of the registry that would come too early."""


class TestGone:
    """A service that answers 410 Gone."""

    async def test_a_gone_service_is_disabled_everywhere_and_its_tasks_wait(self, stage):
        (app, callee), (other, _) = calling(stage, GONE), calling(stage, dispatch=False)
        async with app, other:
            await app.put_service("s", endpoint=URL, backoff=1)
            tasks = await app.submit_many([{"service": "s"}] * 3)
            await stage.advance(1)
            assert len(callee.calls) <= 3
            called = len(callee.calls)
            for one in (app, other):
                assert not (await one.get_service("s")).enabled
            await stage.jump(3600)
            await stage.advance(120)
            assert len(callee.calls) == called
            stored = [await app.get(task.id) for task in tasks]
            assert {(task.state, task.failures) for task in stored} == {(State.READY, 0)}
            lines, _ = await app.audit()
            assert [(line.action, line.actor, line.target) for line in lines] == [
                ("service.disable", "tickwheel", "s"), ("service.put", "local", "s"),
            ]  # fmt: skip
            callee.answer = OK
            await app.put_service("s", endpoint=URL)
            await stage.advance(1)
            assert [(await app.get(task.id)).state for task in tasks] == [State.FINISHED] * 3

    async def test_a_gone_service_keeps_its_secrets_and_headers(self, stage):
        app, _ = calling(stage, GONE, secret_key="k" * 16)
        async with app:
            put = await app.put_service(
                "s", endpoint=URL, secret=["whsec_AAAA", "whsec_BBBB"], headers={"a": "b"}, rate=5
            )
            await app.submit("s")
            await stage.advance(1)
            now = await app.get_service("s")
            assert now.gone_at_ms is not None
            changed = {"version": put.version + 1, "gone_at_ms": now.gone_at_ms}
            assert now == replace(put, enabled=False, **changed)

    async def test_a_service_that_changed_during_the_call_stays_enabled(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s")
            await stage.settle()
            await app.put_service("s", endpoint=f"{URL}new")
            callee.answer = OK
            held.give(GONE)
            await stage.advance(1)
            assert (await app.get_service("s")).enabled
            assert (await app.get(task.id)).state is State.FINISHED
        assert [service.endpoint for service in callee.services] == [URL, f"{URL}new"]

    async def test_a_service_that_another_process_just_changed_stays_enabled(self, stage):
        held = Held()
        (app, callee), (other, _) = calling(stage, held), calling(stage, dispatch=False)
        async with app, other:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s")
            await stage.settle()
            directory = app.node.directory
            refresh, directory.refresh = directory.refresh, no_refresh
            put = await other.put_service("s", endpoint=f"{URL}new")
            callee.answer = OK
            held.give(GONE)
            await stage.settle()
            assert not app.node.services["s"].enabled, "it has yet to hear of the change"
            directory.refresh = refresh
            await stage.advance(3)
            assert await app.get_service("s") == put
            assert (await app.get_service("s")).enabled
            assert (await app.get(task.id)).state is State.FINISHED

    async def test_a_gone_service_is_stored_when_the_store_is_back(self, stage):
        app, callee = calling(stage, GONE)
        async with app:
            await app.put_service("s", endpoint=URL)
            registry = app.node.store.registry
            registry.put_service = away(registry.put_service, 1)
            await app.submit("s")
            await stage.advance(1)
            assert callee.calls
            assert not app.node.directory._gone
            await app.node.directory.refresh()
            await stage.settle()
            assert not (await app.get_service("s")).enabled
            assert [row.name for row in await registry.services()] == ["s"]
            assert (await app.get_service("s")).version == 2

    async def test_a_gone_service_is_stored_although_the_scheduler_stops(self, stage):
        held = Held()
        app, _ = calling(stage, held, grace=5)
        await app.start()
        await app.put_service("s", endpoint=URL)
        await app.submit("s")
        await stage.settle()
        stopping = asyncio.ensure_future(app.stop())
        await asyncio.sleep(0)
        held.give(GONE)
        await stopping
        again, _ = calling(stage)
        async with again:
            assert not (await again.get_service("s")).enabled
