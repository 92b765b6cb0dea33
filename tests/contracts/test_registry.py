"""The contract of a registry: services, tokens, the audit log, and what else is remembered."""

import asyncio

import pytest

from contracts.stores import (
    ALL,
    AUDIT,
    HOUR,
    ONE_DRIVER,
    ending,
    everything,
    fire,
    firing,
    ids_of,
    later,
    lease,
    now,
    repeated,
    request,
    run,
    schedule,
    stored,
    task,
)
from tickwheel.durable.registry import (
    Audit,
    NotedTimes,
    ServiceRow,
    Token,
)
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.errors import ServiceInUse, StoreUnavailable
from tickwheel.values.task import Task

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.parametrize("place", ONE_DRIVER, indirect=True),
]


ROUNDS = 20


@pytest.fixture
def registry(store):
    return store.registry


def audit(action="service.put", target="mail", *, at_ms=1_000, namespace="", **fields):
    """A line of the audit log."""
    return Audit(at_ms, "local", namespace, action, target, **fields)


def token(name="ci", **fields):
    given = {
        "id": f"id-{name}",
        "name": name,
        "digest": "d" * 64,
        "namespace": "*",
        "scopes": ("submit", "read"),
        "rate": None,
        "created_at_ms": 5,
    }
    return Token(**(given | fields))


async def put(registry, name="mail", config="{}", *, at_ms=1_000, version=None):
    return await registry.put_service(name, config, audit(at_ms=at_ms), version=version)


async def lines(registry, namespace=None, limit=100):
    """The whole audit log, newest first, page by page."""
    found, cursor = [], None
    while True:
        page, cursor = await registry.audit(namespace=namespace, cursor=cursor, limit=limit)
        found += page
        if cursor is None:
            return found
        assert len(page) == limit


class TestServices:
    async def test_there_are_none_at_first(self, registry):
        assert await registry.services() == []

    async def test_one_is_kept_as_it_was_given(self, registry):
        config = '{"endpoint": "http://größe.example/✓", "n": [1.0, null]}'
        row = await put(registry, config=config, at_ms=7_000)
        assert row == ServiceRow("mail", 1, config, 7_000)
        assert await registry.services() == [row]

    async def test_each_change_makes_its_version_one_higher(self, registry):
        versions = [(await put(registry, config=str(n))).version for n in range(3)]
        assert versions == [1, 2, 3]
        (row,) = await registry.services()
        assert (row.version, row.config) == (3, "2")

    async def test_they_are_in_order_of_their_names(self, registry):
        names = ["sms", "acme/mail", "Mail", "mail", "acme0"]
        for name in names:
            await put(registry, name)
        assert [row.name for row in await registry.services()] == sorted(names)

    async def test_with_a_version_only_while_that_is_the_stored_one(self, registry):
        await put(registry, config="1")
        assert await put(registry, config="no", version=2) is None
        assert (await put(registry, config="2", version=1)).version == 2
        assert await put(registry, config="no", version=1) is None
        assert [row.config for row in await registry.services()] == ["2"]

    async def test_version_0_is_for_one_that_is_new(self, registry):
        assert (await put(registry, version=0)).version == 1
        assert await put(registry, version=0) is None

    async def test_a_version_of_one_that_is_not_there_is_refused(self, registry):
        assert await put(registry, version=1) is None
        assert await registry.services() == []

    async def test_one_that_is_made_again_has_no_version_that_it_had_before(self, registry):
        for _ in range(3):
            await put(registry)
        await registry.delete_service("mail", audit())
        again = await put(registry, config="again", version=0)
        assert again.version > 3
        assert await put(registry, version=3) is None

    async def test_one_is_deleted(self, registry):
        await put(registry)
        await put(registry, "sms")
        assert await registry.delete_service("mail", audit("service.delete")) is True
        assert [row.name for row in await registry.services()] == ["sms"]

    async def test_one_that_is_not_there_cannot_be_deleted(self, registry):
        assert await registry.delete_service("mail", audit()) is False

    async def test_one_without_a_configuration_has_tasks_and_is_not_there(self, store, registry):
        await stored(store, task(store))
        assert await registry.delete_service("mail", audit()) is False


