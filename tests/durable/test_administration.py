"""Administration: services made, changed and deleted, and the log of who did that."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from durable.callee import GONE, OK, URL, Held, calling
from durable.stage import DAY, SHARDS, START_MS
from tickwheel.durable import State
from tickwheel.durable.coordinator import ShardRow
from tickwheel.durable.directory.configuration import public_config
from tickwheel.errors import NotStarted, ServiceInUse, UnknownSchedule, UnknownService
from tickwheel.values.service import PLACEHOLDER, Breaker, Service

pytestmark = pytest.mark.asyncio


class TestPut:
    async def test_a_service_is_configured_by_keywords_or_a_mapping(self, stage):
        app, _ = calling(stage)
        async with app:
            one = await app.put_service("one", endpoint=URL, rate=5)
            two = await app.put_service("two", {"endpoint": URL, "rate": 5})
            both = await app.put_service("both", {"endpoint": URL, "rate": 4}, rate=5)
            assert (one.endpoint, one.rate, one.protocol) == (URL, 5, "http")
            assert (two.rate, both.rate) == (5, 5)
            assert one.breaker == Breaker()
            assert await app.get_service("one") == one

    async def test_its_version_rises_with_each_change_and_is_never_reused(self, stage):
        app, _ = calling(stage)
        async with app:
            versions = [(await app.put_service("s", endpoint=URL)).version for _ in range(3)]
            await app.delete_service("s")
            versions.append((await app.put_service("s", endpoint=URL)).version)
            assert versions == sorted(set(versions))
            assert versions[0] >= 1

    async def test_a_put_replaces_everything_but_secrets(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service(
                "s", endpoint=URL, rate=5, timeout=3, secret="whsec_AAAA", headers={"a": "b"}
            )
            now = await app.put_service("s", endpoint=URL)
            bare = Service(
                "s", protocol="http", endpoint=URL, timeout=30.0, breaker=Breaker(),
                version=now.version,
            )  # fmt: skip
            assert now == replace(bare, secrets=("whsec_AAAA",), headers=(("a", "b"),))
            now = await app.put_service("s", endpoint=URL, secret=None, headers=None)
            assert now == replace(bare, version=now.version)

    async def test_calls_to_another_origin_have_no_stored_secrets(self, stage):
        app, callee = calling(stage)
        async with app:
            kept = await app.put_service("s", endpoint=URL, secret="whsec_AA", headers={"a": "b"})
            for config in ({}, {"secret": None}, {"headers": {"a": PLACEHOLDER}}):
                with pytest.raises(ValueError, match="no other origin"):
                    await app.put_service("s", endpoint="https://evil.example/", **config)
            assert await app.get_service("s") == kept
            await app.put_service(
                "s", endpoint="https://new.example/", secret="whsec_BB", headers={}
            )
            await app.submit("s")
            await stage.settle()
            assert [(one.secrets, one.headers) for one in callee.services] == [(("whsec_BB",), ())]

    @pytest.mark.parametrize("known", [False, True])
    async def test_a_secret_from_a_concurrent_put_is_not_lost(self, stage, known):
        """A put that names no secret has read the service before the other one's put."""
        (app, _), (other, _) = calling(stage), calling(stage, dispatch=False)
        async with app, other:
            if known:
                await app.put_service("s", endpoint=URL)
            registry = app.node.store.registry
            put_service, given = registry.put_service, []

            async def late(*args, **options):
                if not given:
                    given.append(await other.put_service("s", endpoint=URL, secret="whsec_AA"))
                return await put_service(*args, **options)

            registry.put_service = late
            put = await app.put_service("s", endpoint=URL, rate=5)
            assert (put.rate, put.secrets) == (5, ("whsec_AA",))
            assert await app.get_service("s") == put

    async def test_the_placeholder_keeps_secrets_and_headers(self, stage):
        app, _ = calling(stage, secret_key="a key of 16 or more")
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_old", headers={"a": "b"})
            kept = await app.put_service(
                "s", endpoint=URL, secret=["whsec_new", PLACEHOLDER], headers={"a": PLACEHOLDER}
            )
            assert (kept.secrets, kept.headers) == (("whsec_new", "whsec_old"), (("a", "b"),))
        second, _ = calling(stage, secret_key="a key of 16 or more")
        async with second:
            assert await second.get_service("s") == kept

    async def test_a_placeholder_without_a_stored_value_is_refused(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            for wrong in ({"secret": PLACEHOLDER}, {"headers": {"a": PLACEHOLDER}}):
                with pytest.raises(ValueError):
                    await app.put_service("s", endpoint=URL, **wrong)
                with pytest.raises(ValueError):
                    await app.put_service("new", endpoint=URL, **wrong)
            assert [service.name for service in await app.services()] == ["s"]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"endpoint": "ftp://a.example/"}, {"endpoint": ""}, {"protocol": "smtp"},
            {"protocol": "local"}, {"timeout": 0}, {"colour": "red"}, {"max_attempts": 0},
            {"rate": 0}, {"breaker": {"failures": 0}},
        ],
        ids=str,
    )  # fmt: skip
    async def test_an_invalid_service_is_refused_and_not_stored(self, stage, wrong):
        app, _ = calling(stage)
        async with app:
            before = await app.put_service("s", endpoint=URL)
            with pytest.raises((ValueError, TypeError)):
                await app.put_service("s", **{"endpoint": URL, **wrong})
            assert await app.get_service("s") == before
            lines, _ = await app.audit()
            assert len(lines) == 1

    @pytest.mark.parametrize("name", ["", " ", "x" * 201, "a\nb", None, 5])
    async def test_an_invalid_name_is_refused(self, stage, name):
        app, _ = calling(stage)
        async with app:
            with pytest.raises((ValueError, TypeError)):
                await app.put_service(name, endpoint=URL)

    async def test_a_service_cannot_replace_a_task_function(self, stage):
        app, _ = calling(stage)

        @app.task
        async def mine():
            pass

        async with app:
            with pytest.raises(ValueError, match="task function"):
                await app.put_service("mine", endpoint=URL)

    async def test_without_the_packages_a_put_is_refused_and_names_the_protocols(self, stage):
        app = stage.app()
        app._make_channels = lambda _: {}
        async with app:
            with pytest.raises(ValueError, match="protocol must be one of"):
                await app.put_service("s", endpoint=URL)

    async def test_a_node_pauses_and_resumes_what_only_others_can_call(self, stage):
        """This one has no channel for it."""
        stage.expects_errors = True
        app, _ = calling(stage)
        async with app:
            before = await app.put_service("s", endpoint=URL, secret="whsec_AAAA", rate=5)
        other = stage.app(dispatch=False)
        other._make_channels = lambda _: {}
        async with other:
            config = public_config(before)
            for enabled in (False, True):
                now = await other.put_service("s", config, enabled=enabled)
                assert now == replace(before, enabled=enabled, version=now.version)
            for more in ({"rate": 6}, {"enabled": False, "endpoint": f"{URL}new"}):
                with pytest.raises(ValueError, match="protocol must be one of"):
                    await other.put_service("s", config | more)

    async def test_a_gone_service_is_resumed_where_it_cannot_be_called(self, stage):
        stage.expects_errors = True
        app, _ = calling(stage, GONE)
        async with app:
            before = await app.put_service("s", endpoint=URL)
            await app.submit("s")
            await stage.advance(2)
            assert (await app.get_service("s")).gone_at_ms is not None
        other = stage.app(dispatch=False)
        other._make_channels = lambda _: {}
        async with other:
            now = await other.put_service("s", public_config(before))
            assert (now.enabled, now.gone_at_ms) == (True, None)

    async def test_concurrent_puts_are_serialized(self, stage):
        app, _ = calling(stage)
        async with app:
            made = await asyncio.gather(
                *(app.put_service("s", endpoint=f"{URL}{number}") for number in range(5))
            )
            assert sorted(service.version for service in made) == [1, 2, 3, 4, 5]
            last = max(made, key=lambda service: service.version)
            assert await app.get_service("s") == last

    async def test_a_put_needs_a_running_scheduler(self, stage):
        app, _ = calling(stage)
        with pytest.raises(NotStarted):
            await app.put_service("s", endpoint=URL)


