"""Health: stalled tasks are found with their reasons, and so is why a node is not ready."""

import asyncio
import contextlib
import logging
import re

import pytest

from durable.postgres_stage import connected, until
from servers import PostgresServer, ZooKeeperServer
from tickwheel.durable import Scheduler
from tickwheel.durable.steps import health as health_module
from tickwheel.durable.steps.health import Ownership, Reason, Span
from tickwheel.durable.steps.loader import Loader
from tickwheel.durable.stores.sqlite import file as sqlite_file
from tickwheel.durable.stores.sqlite import writer as sqlite_writer
from tickwheel.durable.stores.sqlite.connection import DRIVERS, default_driver
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Due

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Make all intervals a hundred times shorter; the findings do not depend on them."""
    monkeypatch.setattr(health_module, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(health_module, "IDLE_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(health_module, "UNREADY_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(health_module, "STALLED_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(health_module, "UNREADY_AFTER_SECONDS", 0.5)


@pytest.fixture
def log(caplog):
    """Return the log lines about stalls, of one reason or of all."""
    caplog.set_level(logging.INFO)

    def lines(reason=""):
        return [one for one in caplog.messages if re.match(f"stalled.*\\({reason}", one)]

    return lines


@contextlib.asynccontextmanager
async def node(url, functions=(), **options):
    """Run a scheduler with functions that record their calls; give it with its health."""
    app = Scheduler(url, **options)
    calls = []
    for name in functions:
        app.task(lambda word, name=name: calls.append((name, word)), name=name)
    async with app:
        yield app, app.node.health, calls


@contextlib.asynccontextmanager
async def one_stall(app, reason):
    """Wait until a task is stalled for this reason, and until it is not after the repair."""
    health = app.node.health

    async def stalled():
        return reason in health.stalled

    async def goes_on():
        return not health.stalled and not health.unready()

    await until(stalled)
    yield health.stalled[reason]
    await until(goes_on)


async def called(calls):
    async def once():
        return calls == [("mail", "a")]

    await until(once)


async def ready(app):
    async def is_ready():
        return not app.node.health.unready()

    await until(is_ready)


class TestTheLogOfSqlite:
    async def test_a_log_that_grows_behind_a_reader_is_reported_and_then_truncated(
        self, tmp_path, caplog, monkeypatch
    ):
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(sqlite_file, "LOG_BYTES", 1 << 20)
        monkeypatch.setattr(sqlite_file, "LONG_LOG_BYTES", 2 << 20)
        monkeypatch.setattr(sqlite_writer, "CHECKPOINT_SECONDS", 0.01)
        path = tmp_path / "tasks.db"
        async with node(f"sqlite:///{path}", ["mail"]) as (app, _, _):
            reader = DRIVERS[default_driver()](str(path))
            reader.run("BEGIN")
            reader.run("SELECT count(*) FROM task")

            async def warned():
                await app.submit("mail", ["x" * 100_000], delay=3600)
                return any("log of the SQLite database has grown" in m for m in caplog.messages)

            await until(warned)
            assert app.node.store.log_bytes > 2 << 20
            reader.run("COMMIT")
            reader.close()

            async def is_cut():
                await app.submit("mail", ["x"], delay=3600)
                return "the store's warning is over" in caplog.messages

            await until(is_cut)
            assert app.node.store.log_bytes <= 2 << 20


class TestStalledTask:
    async def test_because_another_transaction_has_it_locked(self, postgres_url, log):
        async with node(postgres_url, dispatch=False) as (app, _, _):
            task = await app.submit("mail", ["a"])
        async with connected(postgres_url) as user:
            await user.execute(f"BEGIN; SELECT 1 FROM task WHERE id = '{task.id}' FOR UPDATE")
            async with node(postgres_url, ["mail"]) as (app, _, calls):
                async with one_stall(app, Reason.LOCKED) as stall:
                    assert stall.due.id == task.id
                    await user.execute("COMMIT")
                await called(calls)
        expected = f"stalled (locked): task {task.id} of 'mail' in shard {task.shard} is overdue"
        assert expected in log("locked")[0]

    async def test_because_no_node_owns_its_shard(self, postgres_url, log):
        async with node(postgres_url, dispatch=False) as (app, _, _):
            await app.submit("mail", ["a"])
            async with one_stall(app, Reason.OWNER), node(postgres_url, ["mail"]) as (_, _, calls):
                await called(calls)
        assert "no node owns its shard" in log("owner")[0]

    @pytest.mark.parametrize("ahead_ms", [-1, 3_600_000], ids=["over", "before a clock set back"])
    async def test_because_a_dead_node_owns_its_shard(self, postgres_url, ahead_ms):
        async with node(postgres_url, dispatch=False) as (app, health, _):
            task = await app.submit("mail", ["a"])
            async with connected(postgres_url) as user:
                await user.execute("UPDATE shard SET owner = 'gone'")
                await user.execute(
                    "INSERT INTO node (name, incarnation, started_at_ms, lease_until_ms)"
                    " VALUES ('gone', gen_random_uuid(), 1, $1)",
                    int(app.node.store.now_ms()) + ahead_ms,
                )
            async with one_stall(app, Reason.OWNER) as stall:
                assert stall.due.id == task.id

                async def named():  # an earlier check may have found no owner
                    detail = health.stalled[Reason.OWNER].detail
                    return "owned by gone, which has no valid lease" in detail

                await until(named)
                await app.cancel(task.id)

    @pytest.mark.parametrize("kind", ["sqlite", "postgres"])
    async def test_because_claims_are_refused_by_the_epoch(self, request, tmp_path, log, kind):
        url = f"sqlite:///{tmp_path}/tasks.db"
        if kind == "postgres":
            url = request.getfixturevalue("postgres_url")
        async with node(url, ["mail"]) as (app, health, calls):
            await ready(app)
            coordinator = app.node.coordinator
            real = coordinator.owned
            old = {shard: epoch - 1 for shard, epoch in real().items()}
            coordinator.owned = lambda: old
            await app.submit("mail", ["a"])
            async with one_stall(app, Reason.EPOCH):

                async def unready():
                    return any("claims are refused" in one for one in health.unready())

                await until(unready)
                coordinator.owned = real
            await called(calls)
        assert "claims are refused: the shard's epoch is 1 in the store" in log("epoch")[0]

    async def test_because_claims_fail(self, tmp_path, log, monkeypatch):
        async def fails(*_):
            raise StoreUnavailable("the claim has not answered in 10 s")

        async with node(f"sqlite:///{tmp_path}/tasks.db", ["mail"]) as (app, health, calls):
            await ready(app)
            with monkeypatch.context() as patched:
                patched.setattr(app.node.store, "claim", fails)
                await app.submit("mail", ["a"])
                async with one_stall(app, Reason.CLAIM):

                    async def unready():
                        return any("the step dispatch" in one for one in health.unready())

                    await until(unready)
                    patched.undo()
            await called(calls)
        failed = r"not claimed: the dispatch has failed for \d+ s: the claim has not"
        assert re.search(failed, log("claim")[0])

    async def test_because_it_is_not_loaded(self, tmp_path, log, monkeypatch):
        go_on = asyncio.Event()
        real = Loader.step

        async def stands_still(loader):
            await go_on.wait()
            return await real(loader)

        monkeypatch.setattr(Loader, "step", stands_still)
        url = f"sqlite:///{tmp_path}/tasks.db"
        async with node(url, ["mail"], horizon=1) as (app, health, calls):
            async with node(url, dispatch=False) as (other, _, _):
                await other.submit("mail", ["a"])
            async with one_stall(app, Reason.LOAD):

                async def unready():
                    return health.unready()

                await until(unready)
                assert "the step loader has not succeeded" in health.unready()[0]
                go_on.set()
            await called(calls)
        assert "the loader has been running for" in log("load")[0]

    async def test_because_no_node_has_the_function(self, tmp_path, log):
        async with node(f"sqlite:///{tmp_path}/tasks.db", ["mail"]) as (app, health, _):
            async with node(f"sqlite:///{tmp_path}/tasks.db", dispatch=False) as (other, _, _):
                task = await other.submit("sms", ["a"])
            async with one_stall(app, Reason.FUNCTION):
                assert health.unready() == []
                await app.cancel(task.id)
        assert "of 'sms'" in log("function")[0]

    async def test_because_the_store_does_not_answer(self, log):
        with PostgresServer() as server:
            async with node(server.url, ["mail"]) as (app, health, calls):
                await ready(app)
                await app.submit("mail", ["a"], delay=0.5)
                await asyncio.to_thread(server.kill)
                async with one_stall(app, Reason.STORE):
                    assert "the store" in health.unready()[0]
                    assert "127.0.0.1" not in " ".join(health.unready())
                    await asyncio.to_thread(server.start)
                await called(calls)
        assert log("store")


class TestZooKeeper:
    """While ZooKeeper is down, the coordinator is named, and only by nodes that need it."""

    @pytest.fixture
    def zookeeper(self, monkeypatch):
        monkeypatch.setattr(health_module, "COORDINATOR_TIMEOUT_SECONDS", 0.3)
        with ZooKeeperServer() as server:
            yield server

    @pytest.mark.parametrize("fault", ["kill", "pause"])
    async def test_a_node_that_dispatches_reports_the_coordinator_not_the_store(
        self, postgres_url, zookeeper, fault, caplog
    ):
        caplog.set_level(logging.INFO)
        coordinator = f"zookeeper://{zookeeper.address}/t"
        async with node(postgres_url, ["mail"], coordinator=coordinator) as (app, health, calls):
            await ready(app)
            await asyncio.to_thread(getattr(zookeeper, fault))
            async with one_stall(app, Reason.COORDINATOR):

                async def named():
                    return (
                        health.stalled.keys() == {Reason.COORDINATOR}
                        and "the coordinator has not answered for" in " ".join(health.unready())
                        and "waits for the coordinator: ZooKeeper at" in caplog.text
                    )

                await until(named)
                back = zookeeper.start if fault == "kill" else zookeeper.resume
                await asyncio.to_thread(back)
            await app.submit("mail", ["a"])
            await called(calls)
        assert re.search(r"stalled for \d+ s \(coordinator\): ", caplog.text)

    async def test_a_node_that_starts_without_it_is_not_ready(
        self, postgres_url, zookeeper, monkeypatch
    ):
        monkeypatch.setattr(health_module, "UNREADY_AFTER_SECONDS", 3600.0)
        await asyncio.to_thread(zookeeper.kill)
        async with node(postgres_url, dispatch=False) as (app, _, _):
            await app.node.store.take(range(app.node.store.shards), "other")
        coordinator = f"zookeeper://{zookeeper.address}/t"
        async with node(postgres_url, ["mail"], coordinator=coordinator) as (app, health, _):

            async def checked():
                return "the coordinator has not answered yet" in health.unready()

            await until(checked)
            await asyncio.to_thread(zookeeper.start)
            await ready(app)

    @pytest.mark.parametrize("fault", ["kill", "pause"])
    async def test_a_node_that_only_submits_stays_ready(self, postgres_url, zookeeper, fault, log):
        coordinator = f"zookeeper://{zookeeper.address}/t"
        options = {"coordinator": coordinator, "dispatch": False}
        async with node(postgres_url, **options) as (app, health, _):
            await ready(app)
            await asyncio.to_thread(getattr(zookeeper, fault))
            checks = []
            look = health._read_ownership
            health._read_ownership = lambda: (checks.append(health._unready), look())[1]

            async def is_ready_without_it():
                silent = health._coordinator_silence() > health_module.UNREADY_AFTER_SECONDS
                return silent and not health.stalled and checks[-3:] == [[]] * 3

            await until(is_ready_without_it)
            if fault == "pause":
                await asyncio.to_thread(zookeeper.resume)
        assert log("coordinator") == []


class TestNotStalledTask:
    """A task that is overdue for a good reason is not stalled."""

    async def looked_at(self, app, task):
        """Wait until several checks could have found it."""
        health, checks = app.node.health, []
        report = health._report_overdue
        health._report_overdue = lambda *given: (checks.append(given), report(*given))

        async def often():
            return app.node.store.now_ms() - task.due_at_ms > 500 and len(checks) > 5

        await until(often)

    async def test_because_its_service_is_disabled(self, tmp_path, log):
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")
        app.task(enabled=False, name="mail")(lambda word: word)
        async with app:
            await self.looked_at(app, await app.submit("mail", ["a"]))
            assert app.node.health.stalled == {}
            assert log() == []

    async def test_because_all_permits_are_taken(self, tmp_path, log):
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", grace=0)
        go_on = asyncio.Event()

        async def mail(word):
            await go_on.wait()

        app.task(concurrency=1)(mail)
        async with app:
            first = await app.submit("mail", ["a"])

            async def runs():
                return first.id in app.node.dispatch.running

            await until(runs)
            second = await app.submit("mail", ["b"])
            await self.looked_at(app, second)
            assert app.node.health.stalled == {}
            assert log() == []
            go_on.set()
            await app.wait(second.id)

    async def test_because_it_is_in_a_backlog_that_makes_progress(self, tmp_path, log):
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")

        @app.task(concurrency=1)
        async def mail(word):
            await asyncio.sleep(0.02)

        async with app:
            tasks = [await app.submit("mail", [n]) for n in range(60)]
            for task in tasks:
                await app.wait(task.id)
            assert log() == []


class TestCheck:
    async def test_a_single_check_reports_nothing(self, tmp_path):
        async with node(f"sqlite:///{tmp_path}/tasks.db", ["mail"]) as (app, health, _):
            await ready(app)
            due, later = (Due("1" * 32, at_ms, "mail", 0, 0) for at_ms in (5, 6))
            ownership = Ownership({}, frozenset(), frozenset())
            for found, stalls in ((due, False), (later, False), (later, True)):
                health._report_overdue(ownership, Span(), [found])
                assert bool(health.stalled) == stalls

    async def test_a_check_reports_only_services_that_it_covers(self, tmp_path):
        async with node(f"sqlite:///{tmp_path}/tasks.db", ["mail"]) as (app, health, _):
            await ready(app)
            due, ownership = Due("1" * 32, 5, "mail", 0, 0), Ownership({}, *[frozenset()] * 2)
            first, second = Span("", "mail"), Span("mail", None)
            for span, found, stalls in (
                (first, [due], False),
                (second, [], False),  # says nothing of it
                (first, [due], True),
                (second, [], True),
                (first, [], False),
                (first, [due], False),
            ):
                health._report_overdue(ownership, span, found)
                assert bool(health.stalled) == stalls

    async def test_a_check_covers_a_part_of_very_many_services(self, tmp_path, monkeypatch):
        monkeypatch.setattr(health_module, "SERVICES_PER_CHECK", 2)
        names = [f"s{number}" for number in range(5)]
        url = f"sqlite:///{tmp_path}/tasks.db"
        async with node(url, dispatch=False) as (app, _, _):
            tasks = [await app.submit(name, ["a"]) for name in names]
        async with node(url) as (app, health, _):  # which has none of them

            async def all_seen():
                return {*health._overdue_before} == {*names} and Reason.FUNCTION in health.stalled

            await until(all_seen)
            for task in tasks:
                await app.cancel(task.id)

            async def goes_on():
                return not health.stalled and not health._overdue_before

            await until(goes_on)

    async def test_a_failed_check_is_a_stall_and_leaves_the_node_ready(self, tmp_path, log):
        async def fails(_):
            raise StoreUnavailable("no answer in time")

        async with node(f"sqlite:///{tmp_path}/tasks.db", ["mail"]) as (app, health, _):
            await ready(app)
            real, health._read_overdue = health._read_overdue, fails
            async with one_stall(app, Reason.STORE):
                assert health.unready() == []
                health._read_overdue = real
        assert "overdue tasks could not be read: no answer in time" in log("store")[0]

    async def test_slow_reads_of_overdue_tasks_are_made_less_often_and_checks_are_not(
        self, tmp_path
    ):
        async with node(f"sqlite:///{tmp_path}/tasks.db", ["mail"]) as (app, health, _):
            await ready(app)
            checks = []

            async def slow(_):
                checks.append(health._timer.time())
                await asyncio.sleep(0.1)
                return Span(), []

            async def twice():
                return len(checks) > 1

            health._read_overdue = slow
            await until(twice)
            assert checks[1] - checks[0] >= 0.1 / health_module.OVERDUE_TIME_SHARE
            assert await health.step() == health_module.INTERVAL_SECONDS

    async def test_a_check_that_fails_once_keeps_the_stalls(self, tmp_path, caplog):
        caplog.set_level(logging.INFO)

        async def fails(_):
            raise StoreUnavailable("no answer in time")

        url = f"sqlite:///{tmp_path}/tasks.db"
        async with node(url, dispatch=False) as (app, _, _):
            await app.submit("mail", ["a"])
        async with node(url) as (app, health, _):  # which has no function of that name

            async def stalled():
                return Reason.FUNCTION in health.stalled

            await until(stalled)
            ownership = Ownership({}, *[frozenset()] * 2)
            real, health._read_overdue = health._read_overdue, fails
            await health._check_overdue(ownership)
            health._read_overdue = real
            # A node that stops gives up its shards: then the reason is another one.
            assert Reason.FUNCTION in health.stalled
            assert "any more for the reason 'function'" not in caplog.text


class TestReadiness:
    async def test_a_node_is_ready_when_it_owns_shards_or_knows_who_does(self, postgres_url):
        async with node(postgres_url, ["mail"], shards=1) as (first, _, _):
            await ready(first)
            async with node(postgres_url, ["mail"]) as (second, _, _):
                await ready(second)
                owned = [len(one.node.coordinator.owned()) for one in (first, second)]
                assert sorted(owned) == [0, 1]

    async def test_a_node_that_only_submits_needs_only_the_store(self, postgres_url):
        async with node(postgres_url, dispatch=False) as (app, _, _):
            await ready(app)

    @pytest.mark.parametrize("dispatch", [True, False])
    async def test_no_node_is_ready_while_the_database_is_read_only(self, postgres_url, dispatch):
        async with node(postgres_url, ["mail"], dispatch=dispatch) as (app, health, _):
            await ready(app)
            database = postgres_url.rpartition("/")[2]
            async with connected(postgres_url) as user:
                alter = f"ALTER DATABASE {database} SET default_transaction_read_only"
                others = (
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                await user.execute(f"{alter} = on")
                await user.execute(others)

                checks = []
                look = health._read_ownership
                health._read_ownership = lambda: (checks.append(health.unready()), look())[1]

                async def unready():  # also when it has connected again
                    return len(checks) > 20 and all(checks[-5:])

                await until(unready)
                await user.execute(f"SET default_transaction_read_only = off; {alter} = off")
                await user.execute(others)
            await ready(app)

    async def test_no_node_is_ready_while_another_process_locks_the_sqlite_file(self, tmp_path):
        path = tmp_path / "tasks.db"
        async with node(f"sqlite:///{path}", ["mail"]) as (app, health, _):
            await ready(app)
            # By the same library: two of them in one process do not see each other's locks.
            with contextlib.closing(SqliteStore(path)._file._connect()) as other:
                other.run("BEGIN IMMEDIATE")

                async def unready():
                    return any("the store" in one for one in health.unready())

                await until(unready)
                other.run("ROLLBACK")
            await ready(app)

    async def test_a_node_whose_loop_has_lost_the_store_says_for_how_long(
        self, tmp_path, monkeypatch
    ):
        async with node(f"sqlite:///{tmp_path}/tasks.db", ["mail"]) as (app, health, _):
            await ready(app)
            go_on = asyncio.Event()
            monkeypatch.setattr(health, "_read_ownership", go_on.wait)

            async def unready():
                return any("has not answered for" in one for one in health.unready())

            await until(unready)