class TestAServiceInUse:
    async def refused(self, registry):
        with pytest.raises(ServiceInUse, match="'mail'"):
            await registry.delete_service("mail", audit("service.delete"))
        assert [row.name for row in await registry.services()] == ["mail"]

    async def test_by_a_task_that_is_due_later(self, store, registry):
        await put(registry)
        (given,) = await stored(store, later(store, shard=7))
        await self.refused(registry)
        await store.cancel([given.id])
        assert await registry.delete_service("mail", audit()) is True

    async def test_by_a_task_that_runs_or_was_accepted(self, store, registry, epochs):
        await put(registry)
        (running,) = await run(store, epochs, task(store))
        await self.refused(registry)
        await store.accept([lease(running, now(store) + HOUR)])
        await self.refused(registry)
        await store.record([ending(running)])
        assert await registry.delete_service("mail", audit()) is True

    async def test_not_by_tasks_of_other_services(self, store, registry):
        await put(registry)
        await stored(store, *[task(store, service=name) for name in ("mai", "mail/x", "x/mail")])
        assert await registry.delete_service("mail", audit()) is True

    async def test_a_refusal_changes_nothing(self, store, registry):
        await put(registry)
        await stored(store, task(store))
        before = await registry.version(), await lines(registry)
        await self.refused(registry)
        assert (await registry.version(), await lines(registry)) == before


class TestTokens:
    async def test_there_are_none_at_first(self, registry):
        assert await registry.tokens() == []

    @pytest.mark.parametrize(
        "given",
        [
            token(),
            token(namespace="acme", scopes=("admin",), rate=0.5, expires_at_ms=9),
            token(name="größe ✓", scopes=(), rate=100.0),
        ],
        ids=["plain", "bounded", "no scopes"],
    )
    async def test_one_is_kept_as_it_was_given(self, registry, given):
        await registry.put_token(given, audit("token.create"))
        assert await registry.tokens() == [given]

    async def test_the_oldest_comes_first(self, registry):
        made = [token(name, created_at_ms=at) for name, at in [("c", 1), ("a", 2), ("b", 2)]]
        for one in reversed(made):
            await registry.put_token(one, audit("token.create"))
        assert await registry.tokens() == made

    async def test_the_same_id_again_takes_its_place(self, registry):
        await registry.put_token(token(), audit())
        await registry.put_token(token(rate=3.0), audit())
        assert await registry.tokens() == [token(rate=3.0)]

    async def test_one_is_deleted_once(self, registry):
        for name in ("a", "b"):
            await registry.put_token(token(name), audit())
        assert await registry.delete_token("id-a", audit("token.delete")) is True
        assert await registry.delete_token("id-a", audit("token.delete")) is False
        assert await registry.tokens() == [token("b")]

    async def test_that_there_was_one_is_kept_when_all_are_deleted(self, registry, place):
        assert await registry.had_tokens() is False
        await registry.delete_token("id-ci", audit())
        assert await registry.had_tokens() is False
        await registry.put_token(token(), audit())
        assert await registry.had_tokens() is True
        await registry.delete_token("id-ci", audit())
        assert await registry.tokens() == []
        other = place.store()
        await other.open()
        try:
            assert await other.registry.had_tokens() is True
        finally:
            await other.close()


class TestTheVersion:
    async def test_it_rises_with_every_change(self, registry):
        seen = [await registry.version()]
        for change in (
            put(registry),
            put(registry),
            registry.put_token(token(), audit()),
            registry.delete_token("id-ci", audit()),
            registry.delete_service("mail", audit()),
        ):
            await change
            seen.append(await registry.version())
        assert seen == sorted(set(seen))

    async def test_it_stays_when_nothing_changes(self, store, registry):
        await put(registry)
        before = await registry.version()
        await put(registry, version=9)
        await registry.delete_service("sms", audit())
        await registry.delete_token("nobody", audit())
        await registry.note(audit())
        await stored(store, task(store))
        assert await registry.version() == before

    async def test_others_see_it(self, registry, opened):
        other = (await opened()).registry
        before = await other.version()
        row = await put(registry)
        assert await other.version() > before
        assert await other.services() == [row]


