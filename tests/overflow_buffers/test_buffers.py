"""Overflow buffers on servers: what is special about each. The contract has its own suite."""

import concurrent.futures
import sqlite3
import subprocess
import sys

import pytest

from stage import LONG
from tickwheel import Wheel
from tickwheel import overflow_buffers as buffers
from tickwheel.durable.stores.sqlite import connection as sqlite_connection
from tickwheel.errors import StoreUnavailable
from tickwheel.overflow_buffers import PostgresBuffer, RedisBuffer, SqliteBuffer
from tickwheel.overflow_buffers import postgres as on_postgres
from tickwheel.overflow_buffers import sqlite as on_sqlite

MANY = 5_000


def filled(buffer, count=20):
    """A wheel whose entries are all in `buffer`."""
    wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
    wheel.schedule_many(range(600, 600 + count), range(count))
    return wheel


class TestThePackage:
    def test_it_names_the_three(self):
        assert buffers.__all__ == ["PostgresBuffer", "RedisBuffer", "SqliteBuffer"]
        with pytest.raises(AttributeError, match="MemcachedBuffer"):
            _ = buffers.MemcachedBuffer

    def test_a_driver_is_imported_with_its_buffer_only(self):
        text = """
import sys
from tickwheel.overflow_buffers import SqliteBuffer
print([name for name in ("asyncpg", "redis") if name in sys.modules])
"""
        said = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=LONG, check=True
        )
        assert said.stdout == "[]\n"


class Counted:
    """Counts the statements of a buffer, by name."""

    NAMES = (
        "_insert",
        "_remove",
        "_remove_until",
        "_replace",
        "_smallest_expiry",
        "_count_rows",
        "_rows_of_others",
    )

    def __init__(self, buffer):
        self.names = []
        for name in self.NAMES:
            setattr(buffer, name, self._wrapped(name, getattr(buffer, name)))

    def _wrapped(self, name, statement):
        def counted(*arguments):
            self.names.append(name)
            return statement(*arguments)

        return counted

    def since(self):
        names, self.names = self.names, []
        return names


class TestStatements:
    @pytest.fixture
    def buffer(self, tmp_path):
        with SqliteBuffer(tmp_path / "overflow.db") as buffer:
            yield buffer

    def test_each_verb_is_one_and_looking_is_none_when_the_answer_is_known(self, buffer):
        counted = Counted(buffer)
        wheel = filled(buffer)
        assert counted.since() == ["_insert"] * 20
        assert len(buffer) == 20
        assert buffer.next_expiry() == 600
        assert buffer.take(600) == []
        assert counted.since() == []
        taken = buffer.take(605)
        assert len(taken) == 5
        assert counted.since() == ["_remove_until"]
        assert buffer.next_expiry() == 605
        assert buffer.next_expiry() == 605
        assert counted.since() == ["_smallest_expiry"]
        last = wheel.schedule(900, "last")
        buffer.discard(last)
        assert buffer.next_expiry() == 605
        assert counted.since() == ["_insert", "_remove"]

    def test_a_hand_over_of_a_wheel_is_one_statement_however_many_entries(self, buffer):
        wheel = filled(buffer, 300)
        counted = Counted(buffer)
        wheel.advance(600)
        assert counted.since().count("_remove_until") <= 600 // 64

    def test_an_empty_one_asks_nothing_of_the_server(self, tmp_path):
        buffer = SqliteBuffer(tmp_path / "nowhere" / "overflow.db")
        assert buffer.next_expiry() is None
        assert buffer.take(2**63) == []
        assert len(buffer) == 0
        with pytest.raises(StoreUnavailable, match="nowhere"):
            filled(buffer)


