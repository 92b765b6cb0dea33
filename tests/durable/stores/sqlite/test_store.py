"""The store on SQLite: durability, large pages, faults of the disk, and other processes."""

import asyncio
import re
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.stores import (
    ALL,
    HOUR,
    SHARDS,
    ending,
    everything,
    ids_of,
    insert,
    now,
    run,
    stored,
    task,
)
from durable.stores.sqlite.helpers import driver_of, ended_well
from tickwheel.durable.stores.sqlite import connection as sqlite_connection
from tickwheel.durable.stores.sqlite import insert as sqlite_insert
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite import writer as sqlite_writer
from tickwheel.durable.stores.sqlite.connection import DRIVERS, insert_many
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Event, Filter, State, Submission, Task

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


def another(place):
    """Another connection, by the same driver: two SQLites in one process are blind to locks."""
    return driver_of(place)(place.address)


def pragma(store, name):
    """A setting of the connection that writes."""
    return store._write(Rank.CLAIM, lambda connection: connection.run(f"PRAGMA {name}")[0][0])


class TestDurability:
    @pytest.mark.usefixtures("waits_for_disk")
    async def test_the_writer_waits_for_the_disk(self, store):
        assert await pragma(store, "synchronous") == 2
        assert await pragma(store, "journal_mode") == "wal"

    async def test_the_reader_cannot_write(self, store):
        def work(connection):
            return connection.run("PRAGMA query_only")[0][0]

        assert await store._read(work) == 1
        with pytest.raises(Exception, match=r"(?i)read-?only"):
            await store._read(lambda connection: connection.run("DELETE FROM task"))

    @pytest.mark.parametrize("count", [1, 30, 200])
    async def test_what_was_acknowledged_survives_a_kill(self, place, child, count):
        text = """
async def submit():
    for _ in range(10_000):
        (answer,) = await insert(store, task(store, body=b"x" * 1000))
        said(answer.id)
async def main():
    await store.open()
    await asyncio.gather(*[submit() for _ in range(8)])
asyncio.run(main())
"""
        process = child(text)
        acknowledged = [process.stdout.readline().strip() for _ in range(count)]
        process.kill()
        # Not `communicate`: it leaves out what `readline` has read ahead, half a line perhaps.
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
        assert process.wait() == -signal.SIGKILL
        store = place.store()
        await store.open()
        found = await store.get(acknowledged)
        assert ids_of(found) == acknowledged
        assert {one.body for one in found} == {b"x" * 1000}
        await store.close()

    async def test_the_log_is_moved_into_the_file(self, place, monkeypatch):
        """Beside the writer where SQLite is new enough, otherwise by the writer itself."""
        monkeypatch.setattr(sqlite_writer, "CHECKPOINT_SECONDS", 0.01)
        store = place.store()
        await store.open()
        small = store.path.stat().st_size
        apart = driver_of(place).version >= sqlite_connection.SAFE
        assert (store._file.checkpointer is not None) == apart
        for _ in range(1_000):
            await stored(store, *[task(store, body=b"x" * 50_000) for _ in range(20)])
            if store.path.stat().st_size > small + 1_000_000:
                break
        else:
            raise AssertionError("the log only grows")
        await store.close()

    async def test_closing_it_leaves_one_file(self, place):
        store = place.store()
        await store.open()
        await stored(store, task(store))
        await store.close()
        assert [path.name for path in store.path.parent.iterdir()] == ["tasks.db"]