class TestTheAuditLog:
    async def test_every_change_has_its_line_newest_first(self, registry):
        given = [
            audit("service.put", at_ms=1, request="r1"),
            audit("token.create", "ci", at_ms=2, namespace="acme"),
            audit("token.delete", "ci", at_ms=3, detail="größe ✓ 'x' \"y\" %s $1"),
            audit("service.delete", at_ms=4),
            audit("node.drain", "n1", at_ms=3),
        ]
        await registry.put_service("mail", "{}", given[0])
        await registry.put_token(token(), given[1])
        await registry.delete_token("id-ci", given[2])
        await registry.delete_service("mail", given[3])
        await registry.note(given[4])
        assert await lines(registry) == given[::-1]

    async def test_what_changed_nothing_has_none(self, registry):
        await put(registry, version=9)
        await registry.delete_service("mail", audit())
        await registry.delete_token("nobody", audit())
        assert await lines(registry) == []

    @pytest.mark.parametrize("limit", [1, 3, 9, 10, 11])
    async def test_it_comes_page_by_page(self, registry, limit):
        given = [audit(at_ms=n) for n in range(10)]
        for one in given:
            await registry.note(one)
        assert await lines(registry, limit=limit) == given[::-1]

    async def test_what_comes_meanwhile_moves_no_page(self, registry):
        for at in range(4):
            await registry.note(audit(at_ms=at))
        _, cursor = await registry.audit(namespace=None, cursor=None, limit=2)
        await registry.note(audit(at_ms=9))
        page, end = await registry.audit(namespace=None, cursor=cursor, limit=2)
        assert ([one.at_ms for one in page], end) == ([1, 0], None)

    async def test_each_namespace_has_its_own(self, registry):
        for at in range(6):
            await registry.note(audit(at_ms=at, namespace=["", "acme", "acme/x"][at % 3]))
        for namespace, expected in [("", [3, 0]), ("acme", [4, 1]), ("nobody", [])]:
            found = await lines(registry, namespace, limit=1)
            assert [one.at_ms for one in found] == expected

    async def test_every_page_but_the_last_has_a_cursor_for_more(self, registry):
        await registry.note(audit(at_ms=1))
        await registry.note(audit(at_ms=2))
        assert (await registry.audit(namespace=None, cursor=None, limit=2))[1] is None
        assert (await registry.audit(namespace=None, cursor=None, limit=1))[1] is not None


async def refuse_lines(store):
    """From now on the audit log takes no line."""
    if hasattr(store, "fetch"):
        await store.fetch("ALTER TABLE audit ADD CHECK (false) NOT VALID")
        return
    trigger = """
        CREATE TRIGGER full BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'no line'); END
    """
    await store._write(Rank.SUBMIT, lambda connection: connection.run(trigger))


NOTED_CHANGES = {
    "put_service": lambda store: put(store.registry, config="changed"),
    "put_new_service": lambda store: put(store.registry, "sms"),
    "delete_service": lambda store: store.registry.delete_service("mail", audit()),
    "put_token": lambda store: store.registry.put_token(token("other"), audit()),
    "delete_token": lambda store: store.registry.delete_token("id-ci", audit()),
    "put_schedule": lambda store: store.schedules.put(
        schedule(store, tz="UTC", created_at_ms=0), AUDIT
    ),
    "put_new_schedule": lambda store: store.schedules.put(schedule(store, "weekly"), AUDIT),
    "delete_schedule": lambda store: store.schedules.delete("nightly", AUDIT),
}


class TestTheLineOfAChange:
    """It is written in the transaction of the change: neither is there without the other."""

    async def everything(self, store):
        registry = store.registry
        return (
            await registry.version(), await registry.services(), await registry.tokens(),
            await store.schedules.read(), await lines(registry), await everything(store),
        )  # fmt: skip

    async def fill(self, store):
        await put(store.registry)
        await store.registry.put_token(token(), audit())
        nightly = schedule(store)
        await store.schedules.put(nightly, AUDIT)
        assert await fire(store, [firing(store, nightly, now(store) + HOUR)]) == [True]

    @pytest.mark.parametrize("change", NOTED_CHANGES)
    async def test_without_it_nothing_is_changed(self, store, change):
        await self.fill(store)
        before = await self.everything(store)
        await refuse_lines(store)
        with pytest.raises(Exception, match=r"no line|audit"):
            await NOTED_CHANGES[change](store)
        assert await self.everything(store) == before

    @pytest.mark.parametrize("change", NOTED_CHANGES)
    async def test_there_is_one(self, store, change):
        await self.fill(store)
        before = await lines(store.registry)
        await NOTED_CHANGES[change](store)
        assert (await lines(store.registry))[1:] == before

    async def test_that_of_a_schedule_says_what_changed_and_no_payload(self, store):
        first = schedule(store, body=b'"hush"', timeout_ms=None)
        changed = first._replace(cron="0 4 * * *", body=b'"hush again"', enabled=False, priority=2)
        line = AUDIT._replace(at_ms=7, actor="tw_1 (ops)", namespace="acme", request="r-1")
        await store.schedules.put(first, line)
        await store.schedules.put(changed, line)
        await store.schedules.put(changed, line)
        await store.schedules.delete(first.name, line._replace(action="schedule.delete"))
        await store.schedules.delete(first.name, line)
        deleted, put_again, made = await lines(store.registry)
        assert put_again == line._replace(
            detail='payload: changed; cron: "0 3 * * *" -> "0 4 * * *"; enabled: true -> false;'
            " priority: 0 -> 2"
        )
        assert made.detail.startswith(
            'payload: set; service: none -> "report"; cron: none -> "0 3 * * *";'
        )
        assert deleted.detail.startswith('payload: removed; service: "report" -> none; cron: "0 4')
        assert "hush" not in str(await lines(store.registry))