class TestSqlite:
    @pytest.fixture(params=sqlite_connection.DRIVERS)
    def path(self, tmp_path, monkeypatch, request):
        monkeypatch.setattr(on_sqlite, "default_driver", lambda: request.param)
        return tmp_path / "overflow.db"

    @pytest.mark.parametrize(
        "statement", ["REMOVE_UNTIL", "NEXT_EXPIRY", "REMOVE", "ROWS", "OTHERS"]
    )
    def test_every_statement_goes_by_an_index(self, path, statement):
        with SqliteBuffer(path) as buffer:
            filled(buffer)
        text = getattr(on_sqlite, statement)
        connection = sqlite3.connect(path)
        plan = connection.execute(f"EXPLAIN QUERY PLAN {text}", [1] * text.count("?")).fetchall()
        connection.close()
        steps = [step for *_, step in plan]
        assert all(step.startswith("SEARCH") for step in steps), steps
        if statement in ("REMOVE_UNTIL", "NEXT_EXPIRY"):
            assert "INDEX tickwheel_overflow_expiry (name=? AND owner=?" in steps[0]

    @pytest.mark.usefixtures("waits_for_disk")
    def test_what_it_acknowledges_is_on_the_disk(self, path):
        with SqliteBuffer(path) as buffer:
            filled(buffer)
            assert buffer._own.get().run("PRAGMA journal_mode") == [("wal",)]
            assert buffer._own.get().run("PRAGMA synchronous") == [(2,)]

    def test_a_file_that_is_no_database_is_said_to_be_none(self, path):
        path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
        with SqliteBuffer(path) as buffer, pytest.raises(StoreUnavailable, match="not a database"):
            filled(buffer)

    def test_a_path_may_be_text_or_a_path(self, path):
        for given in (path, str(path)):
            with SqliteBuffer(given) as buffer:
                filled(buffer, 1)
        with SqliteBuffer(path) as buffer:
            assert len(buffer._rows_of_others()) == 2

    def test_closed_it_leaves_one_file_and_what_it_held_comes_back(self, path):
        with SqliteBuffer(path) as buffer:
            filled(buffer)
        assert list(path.parent.iterdir()) == [path]
        with SqliteBuffer(path) as buffer:
            wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
            assert buffer.restore(wheel) == 20
            assert wheel.advance(1000) == list(range(20))

    def test_several_may_make_the_tables_at_once(self, path):
        def use(_):
            with SqliteBuffer(path, "shared") as buffer:
                filled(buffer, 3)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(use, range(8)))
        with SqliteBuffer(path, "shared") as buffer:
            assert len(buffer._rows_of_others()) == 24


class TestPostgres:
    @pytest.fixture
    def full(self, postgres_url):
        """Enough rows that a plan without an index would be dear."""
        with PostgresBuffer(postgres_url) as buffer:
            filled(buffer)
            row = "VALUES" + ",".join(
                f"('{name}', 'owner {n}', {n}, {n}, '1')"
                for name in ("default", "other")
                for n in range(MANY)
            )
            buffer._run(lambda server: server.execute(f"INSERT INTO tickwheel_overflow {row}"))
            buffer._run(lambda server: server.execute("ANALYZE tickwheel_overflow"))
            yield buffer

    @pytest.mark.parametrize("statement", ["REMOVE_UNTIL", "NEXT_EXPIRY", "REMOVE"])
    def test_the_hot_statements_go_by_an_index(
        self, full, postgres_url, postgres_server, statement
    ):
        text = getattr(on_postgres, statement)
        values = [f"'{full.name}'", f"'{full._owner}'", "605"][: text.count("$")]
        database = postgres_url.rpartition("/")[2]
        plan = postgres_server.execute(
            f"PREPARE hot AS {text}; EXPLAIN EXECUTE hot ({', '.join(values)})", database
        )
        index = "tickwheel_overflow_pkey" if statement == "REMOVE" else "tickwheel_overflow_expiry"
        assert index in plan, plan
        assert "Seq Scan" not in plan, plan
        assert "Sort" not in plan, plan
        assert full.next_expiry() == 600

    def test_several_may_make_the_tables_at_once(self, postgres_url):
        def use(_):
            with PostgresBuffer(postgres_url, "shared") as buffer:
                filled(buffer, 3)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(use, range(8)))
        with PostgresBuffer(postgres_url, "shared") as buffer:
            assert len(buffer._rows_of_others()) == 24

    def test_a_table_that_was_dropped_is_made_and_filled_again(self, postgres_url):
        with PostgresBuffer(postgres_url) as buffer:
            wheel = filled(buffer)
            buffer._run(lambda server: server.execute("DROP TABLE tickwheel_overflow"))
            wheel.schedule(900, "last")
            with PostgresBuffer(postgres_url) as other:
                assert len(other._rows_of_others()) == 21
            assert wheel.advance(1000) == [*range(20), "last"]

    def test_a_backend_that_was_terminated_is_not_noticed(self, postgres_url, postgres_server):
        with PostgresBuffer(postgres_url) as buffer:
            wheel = filled(buffer)
            postgres_server.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                f"WHERE datname = '{postgres_url.rpartition('/')[2]}'"
            )
            assert wheel.advance(1000) == list(range(20))

    def test_an_address_that_is_none_is_the_callers_error(self):
        with pytest.raises(ValueError, match="postgresql://"):
            PostgresBuffer("mysql://nowhere")

    def test_a_database_that_may_only_be_read_is_unavailable(self, postgres_url, postgres_server):
        with PostgresBuffer(postgres_url) as buffer:
            wheel = filled(buffer)
            database = postgres_url.rpartition("/")[2]
            alter = f"ALTER DATABASE {database} SET default_transaction_read_only"
            postgres_server.execute(f"{alter} = on")
            buffer._loop.run(buffer._close_connection())
            with pytest.raises(StoreUnavailable, match="read-only"):
                wheel.schedule(900, "refused")
            postgres_server.execute(f"{alter} = off")
            wheel.schedule(900, "last")
            assert wheel.advance(1000) == [*range(20), "last"]

    @pytest.mark.parametrize("schema", ["tickwheel", "own"])
    def test_the_table_is_in_a_schema_of_its_own(self, postgres_url, postgres_server, schema):
        url = postgres_url if schema == "tickwheel" else f"{postgres_url}?schema={schema}"
        with PostgresBuffer(url) as buffer:
            assert filled(buffer).advance(1000) == list(range(20))
        where = "SELECT schemaname FROM pg_tables WHERE tablename = 'tickwheel_overflow'"
        assert postgres_server.execute(where, postgres_url.rpartition("/")[2]) == schema

    def test_rows_of_the_version_before_are_found(self, postgres_url, postgres_server):
        database = postgres_url.rpartition("/")[2]
        with PostgresBuffer(f"{postgres_url}?schema=public", "shared") as buffer:
            filled(buffer, 3)
            with PostgresBuffer(f"{postgres_url}?schema=own", "shared") as named:
                assert len(named._rows_of_others()) == 0
            with PostgresBuffer(postgres_url, "shared") as later:
                assert len(later._rows_of_others()) == 3
        tables = "SELECT count(*) FROM pg_tables WHERE tablename = 'tickwheel_overflow'"
        assert postgres_server.execute(tables, database) == "2"

    def test_closed_it_leaves_no_connection_and_no_thread(self, postgres_url, postgres_server):
        buffer = PostgresBuffer(postgres_url)
        filled(buffer)
        buffer.close()
        assert not buffer._loop.running
        count = "SELECT count(*) FROM pg_stat_activity WHERE datname = "
        database = postgres_url.rpartition("/")[2]
        for _ in range(1000):  # the server needs a moment to see it
            if postgres_server.execute(f"{count}'{database}'") == "0":
                break
        else:
            pytest.fail("the connection is still there")