class TestDelete:
    async def test_a_service_without_tasks_is_deleted(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s")
            await stage.settle()
            await app.delete_service("s")
            with pytest.raises(UnknownService):
                await app.get_service("s")
            with pytest.raises(UnknownService):
                await app.submit("s")
            assert (await app.get(task.id)).state is State.FINISHED, "its tasks are kept"

    @pytest.mark.parametrize("running", [True, False])
    async def test_a_service_with_live_tasks_is_not_deleted(self, stage, running):
        held = Held()
        app, _ = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s", delay=0 if running else 60)
            await stage.settle()
            with pytest.raises(ServiceInUse) as told:
                await app.delete_service("s")
            assert told.value.code == "service_in_use"
            assert (await app.get_service("s")).enabled
            if running:
                held.give(OK)
            else:
                await app.cancel(task.id)
            await stage.settle()
            await app.delete_service("s")

    async def test_a_deleted_service_leaves_nothing_in_memory(self, stage):
        (app, callee), (other, _) = calling(stage), calling(stage, dispatch=False)
        async with app, other:
            for name in ("waits", "pending"):
                await app.put_service(name, endpoint=URL)
            await app.put_service("waits", endpoint=URL, enabled=False)
            tasks = [await app.submit("waits"), await app.submit("pending", delay=20)]
            await stage.advance(1)
            for task in tasks:  # its node hears of a cancel elsewhere only from a claim
                await other.cancel(task.id)
            assert (await app.stats())["held"] == 2
            for name in ("waits", "pending"):
                await other.delete_service(name)
            await stage.advance(1)
            assert (await app.stats())["held"] == 1
            await stage.advance(20)
            assert (await app.stats())["held"] == 0
            assert app.node.horizon._queues == {}
        assert callee.calls == []

    async def test_its_channel_forgets_a_deleted_service_that_was_only_tried(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            await app.try_call("s", b"{}")
            await app.delete_service("s")
        assert callee.forgotten == ["s"]

    async def test_deleting_an_unknown_service_is_an_error(self, stage):
        app, _ = calling(stage)
        async with app:
            with pytest.raises(UnknownService):
                await app.delete_service("s")

    async def test_a_task_function_cannot_be_deleted(self, stage):
        app, _ = calling(stage)

        @app.task
        async def mine():
            pass

        async with app:
            with pytest.raises(UnknownService):
                await app.delete_service("mine")
            assert (await app.get_service("mine")).protocol == "local"


class TestLooking:
    async def test_services_are_listed_by_name_functions_included(self, stage):
        (app, _), (other, _) = calling(stage), calling(stage, dispatch=False)

        @app.task
        async def middle():
            pass

        async with app, other:
            await other.put_service("z", endpoint=URL)
            await other.put_service("a", endpoint=URL)
            assert [service.name for service in await app.services()] == ["a", "middle", "z"]
            assert [service.name for service in await other.services()] == ["a", "z"]

    async def test_a_service_just_put_elsewhere_is_found(self, stage):
        (app, _), (other, _) = calling(stage), calling(stage, dispatch=False)
        async with app, other:
            put = await other.put_service("s", endpoint=URL)
            assert await app.get_service("s") == put
            with pytest.raises(UnknownService):
                await app.get_service("t")
            assert await app.known_service("t") is None

    async def test_nodes_and_shards_are_listed(self, stage):
        app, _ = calling(stage, node="n1")
        async with app:
            await stage.settle()
            [node] = await app.nodes()
            assert (node.name, node.shards) == ("n1", SHARDS)
            assert await app.shards() == [ShardRow(shard, "n1", 1) for shard in range(SHARDS)]

    async def test_stats_show_each_service(self, stage):
        held = Held()
        app, _ = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL, concurrency=2)
            await app.put_service("off", endpoint=URL, enabled=False)
            await app.submit_many([{"service": "s"}] * 5)
            await stage.settle()
            stats = await app.stats()
            assert stats["nodes"] == 1
            one = stats["services"]["s"]
            assert (one["running"], one["waiting"], one["limit"], one["breaker"]) == (
                2, 3, 2, "closed",
            )  # fmt: skip
            assert (one["enabled"], stats["services"]["off"]["enabled"]) == (True, False)
            while held.waiting:
                held.give()
                await stage.settle()


class TestAudit:
    async def test_every_change_has_an_audit_line_newest_first(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, actor="tw_1 (ci)", request="r-1")
            await stage.advance(5)
            await app.put_service("acme/s", endpoint=URL)
            await app.delete_service("s", actor="tw_2 (ops)", request="r-2")
            lines, cursor = await app.audit()
            assert cursor is None
            assert [line[:6] for line in lines] == [
                (START_MS + 5_000, "tw_2 (ops)", "", "service.delete", "s", "r-2"),
                (START_MS + 5_000, "local", "acme", "service.put", "acme/s", ""),
                (START_MS, "tw_1 (ci)", "", "service.put", "s", "r-1"),
            ]

    async def test_a_refused_change_has_no_audit_line(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            await app.submit("s", delay=60)
            with pytest.raises(ServiceInUse):
                await app.delete_service("s")
            with pytest.raises(UnknownService):
                await app.delete_service("t")
            assert len((await app.audit())[0]) == 1

    async def test_the_audit_log_is_read_in_pages_and_by_namespace(self, stage):
        app, _ = calling(stage)
        async with app:
            for number in range(7):
                await app.put_service(f"acme/{number}" if number % 2 else f"{number}", endpoint=URL)
            seen, cursor = [], None
            while True:
                lines, cursor = await app.audit(cursor=cursor, limit=3)
                seen += [line.target for line in lines]
                if cursor is None:
                    break
            assert seen == ["6", "acme/5", "4", "acme/3", "2", "acme/1", "0"]
            lines, _ = await app.audit(namespace="acme")
            assert [line.target for line in lines] == ["acme/5", "acme/3", "acme/1"]
            assert len((await app.audit(namespace=""))[0]) == 4

    async def test_the_audit_line_of_a_service_says_what_changed(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_hush", headers={"a": "Bearer b"})
            await app.put_service("s", endpoint=f"{URL}new", rate=5, backoff={"first": 3})
            await app.put_service("s", endpoint=f"{URL}new", rate=5, backoff={"first": 3})
            await app.put_service(
                "s", endpoint="https://b.example/", secret="whsec_b", headers=None, rate=5,
                backoff={"first": 3},
            )  # fmt: skip
            await app.put_service("s", endpoint="https://b.example/", secret=None, enabled=False)
            await app.delete_service("s")
            deleted, off, moved, same, changed, made = (await app.audit())[0]
            assert made.detail.startswith("secret: set; headers.a: set; protocol: none ->")
            assert f'; endpoint: none -> "{URL}"; ' in made.detail
            assert changed.detail == (
                f'backoff.first: 1.0 -> 3; endpoint: "{URL}" -> "{URL}new"; rate: none -> 5'
            )
            assert same.detail == "no change"
            assert moved.detail == (
                f'secret: changed; headers.a: removed; endpoint: "{URL}new" -> "https://b.example/"'
            )
            assert off.detail == (
                "secret: removed; backoff.first: 3 -> 1.0; enabled: true -> false; rate: 5 -> none"
            )
            assert 'endpoint: "https://b.example/" -> none' in deleted.detail

    async def test_a_gone_service_has_an_audit_line_as_disabled(self, stage):
        app, _ = calling(stage, GONE)
        async with app:
            await app.put_service("s", endpoint=URL)
            await app.submit("s")
            await stage.advance(2)
            lines, _ = await app.audit()
            assert (lines[0].action, lines[0].actor) == ("service.disable", "tickwheel")
            assert lines[0].detail.startswith("enabled: true -> false; ")

    async def test_schedules_have_audit_lines(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            await app.put_schedule("acme/n", "s", ["hush"], cron="0 3 * * *")
            await app.put_schedule("acme/n", "s", ["hush"], cron="0 3 * * *")
            await app.store_schedule(
                "acme/n", "s", b'"hush"', interval=60, actor="tw_1 (ci)", request="r-1"
            )
            await app.delete_schedule("acme/n", actor="tw_2 (ops)", request="r-2")
            with pytest.raises(UnknownSchedule):
                await app.delete_schedule("acme/n")
            deleted, changed, made = (await app.audit(namespace="acme"))[0]
            assert made[:6] == (START_MS, "local", "acme", "schedule.put", "acme/n", "")
            assert changed[1:6] == ("tw_1 (ci)", "acme", "schedule.put", "acme/n", "r-1")
            assert deleted[1:6] == ("tw_2 (ops)", "acme", "schedule.delete", "acme/n", "r-2")
            assert changed.detail == (
                'payload: changed; cron: "0 3 * * *" -> none; interval_ms: none -> 60000'
            )
            assert "hush" not in str([deleted, changed, made])

    async def test_the_audit_log_is_kept_for_ever_by_default(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            await stage.jump(500 * DAY)
            await stage.hours(4)
            assert len((await app.audit())[0]) == 1
        app, _ = calling(stage, audit_retention=timedelta(days=100))
        async with app:
            await app.put_service("t", endpoint=URL)
            await stage.hours(4)
            assert [line.target for line in (await app.audit())[0]] == ["t"]

    async def test_other_actions_can_be_noted(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.note("schedule.put", "acme/nightly", actor="tw_1", detail="0 3 * * *")
            [line], _ = await app.audit()
            assert (line.action, line.target, line.namespace, line.actor, line.detail) == (
                "schedule.put", "acme/nightly", "acme", "tw_1", "0 3 * * *",
            )  # fmt: skip

    async def test_the_audit_log_has_no_secrets(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_hush", headers={"a": "Bearer b"})
            lines, _ = await app.audit()
            assert "hush" not in str(lines)
            assert "Bearer" not in str(lines)