class TestPrune:
    async def test_names_of_requests_are_forgotten_and_can_be_used_again(self, store, registry):
        first, second = task(store), task(store)
        await store.insert([request(first)], {})
        assert await registry.prune(now(store) + HOUR, 10) == 1
        assert await store.insert([request(second)], {}) == [second]

    async def test_those_of_late_are_kept(self, store, registry):
        (given,) = await store.insert([request(task(store))], {})
        assert await registry.prune(now(store) - HOUR, 10) == 0
        assert await store.insert([request(task(store))], {}) == [repeated(given)]

    async def test_so_many_at_a_time(self, store, registry):
        await store.insert([request(task(store), f"r{n}") for n in range(25)], {})
        pruned = [await registry.prune(now(store) + HOUR, 10) for _ in range(4)]
        assert pruned == [10, 10, 5, 0]

    async def test_lines_of_the_audit_log_are_kept_however_old_they_are(self, store, registry):
        for at in (0, 1, now(store)):
            await registry.note(audit(at_ms=at))
        assert await registry.prune(now(store) + HOUR, 10) == 0
        assert len(await lines(registry)) == 3

    async def test_old_lines_of_the_audit_log_are_forgotten_when_asked_for(self, store, registry):
        old = now(store) - 90 * 24 * HOUR
        for at in (old - HOUR, old - 2 * HOUR, old + HOUR, old - HOUR, now(store)):
            await registry.note(audit(at_ms=at))
        assert await registry.prune(0, 10, audit_before_ms=old) == 3
        assert await registry.prune(0, 10, audit_before_ms=old) == 0
        assert [one.at_ms >= old for one in await lines(registry)] == [True, True]

    async def test_names_and_lines_together_are_so_many_at_a_time(self, store, registry):
        await store.insert([request(task(store), f"r{n}") for n in range(15)], {})
        for at in range(12):
            await registry.note(audit(at_ms=at))
        before = now(store) + HOUR
        pruned = [await registry.prune(before, 10, audit_before_ms=before) for _ in range(4)]
        assert pruned == [10, 10, 7, 0]
        assert await lines(registry) == []

    async def test_what_was_accepted_and_runs_is_no_concern_of_it(self, store, registry, epochs):
        (running,) = await run(store, epochs, task(store))
        at = now(store)
        await store.accept([lease(running, at - HOUR)])
        assert await registry.prune(at, 10) == 0
        (found,) = await store.running(ALL, 100, at)
        assert found.due_at_ms == at - HOUR
        await store.record([ending(running)])
        assert (await store.get([running.id]))[0].due_at_ms == running.due_at_ms


class TestTimes:
    async def test_there_are_none_at_first(self, registry):
        assert await registry.noted_times() == NotedTimes(None, 0)

    async def test_others_read_those_that_were_noted_last(self, registry, opened):
        other = (await opened()).registry
        version = await registry.version()
        for times in (NotedTimes(1_800_000_000_000, 0), NotedTimes(5, 4)):
            await registry.note_times(times)
            assert await other.noted_times() == times
        assert await registry.version() == version


