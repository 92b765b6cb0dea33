"""The directory: services and tokens as the registry has them, on every node, within a step."""

import json
import logging

import pytest

from durable.callee import OK, REFUSED, URL, Callee, Held, calling
from durable.stage import START_MS, StagedStore, away
from tickwheel.durable import State
from tickwheel.durable.directory.configuration import sealed_config, service_from_config
from tickwheel.durable.directory.directory import Directory
from tickwheel.durable.directory.vault import Vault
from tickwheel.durable.registry import Audit, Token
from tickwheel.values.service import Service

pytestmark = pytest.mark.asyncio

KEY, OTHER_KEY = "a key of 16 or more", "another key of 16 or more"
AUDIT = Audit(START_MS, "test", "", "service.put", "s")
GOOD = json.loads(
    sealed_config(
        service_from_config("s", {"protocol": "http", "endpoint": URL}, None), lambda text, _: text
    )
)


async def put(app, name, config):
    """Store a row as it is, past every check."""
    registry = app.node.store.registry
    return await registry.put_service(name, config, AUDIT._replace(target=name))


async def remove(app, name):
    """Delete a service as no verb would: its tasks stay."""
    await app.node.store._write(
        0, lambda connection: connection.run("DELETE FROM service WHERE name = ?", (name,))
    )
    await put(app, "another", json.dumps(GOOD))  # the registry has changed


def not_from_here(service):
    raise ValueError("not from here")


