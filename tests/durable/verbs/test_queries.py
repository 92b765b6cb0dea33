"""Get, list, wait: the verbs show a task in its state, within its namespace."""

import asyncio
from datetime import timedelta

import pytest

from durable.callee import URL, calling
from durable.stage import DAY, HOUR, START_MS
from durable.verbs.cast import NOBODY, NOW, OTHERS, UNCLAIMED
from tickwheel.durable import State
from tickwheel.errors import UnknownTask

pytestmark = pytest.mark.asyncio


class TestLooking:
    async def test_get_returns_a_task_in_each_state(self, cast):
        async with cast.app as app:
            await cast.enter()
            shown = {state: await app.get(task.id) for state, task in cast.tasks.items()}
            assert shown["finished"].result == "finished"
            assert shown["failed"].error.endswith("ValueError: failed\n")
            assert [state for state, task in shown.items() if task.final] == [
                "finished", "failed", "cancelled",
            ]  # fmt: skip
            running = shown["running"]
            assert running.started_at_ms == START_MS
            assert running.lease_until_ms == START_MS + 30_000
            assert shown["delay"].payload == ["delay"]
            assert shown["delay"].created_at == NOW
            cast.goes_on.set()

    async def test_lists_are_newest_first(self, stage, cast):
        async with cast.app as app:
            ids = []
            for number in range(5):
                ids.append((await cast.note.submit(number, delay=HOUR)).id)
                await stage.advance(0.002)
            page = await app.list()
            assert [task.id for task in page.items] == ids[::-1]
            assert page.next_cursor is None

    @pytest.mark.parametrize("limit", [1, 3, 7, 20])
    async def test_cursors_lead_through_the_whole_list_once(self, cast, limit):
        async with cast.app as app:
            await cast.enter()
            await app.submit_many([cast.note.request(n, delay=HOUR) for n in range(14)])
            seen, cursor, pages = [], None, 0
            while True:
                page = await app.list(limit=limit, cursor=cursor)
                assert len(page.items) <= limit
                seen += [task.id for task in page.items]
                pages += 1
                if (cursor := page.next_cursor) is None:
                    break
            assert len(seen) == len(set(seen)) == 20
            assert seen == sorted(seen, reverse=True)
            assert pages <= 20 // limit + 2
            cast.goes_on.set()

    @pytest.mark.parametrize("state", UNCLAIMED + OTHERS)
    async def test_lists_filter_by_state(self, cast, state):
        async with cast.app as app:
            await cast.enter()
            for wanted in (state, State(state)):
                page = await app.list(state=wanted)
                assert [task.id for task in page.items] == [cast.id(state)]
                assert page.items[0].state == state
            cast.goes_on.set()

    async def test_lists_filter_by_service_key_and_due_time(self, cast):
        async with cast.app as app:
            await cast.enter()
            keyed = await cast.note.submit("k", delay=90, key="k")

            async def found(**which):
                return {task.id for task in (await app.list(**which)).items}

            assert await found(key="k") == {keyed.id}
            assert await found(key="k", service="wait") == set()
            assert await found(service=cast.wait) == {cast.id("running"), cast.id("ready")}
            assert await found(due_before=NOW + timedelta(seconds=60), state="delay") == {
                cast.id("delay")
            }
            finals = {cast.id(state) for state in ("finished", "failed", "cancelled")}
            assert await found(final=True) == finals
            assert await found(final=False, service="note") == {cast.id("delay"), keyed.id}
            assert {task.id for task in (await app.backlog()).items} == finals
            page = await app.backlog(state="failed")
            assert [task.id for task in page.items] == [cast.id("failed")]
            assert (await app.backlog(state="delay")).items == []
            cast.goes_on.set()

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"limit": 0}, ValueError),
            ({"limit": 1_001}, ValueError),
            ({"limit": "3"}, TypeError),
            ({"state": "sleeping"}, ValueError),
            ({"due_before": NOW.replace(tzinfo=None)}, ValueError),
            ({"cursor": 5}, TypeError),
        ],
    )
    async def test_invalid_filters_are_refused(self, cast, options, error):
        async with cast.app as app:
            with pytest.raises(error):
                await app.list(**options)

    async def test_stats_count_tasks_held_and_ended(self, cast):
        async with cast.app as app:
            await cast.enter()
            stats = await app.stats()
            assert stats["owned"] == 4
            assert (stats["held"], stats["waiting"], stats["running"]) == (2, 1, 1)
            assert stats["submitted"] == 6
            assert stats["sent"] == 3
            assert stats["ended"] == {"finish": 1, "fail": 1}
            assert stats["store"] == {"live": 3, "final": 3}
            assert stats["wheel"]
            cast.goes_on.set()


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, timedelta(0)])
class TestWaiting:
    async def test_wait_returns_a_final_task_even_with_a_short_timeout(self, stage, cast, timeout):
        async with cast.app as app:
            await cast.enter()
            for state in ("finished", "failed", "cancelled"):
                assert (await app.wait(cast.id(state), timeout=timeout)).state == state
            cast.goes_on.set()

    async def test_wait_reads_a_live_task_at_least_once(self, stage, cast, timeout):
        async with cast.app as app:
            await cast.enter()
            with pytest.raises(TimeoutError, match="has not ended"):
                await app.wait(cast.id("running"), timeout=timeout)
            cast.goes_on.set()