class TestRedis:
    def test_the_order_is_in_the_members_and_scores_are_nothing(self, redis_url):
        with RedisBuffer(redis_url) as buffer:
            wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
            wheel.schedule_many([2**63 - 1, 2**63 - 2, 600], "cba")
            found = buffer._client.zrange("tickwheel:overflow:{default}", 0, -1, withscores=True)
            assert [score for _, score in found] == [0.0] * 3
            expiries = [int(member.split(b":")[1]) for member, _ in found]
            assert expiries == [600, 2**63 - 2, 2**63 - 1]

    @pytest.mark.parametrize(
        "url", ["redis://host=h password=hunter2", "redis://password=hunter2", "host=h pw=hunter2"]
    )
    def test_a_url_that_is_none_is_refused_and_not_shown(self, url):
        with pytest.raises(ValueError, match="redis://") as raised:
            RedisBuffer(url)
        assert "hunter2" not in str(raised.value)

    def test_an_empty_one_leaves_no_key(self, redis_url):
        with RedisBuffer(redis_url) as buffer:
            wheel = filled(buffer)
            assert sorted(buffer._client.keys("*")) == [
                b"tickwheel:overflow:{default}",
                b"tickwheel:overflow:{default}:items",
            ]
            wheel.advance(1000)
            assert buffer._client.keys("*") == []

    def test_what_the_server_lost_is_stored_again(self, redis_url, redis_server):
        with RedisBuffer(redis_url) as buffer:
            wheel = filled(buffer)
            redis_server.execute("FLUSHALL")
            buffer._smallest = None
            assert buffer.next_expiry() == 600
            wheel.schedule(900, "last")
            with RedisBuffer(redis_url) as other:
                assert len(other._rows_of_others()) == 21
            assert wheel.advance(1000) == [*range(20), "last"]

    def test_scripts_that_the_server_forgot_are_sent_again(self, redis_url, redis_server):
        with RedisBuffer(redis_url) as buffer:
            wheel = filled(buffer)
            redis_server.execute("SCRIPT", "FLUSH")
            assert wheel.advance(1000) == list(range(20))

    def test_a_full_server_is_unavailable_and_nothing_has_changed(self, redis_url, redis_server):
        with RedisBuffer(redis_url) as buffer:
            wheel = filled(buffer)
            redis_server.execute("CONFIG", "SET", "maxmemory", "1")
            try:
                with pytest.raises(StoreUnavailable, match="maxmemory"):
                    wheel.schedule(900, "refused")
            finally:
                redis_server.execute("CONFIG", "SET", "maxmemory", "0")
            wheel._check()
            wheel.schedule(900, "last")
            assert wheel.advance(1000) == [*range(20), "last"]

    def test_many_are_read_in_pages(self, redis_url, monkeypatch):
        monkeypatch.setattr("tickwheel.overflow_buffers.redis.PAGE_MEMBERS", 7)
        with RedisBuffer(redis_url) as dead, RedisBuffer(redis_url) as buffer:
            filled(dead, 50)
            wheel = filled(buffer, 5)
            assert buffer.restore(wheel) == 50
            assert len(wheel.advance(1000)) == 55

    def test_an_address_that_is_none_is_the_callers_error(self):
        with pytest.raises(ValueError, match="scheme"):
            RedisBuffer("mysql://nowhere")