class TestChanges:
    async def test_a_service_put_on_one_node_is_live_on_another_within_a_step(self, stage):
        (app, callee), (other, _) = calling(stage), calling(stage, dispatch=False)
        async with app, other:
            await stage.settle()
            await other.put_service("s", endpoint=URL, max_attempts=9)
            task = await other.submit("s")
            assert task.max_attempts == 9
            await stage.advance(1)
            assert app.node.services["s"].endpoint == URL
            assert (await app.get(task.id)).state is State.FINISHED
        assert callee.times[0] <= 1.0

    async def test_a_change_of_a_service_applies_to_the_next_call(self, stage):
        (app, callee), (other, _) = calling(stage), calling(stage, dispatch=False)
        async with app, other:
            await other.put_service("s", endpoint=URL)
            await stage.advance(1)
            await app.submit("s")
            await stage.settle()
            await other.put_service("s", endpoint=f"{URL}new", secret="whsec_BBBB")
            await stage.advance(1)
            await app.submit("s")
            await stage.settle()
        assert [service.endpoint for service in callee.services] == [URL, f"{URL}new"]
        assert callee.services[1].secrets == ("whsec_BBBB",)

    async def test_a_call_under_way_ends_with_the_configuration_it_started_with(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL, backoff=5)
            await app.submit("s")
            await stage.settle()
            await app.put_service("s", endpoint=URL, backoff=50, feedback_timeout=9)
            callee.answer = OK
            held.give(REFUSED)
            await stage.advance(60)
        assert callee.times == [0.0, 5.0]

    async def test_a_service_disabled_elsewhere_holds_its_tasks(self, stage):
        (app, callee), (other, _) = calling(stage), calling(stage, dispatch=False)
        async with app, other:
            await other.put_service("s", endpoint=URL, enabled=False)
            task = await other.submit("s", delay=1)
            await stage.advance(100)
            assert callee.calls == []
            assert (await app.get(task.id)).state is State.READY
            await other.put_service("s", endpoint=URL)
            await stage.advance(1)
            assert (await app.get(task.id)).state is State.FINISHED

    async def test_a_service_deleted_elsewhere_is_gone_here(self, stage):
        (app, _), (other, _) = calling(stage), calling(stage, dispatch=False)
        async with app, other:
            await app.put_service("s", endpoint=URL)
            await other.delete_service("s")
            await stage.advance(1)
            assert "s" not in app.node.services

    async def test_the_tasks_of_a_gone_service_wait_until_it_is_put_again(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            tasks = [await app.submit("s", delay=delay) for delay in (2, 5, 500)]
            await remove(app, "s")
            await stage.advance(1)
            assert "s" not in app.node.services
            await stage.advance(60)
            assert callee.calls == []
            assert [(await app.get(task.id)).state for task in tasks] == [
                State.READY, State.READY, State.DELAY,
            ]  # fmt: skip
            await app.put_service("s", endpoint=URL)
            await stage.advance(1)
            assert len(callee.calls) == 2
            await stage.advance(500)
            assert len(callee.calls) == 3

    async def test_stored_services_exist_after_a_restart(self, stage):
        app, _ = calling(stage)
        async with app:
            put = await app.put_service("s", endpoint=URL, rate=3, secret="whsec_AAAA")
            task = await app.submit("s", delay=60)
        second, callee = calling(stage)
        async with second:
            assert await second.get_service("s") == put
            await stage.advance(60)
            assert (await second.get(task.id)).state is State.FINISHED
        assert callee.services[0].secrets == ("whsec_AAAA",)

    async def test_without_a_change_nothing_is_read(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            await stage.settle()
            registry, reads = app.node.store.registry, []
            read = registry.services

            async def counted():
                reads.append(1)
                return await read()

            registry.services = counted
            before = app.node.services["s"]
            await stage.advance(30)
            assert reads == []
            await put(app, "other", json.dumps(GOOD))
            await stage.advance(1)
            assert reads == [1]
            assert app.node.services["s"] is before, "what has not changed stays the same object"

    async def test_an_unavailable_store_leaves_the_known_services(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            await stage.settle()
            registry = app.node.store.registry
            registry.version = away(registry.version, 3)
            await app.submit("s", delay=1)
            await stage.advance(2)
            assert callee.times == [1.0]
            await put(app, "other", json.dumps(GOOD))
            await stage.advance(3)
            assert "other" in app.node.services

    async def test_a_read_that_fails_halfway_is_repeated(self, stage):
        app, _ = calling(stage)
        async with app:
            await stage.settle()
            registry = app.node.store.registry
            registry.tokens = away(registry.tokens, 1)
            await put(app, "s", json.dumps(GOOD))
            await stage.advance(3)
            assert "s" in app.node.services

    async def test_stopping_keeps_only_the_task_functions(self, stage):
        app, _ = calling(stage)

        @app.task
        async def mine():
            pass

        async with app:
            await app.put_service("s", endpoint=URL)
            assert set(app.node.services) == {"mine", "s"}
        assert set(app._services) == {"mine"}


class TestUnusable:
    @pytest.mark.parametrize(
        "config",
        [
            "", "{", "null", "5", '"text"', "[]", "{}",
            json.dumps({**GOOD, "timeout": -1}),
            json.dumps({**GOOD, "timeout": "1"}),
            json.dumps({**GOOD, "backoff": None}),
            json.dumps({**GOOD, "breaker": {"failures": 0}}),
            json.dumps({**GOOD, "breaker": 5}),
            json.dumps({**GOOD, "secret": None}),
            json.dumps({**GOOD, "secret": [5]}),
            json.dumps({**GOOD, "secret": ["sealed:00000000:AAAA"]}),
            json.dumps({**GOOD, "headers": ["a"]}),
            json.dumps({**GOOD, "headers": {"a": "sealed:00000000:AAAA"}}),
            json.dumps({**GOOD, "headers": {"a": None}}),
            json.dumps({**GOOD, "protocol": "carrier pigeon"}),
            json.dumps({**GOOD, "protocol": None}),
        ],
    )  # fmt: skip
    async def test_an_unreadable_row_does_not_affect_the_others(self, stage, config):
        stage.expects_errors = True
        app, callee = calling(stage)
        async with app:
            await app.put_service("good", endpoint=URL)
            await app.put_service("bad", endpoint=URL)
            waits = await app.submit("bad", delay=5)
            await put(app, "bad", config)
            await put(app, "last", json.dumps(GOOD))
            await app.submit("good", delay=10)
            await stage.advance(20)
            assert callee.times == [10.0]
            assert (await app.get(waits.id)).state is State.READY
            assert "bad" in app.node.directory.unusable
            assert "bad" in app.node.loader.unusable()
            assert {"good", "last"} <= set(app.node.services)
            failed = [one for one in stage.logged if one.getMessage().startswith("step ")]
            assert not failed, "no step has failed"

    async def test_a_service_with_a_refused_target_holds_its_tasks_without_an_attempt(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, max_attempts=1, headers={"a": "b"})
            task = await app.submit("s", delay=1)
        stage.expects_errors = True
        strict, callee = calling(stage)
        callee.check = not_from_here
        async with strict:
            later = await strict.submit("s", delay=2)
            await stage.advance(100)
            assert callee.calls == []
            for one in (task, later):
                found = await strict.get(one.id)
                assert (found.state, found.attempt, found.failures) == (State.READY, 0, 0)
            service = await strict.get_service("s")
            assert strict.node.directory.problem(service) == "not from here"
            said = [one for one in stage.logged if "not from here" in one.getMessage()]
            assert [record.levelno for record in said] == [logging.ERROR]
        mended, callee = calling(stage)
        async with mended:
            await stage.advance(1)
            assert len(callee.calls) == 2

    async def test_a_put_can_keep_the_secrets_of_an_unusable_service(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_hush", headers={"a": "b"})
        stage.expects_errors = True
        strict, callee = calling(stage)
        callee.check, check = not_from_here, callee.check
        async with strict:
            callee.check = check
            await strict.put_service(
                "s", endpoint=f"{URL}new", secret="********", headers={"a": "********"}
            )
            service = await strict.get_service("s")
            assert (service.secrets, service.headers) == (("whsec_hush",), (("a", "b"),))
            assert strict.node.directory.problem(service) is None

    async def test_an_unusable_service_is_logged_once_and_repaired_by_a_put(self, stage):
        stage.expects_errors = True
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s", delay=1)
            await put(app, "s", "{}")
            for number in range(3):
                await put(app, f"other {number}", json.dumps(GOOD))
                await stage.advance(2)
            errors = [record for record in stage.logged if record.levelno >= logging.ERROR]
            assert len(errors) == 1
            assert "'s'" in errors[0].getMessage()
            await app.put_service("s", endpoint=URL)
            await stage.advance(1)
            assert app.node.directory.unusable == {}
            assert (await app.get(task.id)).state is State.FINISHED

    async def test_a_task_function_takes_precedence_over_a_stored_service(self, stage):
        stage.expects_errors = True
        app, callee = calling(stage)

        @app.task
        async def s(payload=None):
            stage.called("function")

        async with app:
            await put(app, "s", json.dumps(GOOD))
            await stage.advance(1)
            await s.submit()
            await stage.settle()
            assert "task function" in app.node.directory.unusable["s"][1]
        assert callee.calls == []
        assert stage.calls == [(1.0, "function")]


class TestSecrets:
    """Sealed at rest, and what another key means for the services."""

    def bytes_of(self, stage):
        files = [path for path in stage.path.parent.iterdir() if path.is_file()]
        return b"".join(path.read_bytes() for path in files)

    async def test_no_file_has_a_secret_or_a_header_in_plain(self, stage):
        app, callee = calling(stage, secret_key=KEY)
        async with app:
            await app.put_service(
                "s", endpoint=URL, secret=["whsec_hush", "whsec_older"], headers={"a": "Bearer b0"}
            )
            await app.put_service("s", endpoint=URL, secret="whsec_third")
            await app.submit("s")
            await stage.settle()
            files = self.bytes_of(stage)
            assert URL.encode() in files, "this is where it would be"
            for secret in (
                b"whsec_hush",
                b"whsec_older",
                b"Bearer b0",
                b"whsec_third",
                KEY.encode(),
            ):
                assert secret not in files
        assert callee.services[0].secrets == ("whsec_third",)
        for secret in (b"whsec_hush", b"whsec_older", b"Bearer b0", b"whsec_third"):
            assert secret not in self.bytes_of(stage)
        said = " ".join(record.getMessage() for record in stage.logged)
        assert "whsec" not in said

    async def test_without_a_key_a_warning_says_that_secrets_are_in_plain_text(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_hush")
            assert b"whsec_hush" in self.bytes_of(stage)
        warnings = [record for record in stage.logged if record.levelno == logging.WARNING]
        assert ["TICKWHEEL_SECRET_KEY" in record.getMessage() for record in warnings] == [True]

    async def test_keys_are_rotated_by_having_both_for_a_time(self, stage):
        app, _ = calling(stage, secret_key=KEY)
        async with app:
            for name in ("one", "two"):
                await app.put_service(name, endpoint=URL, secret="whsec_hush")
        both, _ = calling(stage, secret_key=f"{OTHER_KEY},{KEY}")
        async with both:
            assert (await both.get_service("one")).secrets == ("whsec_hush",)
            await both.put_service("one", endpoint=URL, secret="********")  # sealed again
        stage.expects_errors = True
        new, _ = calling(stage, secret_key=OTHER_KEY)
        async with new:
            assert (await new.get_service("one")).secrets == ("whsec_hush",)
            assert set(new.node.directory.unusable) == {"two"}

    async def test_with_the_wrong_key_its_tasks_wait_and_others_are_called(self, stage):
        app, _ = calling(stage, secret_key=KEY)
        async with app:
            await app.put_service("sealed", endpoint=URL, secret="whsec_hush")
            await app.put_service("open", endpoint=URL)
            task = await app.submit("sealed", delay=10)
            await app.submit("open", delay=10)
        stage.expects_errors = True
        wrong, callee = calling(stage, secret_key=OTHER_KEY)
        async with wrong:
            await stage.advance(100)
            assert [name for _, name, _ in callee.calls] == ["open"]
            assert (await wrong.get(task.id)).attempt == 0
            later = await wrong.submit("sealed", delay=1)
            await stage.advance(100)
            assert (await wrong.get(later.id)).state is State.READY
            assert len(callee.calls) == 1
            _, why = wrong.node.directory.unusable["sealed"]
            assert "TICKWHEEL_SECRET_KEY" in why
            assert "whsec_hush" not in repr(wrong.node.directory.unusable)
        right, callee = calling(stage, secret_key=KEY)
        async with right:
            await stage.advance(1)
            assert (await right.get(task.id)).state is State.FINISHED
            assert (await right.get(later.id)).state is State.FINISHED
        assert callee.services[0].secrets == ("whsec_hush",)

    async def test_a_row_copied_to_another_service_gives_its_secrets_to_nobody(self, stage):
        app, callee = calling(stage, secret_key=KEY)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_hush", headers={"a": "b"})
            (row,) = await app.node.store.registry.services()
            stage.expects_errors = True
            evil = row.config.replace(URL, "https://evil.example/")
            await put(app, "copy", row.config)
            await put(app, "acme/s", row.config)
            await put(app, "s", evil)
            await app.node.directory.refresh()
            for name in ("copy", "acme/s", "s"):
                _, why = app.node.directory.unusable[name]
                assert "another service, header or origin" in why
                await app.submit(name)
            await stage.advance(10)
            assert callee.calls == []
            for config in ({"secret": "********"}, {}):
                with pytest.raises(ValueError, match="cannot be kept"):
                    await app.put_service("copy", endpoint=URL, **config)

    async def test_a_put_does_not_drop_the_secrets_of_an_unreadable_service(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_hush", headers={"a": "b"})
            stage.expects_errors = True
            await put(app, "s", "{")
            for config in ({}, {"secret": None}, {"headers": None}):
                with pytest.raises(ValueError, match="cannot be kept"):
                    await app.put_service("s", endpoint=URL, **config)
            await app.put_service("s", endpoint=URL, secret=None, headers=None)

    async def test_a_placeholder_does_not_drop_a_secret_that_cannot_be_opened(self, stage):
        app, _ = calling(stage, secret_key=KEY)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_hush")
        stage.expects_errors = True
        wrong, _ = calling(stage, secret_key=OTHER_KEY)
        async with wrong:
            for config in ({"secret": "********"}, {}):
                with pytest.raises(ValueError, match="TICKWHEEL_SECRET_KEY"):
                    await wrong.put_service("s", endpoint=f"{URL}new", **config)
        right, _ = calling(stage, secret_key=KEY)
        async with right:
            service = await right.get_service("s")
            assert (service.endpoint, service.secrets) == (URL, ("whsec_hush",))


class TestAlone:
    """The directory by itself, on a store."""

    async def test_it_has_the_tokens(self, stage):
        store = StagedStore(stage.path, shards=4, clock=stage.wall)
        await store.open()
        directory = Directory(store.registry, {}, Vault(), {"http": Callee(stage)}, store.now_ms)
        token = Token("id", "name", "digest", "", ("read",), None, START_MS)
        await directory.refresh()
        assert directory.tokens == {}
        await store.registry.put_token(token, AUDIT)
        assert await directory.step() == 1.0
        assert directory.tokens == {"id": token}
        await store.registry.delete_token("id", AUDIT)
        await directory.refresh()
        assert directory.tokens == {}
        await store.close()

    async def test_it_notifies_of_changes_only(self, stage):
        store = StagedStore(stage.path, shards=4, clock=stage.wall)
        await store.open()
        services = {"mine": Service("mine")}
        channels, notified = {"http": Callee(stage)}, []
        directory = Directory(store.registry, services, Vault(), channels, store.now_ms)
        await directory.refresh()
        directory.on_change = lambda deleted: notified.append((sorted(services), deleted))
        await directory.refresh()
        assert notified == []
        await store.registry.put_service("s", json.dumps(GOOD), AUDIT)
        await directory.refresh()
        await directory.refresh()
        assert notified == [(["mine", "s"], set())]
        assert directory.updated_at_ms == {"s": START_MS}
        await store.registry.delete_service("s", AUDIT)
        await directory.refresh()
        assert notified[1:] == [(["mine"], {"s"})]
        directory.close()
        assert sorted(services) == ["mine"]
        await store.close()