class TestADeadOwner:
    """A process that holds the file's lock knows that the last owner has ended."""

    async def test_its_leases_end_when_its_shards_are_taken(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, *[task(store, shard=shard) for shard in ALL])
        await store.take(ALL, "n2", owner_is_dead=True)
        for one in await store.get(ids_of(running)):
            assert one.state is State.RUNNING
            assert one.lease_until_ms < now(store)
            assert one.lease_until_ms != one.due_at_ms, "that would say that it was accepted"
        found = await store.running(ALL, 100, now(store))
        ends = [ending(one, Event.RETRY, lease_until_ms=one.lease_until_ms) for one in found]
        assert await store.record(ends) == [True] * SHARDS

    async def test_not_those_of_the_owner_before_which_may_still_be_ending_its_calls(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, task(store))
        await store.give_up(epochs)
        second = await store.take(ALL, "n2", owner_is_dead=True)
        (dead,) = await run(store, second, task(store), node="n2")
        await store.take(ALL, "n3", owner_is_dead=True)
        assert await store.get(ids_of(running)) == running
        (found,) = await store.running(ALL, 100, now(store))
        assert found.id == dead.id

    async def test_not_those_of_a_node_that_its_shards_were_lent_to(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, task(store), node="n2")
        await store.take(ALL, "n3", owner_is_dead=True)
        assert await store.get(ids_of(running)) == running

    async def test_not_those_of_shards_that_are_taken_without_the_lock(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, task(store))
        await store.take(ALL, "n2")
        assert await store.get(ids_of(running)) == running