class TestOtherLoops:
    async def test_a_verb_on_another_loop_is_refused_before_anything_is_stored(self, cast):
        async with cast.app as app:
            verbs = [
                lambda: cast.note.submit("a", delay=DAY),
                lambda: app.submit("note", "a", delay=DAY),
                lambda: app.submit_many([cast.note.request("a", delay=DAY)]),
                lambda: app.cancel(NOBODY),
                lambda: app.get(NOBODY),
                lambda: app.list(),
                lambda: app.wait(NOBODY),
                lambda: app.put_schedule("s", cast.note, "a", interval=DAY),
            ]

            def elsewhere(verb):
                async def call():
                    await verb()

                with pytest.raises(RuntimeError, match=r"another event loop.*app\.run"):
                    asyncio.run(call())

            for verb in verbs:
                await asyncio.to_thread(elsewhere, verb)
            assert (await app.list()).items == []
            assert await app.schedules() == []
            assert (await cast.note.submit("b", delay=DAY)).state is State.DELAY


class TestNamespaces:
    """Tasks of services whose names have a namespace: each sees its own."""

    async def test_a_task_is_found_in_its_own_namespace_only(self, stage):
        app, _ = calling(stage)
        async with app:
            for name in ("s", "acme/s", "acme2/s"):
                await app.put_service(name, endpoint=URL)
            tasks = {name: await app.submit(name, delay=60) for name in ("s", "acme/s", "acme2/s")}
            assert (await app.get(tasks["acme/s"].id, namespace="acme")).service == "acme/s"
            assert (await app.get(tasks["s"].id, namespace="")).service == "s"
            for name, namespace in (("s", "acme"), ("acme/s", ""), ("acme2/s", "acme")):
                with pytest.raises(UnknownTask):
                    await app.get(tasks[name].id, namespace=namespace)

    async def test_lists_and_bulk_verbs_keep_to_the_namespace(self, stage):
        app, _ = calling(stage, dispatch=False)  # a replayed task is due at once
        async with app:
            names = ("s", "acme/s", "acme2/s")
            for name in names:
                await app.put_service(name, endpoint=URL)
                await app.submit_many([{"service": name, "delay": 60, "key": "k"}])
            for namespace, name in (("", "s"), ("acme", "acme/s"), ("acme2", "acme2/s")):
                page = await app.list(namespace=namespace)
                assert [task.service for task in page.items] == [name]
            assert len((await app.list()).items) == 3
            assert await app.cancel_where(key="k", namespace="acme") == 1
            assert [task.service for task in (await app.backlog(namespace="acme")).items] == [
                "acme/s"
            ]
            assert (await app.backlog(namespace="")).items == []
            assert await app.replay_where(state="cancelled", namespace="") == 0
            assert await app.replay_where(state="cancelled", namespace="acme") == 1
            assert sorted(task.service for task in (await app.list(final=False)).items) == sorted(
                names
            )