class TestRaces:
    async def test_of_two_changes_of_one_version_one_wins(self, registry, opened):
        other = (await opened()).registry
        version = 0
        for _ in range(ROUNDS):
            rows = await asyncio.gather(
                put(registry, config="a", version=version),
                put(other, config="b", version=version),
            )
            (won,) = [row for row in rows if row is not None]
            assert await registry.services() == [won]
            assert won.version == version + 1
            version = won.version
        assert len(await lines(registry)) == ROUNDS

    async def test_changes_at_once_have_each_a_version_and_a_line(self, registry, opened):
        other = (await opened()).registry
        rows = await asyncio.gather(*[put(one) for one in [registry, other] * ROUNDS])
        assert sorted(row.version for row in rows) == list(range(1, 2 * ROUNDS + 1))
        assert await registry.version() == 2 * ROUNDS
        assert len(await lines(other)) == 2 * ROUNDS

    async def test_of_a_deletion_and_a_change_none_is_lost(self, registry, opened):
        other = (await opened()).registry
        for _ in range(ROUNDS):
            row = await put(registry)
            deleted, changed = await asyncio.gather(
                registry.delete_service("mail", audit()),
                put(other, config="changed", version=row.version),
            )
            assert deleted
            assert changed is None or changed.version == row.version + 1
            assert await registry.services() == []

    async def test_of_a_deletion_and_a_submit_both_are_told_the_truth(
        self, store, registry, opened
    ):
        """A submit does not ask for its service: it is stored, whoever comes first."""
        other = await opened()
        for _ in range(ROUNDS):
            await put(registry)
            given = task(store)
            deleted, _ = await asyncio.gather(
                registry.delete_service("mail", audit()), stored(other, given),
                return_exceptions=True,
            )  # fmt: skip
            there = [row.name for row in await registry.services()]
            if isinstance(deleted, ServiceInUse):
                assert there == ["mail"]
            else:
                assert deleted is True
                assert there == []
            assert await store.get([given.id]) == [given]
            await store.cancel([given.id])

    async def test_of_many_that_delete_one_wins(self, registry, opened):
        other = (await opened()).registry
        for number in range(ROUNDS):
            await registry.put_token(token(str(number)), audit())
            gone = await asyncio.gather(
                *[one.delete_token(f"id-{number}", audit()) for one in [registry, other] * 3]
            )
            assert sorted(gone) == [False] * 5 + [True]

    async def test_prunes_at_once_count_each_name_once(self, store, registry, opened):
        other = (await opened()).registry
        await store.insert([request(task(store), f"r{n}") for n in range(200)], {})
        before = now(store) + HOUR
        counts = await asyncio.gather(*[one.prune(before, 50) for one in [registry, other] * 4])
        rest = await registry.prune(before, 1_000)
        assert sum(counts) + rest == 200
        answers = await store.insert([request(task(store), f"r{n}") for n in range(200)], {})
        assert all(isinstance(one, Task) for one in answers)


CALLS = {
    "version": lambda registry: registry.version(),
    "services": lambda registry: registry.services(),
    "put_service": put,
    "delete_service": lambda registry: registry.delete_service("mail", audit()),
    "tokens": lambda registry: registry.tokens(),
    "had_tokens": lambda registry: registry.had_tokens(),
    "put_token": lambda registry: registry.put_token(token(), audit()),
    "delete_token": lambda registry: registry.delete_token("id-ci", audit()),
    "audit": lambda registry: registry.audit(namespace=None, cursor=None, limit=1),
    "note": lambda registry: registry.note(audit()),
    "prune": lambda registry: registry.prune(0, 1),
    "noted_times": lambda registry: registry.noted_times(),
    "note_times": lambda registry: registry.note_times(NotedTimes(2, 1)),
}


class TestOpenAndClose:
    async def test_that_of_a_closed_store_says_so(self, place):
        store = place.store()
        await store.open()
        await store.close()
        for name, call in CALLS.items():
            with pytest.raises((RuntimeError, StoreUnavailable), match=r"not open|closed"):
                assert not await call(store.registry), name

    async def test_another_store_finds_everything_as_it_was(self, place):
        first = place.store()
        await first.open()
        row = await put(first.registry)
        await first.registry.put_token(token(), audit("token.create"))
        (given,) = await first.insert([request(task(first))], {})
        before = await first.registry.version(), await lines(first.registry)
        await first.close()
        second = place.store()
        await second.open()
        try:
            assert await second.registry.services() == [row]
            assert await second.registry.tokens() == [token()]
            assert (await second.registry.version(), await lines(second.registry)) == before
            assert await second.insert([request(task(second))], {}) == [repeated(given)]
            assert ids_of(await second.get([given.id])) == [given.id]
        finally:
            await second.close()