class TestAPage:
    async def test_rows_beyond_it_are_never_read(self, store):
        """This statement has infinitely many rows."""
        endless = (
            "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        )

        def work(connection):
            rows = connection.run_until(lambda row: row[0] == 3, endless, {})
            return rows, connection.run("SELECT 1")

        assert await store._read(work) == ([(1,), (2,), (3,)], [(1,)])

    @pytest.mark.parametrize("key", [None, "k"])
    @pytest.mark.parametrize("table", sorted(sql.COLUMNS))
    async def test_ids_alone_are_sorted_or_passed_over(self, store, table, key):
        """The columns of a row are read last, by its id, and only of rows that match."""
        where, values = sql.matching(Filter(key=key, service="mail"), 0)
        statement = sql.find(table, where, by_key=key is not None)
        values |= {"cursor": "g", "scan": 10, "limit": 10}

        def work(connection):
            rows = connection.run(f"EXPLAIN QUERY PLAN {statement}", values)
            return [row[3] for row in rows]

        steps = await store._read(work)
        assert re.match(rf"SEARCH t USING INDEX sqlite_autoindex_{table}_1 \(id=\?\)", steps[-1])
        assert "CO-ROUTINE" in steps[0]


class TestServicesDue:
    async def test_the_cost_follows_what_is_due_and_not_the_number_of_services(self, store):
        at = now(store)
        later = [task(store, service=f"s{n}", due_at_ms=at + HOUR) for n in range(5_000)]
        await stored(store, task(store, service="due", due_at_ms=at), *later)
        steps = []

        def work(connection):  # both drivers have it: a call for each step of SQLite
            connection._connection.set_progress_handler(lambda: bool(steps.append(1)), 1)

        await store._read(work)
        assert await store.services(at) == await store.services(at, at - HOUR) == ["due"]
        assert 0 < len(steps) < 200


class TestManyRows:
    @pytest.mark.parametrize("driver", sorted(DRIVERS))
    async def test_they_are_inserted_some_at_once_and_all_of_them(self, tmp_path, driver):
        connection = DRIVERS[driver](str(tmp_path / "rows.db"))
        connection.run("CREATE TABLE pair (one, other)")
        ran, run = [], connection.run
        connection.run = lambda *what: ran.append(what) or run(*what)
        rows = [(number, b"x" * number) for number in range(116)]
        insert_many(connection, "INSERT INTO pair (one, other) VALUES (?,?)", rows)
        assert [len(values) // 2 for _, values in ran] == [50, 50, 10, 6]
        assert run("SELECT one, other FROM pair ORDER BY one") == rows
        connection.close()


class TestFaults:
    @pytest.fixture
    def impatient(self, monkeypatch):
        """Wait only a little for another process."""
        assert sqlite_connection.BUSY_MS <= 10_000
        monkeypatch.setattr(sqlite_connection, "BUSY_MS", 50)

    async def test_a_locked_database_is_unavailable_until_it_is_free(self, impatient, place):
        store = place.store()
        await store.open()
        first = await stored(store, task(store))
        other = another(place)
        other.run("BEGIN EXCLUSIVE")
        refused = [task(store) for _ in range(20)]
        answers = await asyncio.gather(
            *[insert(store, one) for one in refused],
            store.take([0], "n1"),
            store.cancel(ids_of(first)),
            return_exceptions=True,
        )
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        assert place.address in str(answers[0])
        assert await everything(store) == first  # reading goes on
        other.run("COMMIT")
        other.close()
        assert await everything(store) == first
        assert await insert(store, refused[0]) == [refused[0]]
        await store.close()

    async def test_a_locked_database_can_be_opened_and_read(self, impatient, place):
        store = place.store()
        await store.open()
        await store.close()
        other = another(place)
        other.run("BEGIN EXCLUSIVE")
        await store.open()
        assert await everything(store) == []
        with pytest.raises(StoreUnavailable):
            await insert(store, task(store))
        other.run("ROLLBACK")
        other.close()
        await stored(store, task(store))
        await store.close()

    async def test_a_full_disk_acknowledges_nothing_that_it_has_no_room_for(self, store):
        def limit(pages):
            def work(connection):
                (count,) = connection.run("PRAGMA page_count")[0]
                connection.run(f"PRAGMA max_page_count = {count + pages}")

            return store._write(Rank.CLAIM, work)

        await stored(store, task(store))
        await limit(200)
        acknowledged, refused = [], []
        while not refused:
            tasks = [task(store, body=b"x" * 20_000) for _ in range(10)]
            answers = await asyncio.gather(
                *[insert(store, one) for one in tasks], return_exceptions=True
            )
            for one, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, Exception):
                    assert isinstance(answer, StoreUnavailable), answer
                    refused.append(one)
                else:
                    acknowledged.append(one)
        assert acknowledged
        assert await store.get(ids_of(acknowledged)) == acknowledged
        assert await store.get(ids_of(refused)) == [None] * len(refused)
        await limit(100_000)
        assert await insert(store, *refused) == refused

    @pytest.mark.parametrize("what", ["file", "directory"])
    async def test_what_may_not_be_written_to_is_unavailable(self, place, child, what):
        text = """
async def main():
    try:
        await store.open()
        said(len(await store.get(["0" * 32])))
        await stored(store, task(store))
    except StoreUnavailable as error:
        said("unavailable", path in str(error))
    await store.close()
import concurrent.futures.thread  # what is imported later may be out of reach
if os.getuid() == 0:
    os.setuid(65534)  # root may write to everything
asyncio.run(main())
"""
        directory = Path(tempfile.mkdtemp())
        try:
            there = replace(place, address=str(directory / "tasks.db"))
            store = there.store()
            if what == "file":
                await store.open()
                await store.close()
                store.path.chmod(0o444)
            directory.chmod(0o555)
            said = await ended_well(child(text, there))
            assert said[-1] == "unavailable True"
            directory.chmod(0o755)
            if what == "file":
                store.path.chmod(0o644)
            await store.open()
            await stored(store, task(store))
            await store.close()
        finally:
            shutil.rmtree(directory)

    async def test_a_file_that_is_no_database_is_left_alone(self, place):
        text = b"Dear diary, " * 1_000
        Path(place.address).write_bytes(text)
        store = place.store()
        with pytest.raises(StoreUnavailable, match="not a database"):
            await store.open()
        await store.close()
        assert Path(place.address).read_bytes() == text

    async def test_a_file_that_cannot_be_used_is_closed_again(self, place):
        path = Path(place.address).resolve()
        path.write_bytes(b"Dear diary, " * 1_000)
        with pytest.raises(StoreUnavailable) as failure:  # which keeps the frames that failed
            await place.store().open()
        assert path not in [each.resolve() for each in Path("/proc/self/fd").iterdir()]
        del failure

    async def test_an_empty_file_becomes_a_database(self, place):
        Path(place.address).touch()
        store = place.store()
        await store.open()
        await stored(store, task(store))
        await store.close()

    async def test_a_directory_is_unavailable(self, place):
        Path(place.address).mkdir()
        store = place.store()
        with pytest.raises(StoreUnavailable, match="is a directory") as refused:
            await store.open()
        assert place.address in str(refused.value)
        await store.close()

    async def test_a_path_below_a_file_is_unavailable(self, place):
        Path(place.address).touch()
        store = replace(place, address=f"{place.address}/below/tasks.db").store()
        with pytest.raises(StoreUnavailable, match="below"):
            await store.open()
        await store.close()

    async def test_a_missing_directory_is_unavailable_and_not_made(self, place):
        directory = Path(place.address).parent / "a" / "b"
        store = replace(place, address=f"{directory}/tasks.db").store()
        with pytest.raises(StoreUnavailable, match=f"the directory {directory} does not exist$"):
            await store.open()
        assert not directory.parent.exists()
        await store.close()

    async def test_a_relative_path_without_its_directory_shows_the_absolute_form(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        store = SqliteStore(Path("var/lib/tasks.db"))
        with pytest.raises(StoreUnavailable) as refused:
            await store.open()
        assert f"the directory {tmp_path}/var/lib does not exist" in str(refused.value)
        assert "sqlite:////var/lib/tasks.db" in str(refused.value)
        assert not [*tmp_path.iterdir()]
        await store.close()

    async def test_a_new_file_is_logged_with_its_absolute_path(self, tmp_path, monkeypatch, caplog):
        monkeypatch.chdir(tmp_path)
        store = SqliteStore(Path("tasks.db"))
        with caplog.at_level("INFO", "tickwheel"):
            await store.open()
        await store.close()
        assert f"there was no store at {tmp_path}/tasks.db: a new one was made" in caplog.text

    async def test_a_file_that_was_moved_away_is_unavailable(self, store):
        (kept,) = await stored(store, task(store))
        elsewhere = store.path.with_suffix(".away")
        store.path.rename(elsewhere)
        with pytest.raises(StoreUnavailable):
            await insert(store, task(store))
        elsewhere.rename(store.path)
        second = task(store)
        assert await insert(store, second) == [second]
        assert len(await everything(store)) == 2
        assert kept in await everything(store)

    async def test_a_store_whose_opening_failed_can_be_opened_later(self, place):
        Path(place.address).mkdir()
        store = place.store()
        with pytest.raises(StoreUnavailable):
            await store.open()
        Path(place.address).rmdir()
        await store.open()
        assert await everything(store) == []
        await store.close()

    async def test_an_unknown_driver_is_named(self, tmp_path):
        with pytest.raises((ValueError, LookupError), match="oracle"):
            SqliteStore(tmp_path / "tasks.db", driver="oracle")


class TestSubmitsOfOthers:
    async def test_two_processes_that_write_all_the_time_both_get_on(self, store, child):
        text = """
async def main():
    await store.open()
    for number in range(100):
        await stored(store, task(store, body=b"x" * 1000))
    await store.close()
asyncio.run(main())
"""
        others = [child(text) for _ in range(2)]
        waiting = asyncio.gather(*[ended_well(one) for one in others])
        ours = 0
        while not waiting.done():
            answers = await insert(store, task(store))
            assert isinstance(answers[0], Task)
            ours += 1
            await asyncio.sleep(0)
        await waiting
        assert (await store.counts())["live"] == 200 + ours


class TestUsersConnection:
    async def test_a_users_transaction_needs_postgres(self, store):
        with pytest.raises(TypeError, match="PostgreSQL"):
            await store.within(object(), Submission(task(store)))
        with pytest.raises(TypeError, match="PostgreSQL"):
            store.within_now(object(), Submission(task(store)))
        assert await everything(store) == []


async def test_the_holder_of_a_key_is_read_once_for_all_in_a_batch_that_meet_it(store, monkeypatch):
    """A row with a large payload costs a walk over all its pages."""
    [holder] = await stored(store, task(store, key="k"))
    looked_up, insert_keyed = [], sqlite_insert.insert_keyed

    def counting(connection, submissions, places, answers):
        looked_up.extend(places)
        insert_keyed(connection, submissions, places, answers)

    monkeypatch.setattr(sqlite_insert, "insert_keyed", counting)
    hows = ["reject", "keep", "reject", "replace", "keep", "reject"]
    tasks = [task(store, key="k", late=-HOUR, priority=number) for number in range(len(hows))]
    answers = await store.insert(list(map(Submission, tasks, hows)), {})
    assert looked_up == [0, 3, 4]
    assert [one.holder.priority for one in answers if not isinstance(one, Task)] == [0, 0, 0, 3, 3]
    assert answers[3].id == holder.id
