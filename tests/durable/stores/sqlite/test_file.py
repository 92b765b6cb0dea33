"""A SQLite file that is restored, replaced, damaged or read-only while processes have it open.

The dispatching process logs it, and goes on as soon as the file can be used. Each worker runs in
its own process: two SQLite libraries in one process do not see each other's locks.
"""

import contextlib
import os
import shutil
import signal
import sqlite3
import tempfile
from pathlib import Path

import pytest

import servers
from durable.ledger import Ledger
from durable.worker import Worker
from servers import wait_until
from tickwheel.durable.stores.sqlite import file as sqlite_file
from tickwheel.durable.stores.sqlite.connection import DRIVERS, ForkSafe
from tickwheel.durable.stores.sqlite.file import SqliteFile, identity_of
from tickwheel.durable.stores.sqlite.schema import MIGRATIONS
from tickwheel.durable.stores.sqlite.writer import Rank
from web.serving import Served

pytestmark = pytest.mark.usefixtures("watched")

SHARDS = 64
VERSION_BEFORE_TAGS = 4
EPOCH = 10  # of every shard before a backup is restored
ORDINARY_USER = 65534 if os.geteuid() == 0 else None  # None: this process has an ordinary one
DAMAGED = "the database file is damaged"
QUICK_CHECKS = {
    "durable.coordinators.solo.CHECK_SECONDS": 0.2,
    "durable.stores.sqlite.file.CHECK_SECONDS": 0.2,
    "durable.stores.sqlite.file.REOPEN_SECONDS": 0.2,
}


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture(params=sorted(DRIVERS))
def driver(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tasks.db"


@pytest.fixture
def start(path, ledger, driver):
    """Starts workers on the file, and waits until they dispatch, unless they shall not."""
    with contextlib.ExitStack() as stack:

        def start(*, dispatches=True, **options):
            options = {"driver": driver, "constants": QUICK_CHECKS} | options
            worker = stack.enter_context(Worker(f"sqlite:///{path}", ledger, **options))
            wait_until(lambda: owned(worker) or not dispatches, "it dispatches")
            return worker

        yield start


def owned(worker):
    return worker.ask("stats")["owned"]


def copied(source, target):
    """Copy a database page by page, as `sqlite3 source '.backup target'` does."""
    with (
        contextlib.closing(sqlite3.connect(source, timeout=30)) as old,
        contextlib.closing(sqlite3.connect(target, timeout=30)) as new,
    ):
        old.backup(new)


def stop_between_commits(worker, path):
    """Stop a process while it has no lock on the file, which it would keep."""

    def stopped():
        os.kill(worker.pid, signal.SIGSTOP)
        wait_until(lambda: servers._stopped(worker.pid), "all its threads stand still")
        with contextlib.closing(sqlite3.connect(path, timeout=1, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                os.kill(worker.pid, signal.SIGCONT)
                return False
            other.execute("ROLLBACK")
            return True

    wait_until(stopped, "it is stopped between two commits")


def changed(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def is_sound(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def waiting_in_a_backup(path, start):
    """A backup with a task that is due, of a time when other processes dispatched; its id."""
    submitter = start(dispatch=False, dispatches=False)
    (task_id,) = submitter.ask("submit", delays=[0])
    submitter.stop()
    backup = path.with_name("backup.db")
    copied(path, backup)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE shard SET epoch = ?", (EPOCH,))
        database.execute("DELETE FROM task")
        database.commit()
    return backup, task_id


class Restored:
    """The ways to bring a backup back while processes have the file open."""

    @staticmethod
    def into_the_file(backup, path):
        copied(backup, path)

    @staticmethod
    def in_its_place(backup, path):
        fresh = path.with_name("fresh.db")
        shutil.copy(backup, fresh)
        fresh.rename(path)

    @staticmethod
    def after_all_was_removed(backup, path):
        for beside in path.parent.glob("tasks.db*"):
            beside.unlink()
        shutil.copy(backup, path)

    WAYS = (into_the_file, in_its_place, after_all_was_removed)


@pytest.fixture(params=Restored.WAYS, ids=lambda way: way.__name__)
def restore(request):
    return request.param


EACH_WAY = pytest.mark.parametrize(  # for what does not depend on the driver
    ("driver", "restore"), [*zip(["apsw", "sqlite3", "apsw"], Restored.WAYS, strict=True)],
    indirect=True, ids=lambda given: getattr(given, "__name__", given),
)  # fmt: skip


class TestRestored:
    def test_the_dispatcher_notices_says_it_and_takes_over_again(
        self, path, start, ledger, restore
    ):
        backup, task_id = waiting_in_a_backup(path, start)
        worker = start()
        (before,) = worker.ask("submit", delays=[3600])
        restore(backup, path)
        ledger.wait(lambda: ledger.done[task_id], "the task of the backup has run")
        with pytest.raises(RuntimeError, match="UnknownTask"):
            worker.ask("get", task_id=before)
        (after,) = worker.insist("submit", delays=[0])
        ledger.wait(lambda: ledger.done[after], "a new task has run")
        worker.ask("drain")
        worker.stop()
        assert "dispatches no more" in worker.said()
        assert is_sound(path)

    @EACH_WAY
    def test_epochs_that_it_had_are_never_given_again(self, path, start, ledger, restore):
        """An end that was meant for a task before would count for the one after."""
        backup, task_id = waiting_in_a_backup(path, start)
        worker = start()
        restore(backup, path)
        ledger.wait(lambda: ledger.done[task_id], "the task of the backup has run")
        worker.stop()
        with contextlib.closing(sqlite3.connect(path)) as database:
            epochs = database.execute("SELECT DISTINCT epoch FROM shard").fetchall()
        assert epochs == [(EPOCH + 2,)]  # taken at the start, and again

    @EACH_WAY
    def test_a_process_that_only_submits_goes_on_with_the_new_file(
        self, path, start, ledger, restore
    ):
        backup, task_id = waiting_in_a_backup(path, start)
        worker, submitter = start(), start(dispatch=False, dispatches=False)
        submitter.ask("submit", delays=[3600])
        restore(backup, path)
        ledger.wait(lambda: ledger.done[task_id], "the task of the backup has run")
        (after,) = submitter.insist("submit", delays=[0])
        ledger.wait(lambda: ledger.done[after], "what it submits runs")
        for one in (submitter, worker):
            one.stop()
        assert is_sound(path)

    @EACH_WAY
    def test_a_backup_of_an_older_version_is_brought_to_this_one(
        self, path, start, ledger, restore
    ):
        backup, task_id = waiting_in_a_backup(path, start)
        later = ["task.tags", "backlog.tags", "task.delivered_to", "attempt.delivered_to"]
        later += ["task.trace", "backlog.trace"]
        drops = ["ALTER TABLE {} DROP COLUMN {}".format(*one.split(".")) for one in later]
        drops.append("DROP INDEX task_time")
        changed(backup, *drops, f"PRAGMA user_version = {VERSION_BEFORE_TAGS}")
        worker = start()
        restore(backup, path)
        ledger.wait(lambda: ledger.done[task_id], "the task of the backup has run")
        worker.stop()
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)

    def test_what_was_only_in_the_log_stays_in_a_file_that_was_moved_away(
        self, path, start, ledger
    ):
        backup, task_id = waiting_in_a_backup(path, start)
        worker = start()
        (before,) = worker.ask("submit", delays=[3600])
        moved = path.rename(path.with_name("moved.db"))
        shutil.copy(backup, path)
        ledger.wait(lambda: ledger.done[task_id], "the task of the backup has run")
        worker.stop()
        with contextlib.closing(sqlite3.connect(moved)) as database:
            assert database.execute("SELECT id FROM task").fetchall() == [(before,)]

    def test_a_log_that_a_reader_still_needs_is_not_played_into_the_new_file(
        self, path, start, ledger
    ):
        backup, task_id = waiting_in_a_backup(path, start)
        worker = start()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM task").fetchall()
            (before,) = worker.ask("submit", delays=[3600])
            Restored.in_its_place(backup, path)
            ledger.wait(lambda: ledger.done[task_id], "the task of the backup has run")
            with pytest.raises(RuntimeError, match="UnknownTask"):
                worker.ask("get", task_id=before)
        worker.stop()
        assert is_sound(path)

    def test_the_file_of_another_program_is_left_alone(self, path, start, ledger):
        worker = start()
        (task_id,) = worker.ask("submit", delays=[3600])
        backup, other = path.with_name("backup.db"), path.with_name("other.db")
        copied(path, backup)
        changed(other, "CREATE TABLE users (name TEXT)")
        content = other.read_bytes()
        Restored.in_its_place(other, path)
        with pytest.raises(RuntimeError, match="StoreUnavailable"):
            worker.ask("submit", delays=[0])
        wait_until(lambda: "another program's" in worker.said(), "it says whose the file is")
        assert path.read_bytes() == content
        Restored.in_its_place(backup, path)
        (after,) = worker.insist("submit", delays=[0])
        ledger.wait(lambda: ledger.done[after], "it goes on")
        assert worker.ask("get", task_id=task_id)["state"] == "delay"
        worker.stop()


class TestLogRemoved:
    def test_what_was_acknowledged_is_kept(self, path, start, ledger):
        worker = start()
        ids = worker.ask("submit", delays=[3600] * 10)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink()
        (after,) = worker.insist("submit", delays=[0])
        ledger.wait(lambda: ledger.done[after], "it goes on")
        assert [worker.ask("get", task_id=one)["state"] for one in ids] == ["delay"] * 10
        assert "the log tasks.db-wal has been removed" in worker.said()
        worker.kill()
        assert is_sound(path)
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert {one for (one,) in database.execute("SELECT id FROM task")} >= set(ids)


class TestLockRemoved:
    def test_alone_it_takes_the_lock_again_and_says_so(self, path, start, ledger):
        worker = start()
        lock = path.with_name("tasks.db-lock")
        lock.unlink()
        wait_until(lock.exists, "there is a lock again")
        wait_until(lambda: owned(worker) == SHARDS, "it dispatches")
        (task_id,) = worker.ask("submit", delays=[0])
        ledger.wait(lambda: ledger.done[task_id], "it goes on")
        worker.stop()
        assert "tasks.db-lock was removed" in worker.said()

    def test_one_that_comes_then_dispatches_and_the_first_stands_by(self, path, start, ledger):
        first = start()
        stop_between_commits(first, path)  # it must not be quicker
        path.with_name("tasks.db-lock").unlink()
        second = start()
        os.kill(first.pid, signal.SIGCONT)
        wait_until(lambda: (owned(first), owned(second)) == (0, SHARDS), "one of them dispatches")
        ids = first.ask("submit", delays=[0] * 20)
        ledger.wait(lambda: all(ledger.done[one] for one in ids), "all have run")
        assert {ledger.runs[one][-1]["pid"] for one in ids} == {second.pid}
        second.kill()
        wait_until(lambda: owned(first) == SHARDS, "the first takes over")
        first.stop()

    def test_one_that_stands_by_waits_for_the_lock_that_has_the_name(self, path, start):
        """It waited for a lock on the removed file, which no process holds any more."""
        first, second = start(), start(dispatches=False)
        path.with_name("tasks.db-lock").unlink()
        wait_until(lambda: "tasks.db-lock was removed" in first.said(), "the first has noticed")
        wait_until(lambda: owned(first) == SHARDS, "it dispatches")
        assert owned(second) == 0
        first.kill()
        wait_until(lambda: owned(second) == SHARDS, "the second takes over")
        second.stop()
        assert "dispatches no more" not in second.said()


def damage(path):
    """Write nonsense over the tables of a file, as a broken disk does.

    All of it is in the file then, and stays there: pages in the log would be used instead.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        page = database.execute("PRAGMA page_size").fetchone()[0]
        wait_until(lambda: log_is_empty(database, path), "the log is empty, and nobody writes")
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            for place in range(page, size, page):
                file.seek(place)
                file.write(b"\xff" * 64)


def log_is_empty(database, path):
    """Move the log into the file and keep others from writing, if they let us."""
    try:
        busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        database.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:  # it is locked
        return False
    if busy or path.with_name(f"{path.name}-wal").stat().st_size:
        database.execute("ROLLBACK")
        return False
    return True


class TestDamaged:
    def test_it_is_said_loudly_and_nothing_is_dispatched(self, path, start, restore, ledger):
        backup, task_id = waiting_in_a_backup(path, start)
        worker = start()
        worker.ask("submit", delays=[3600])
        damage(path)
        wait_until(lambda: is_refused(worker), "a submit is refused")
        stopped = f"dispatches no more: {DAMAGED}"
        wait_until(lambda: stopped in worker.said(), "it dispatches no more")
        assert worker.said().count("DAMAGED") == 1
        restore(backup, path)
        ledger.wait(lambda: ledger.done[task_id], "the task of the backup has run")
        worker.insist("submit", delays=[0])
        worker.stop()
        assert "the file is sound, and used again" in worker.said()


def test_readiness_says_that_the_file_is_damaged(path, tmp_path):
    backup = path.with_name("backup.db")
    given = ("--store", f"sqlite:///{path}", "--allow-private-targets")
    with Served(*given, cwd=tmp_path, errors=True) as server:
        server.service()
        server.submit()
        wait_until(lambda: server.get("/readyz").status == 200, "it can do its work")
        copied(path, backup)
        damage(path)
        later = {"service": "mail", "delay": 3600}
        wait_until(lambda: server.post("/v1/tasks", later).status == 503, "a submit is refused")
        assert server.get("/readyz", status=503).json["reasons"] == [DAMAGED]
        server.post("/v1/tasks", later).refused(503, "store_unavailable")
        Restored.in_its_place(backup, path)
        wait_until(lambda: server.get("/readyz").status == 200, "it is ready again")
        server.submit()


def is_refused(worker):
    try:
        worker.ask("submit", delays=[3600])
    except RuntimeError as refused:
        assert "StoreUnavailable" in str(refused)
        return "damaged" in str(refused)
    return False


class TestReadOnly:
    """As an ordinary user: SQLite leaves read-only files behind, which root would pass over."""

    @pytest.fixture
    def path(self):
        directory = Path(tempfile.mkdtemp(prefix="tickwheel-readonly-"))
        if ORDINARY_USER is not None:
            os.chown(directory, ORDINARY_USER, ORDINARY_USER)
        yield directory / "tasks.db"
        shutil.rmtree(directory)

    @pytest.mark.parametrize("dispatch", [True, False])
    def test_a_process_that_starts_on_it_works_once_it_may_write(
        self, path, start, ledger, dispatch
    ):
        first = start(user=ORDINARY_USER)
        (task_id,) = first.ask("submit", delays=[3600])
        first.stop()
        path.chmod(0o444)
        worker = start(user=ORDINARY_USER, dispatch=dispatch, dispatches=False)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="StoreUnavailable: "):
                worker.ask("submit", delays=[0])
        assert worker.ask("get", task_id=task_id)["state"] == "delay"
        path.chmod(0o600)
        (after,) = worker.insist("submit", delays=[0])
        if dispatch:
            ledger.wait(lambda: ledger.done[after], "it goes on")
        worker.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("moment", ["after a close", "while the log is looked at"])
async def test_a_log_that_a_fork_removes_is_not_reported(path, driver, monkeypatch, moment):
    """A fork closes one connection after the other, while other threads check the file."""
    file = SqliteFile(path, DRIVERS[driver], SHARDS)
    await file.open()
    threads = [one for one in (file.writer, file.checkpointer, file.reader) if one is not None]

    def fork():
        for one in threads:
            one._own._before_fork()
        for one in threads:
            one._own._after_fork()

    async def write():
        await file.write(Rank.PRUNE, lambda connection: connection.run("SELECT 1"))

    fork()
    await write()  # only the writer has connected again
    checks = []
    close = ForkSafe.close

    def close_and_check(self):
        close(self)
        file._check()
        checks.append("passed")

    if moment == "after a close":
        monkeypatch.setattr(ForkSafe, "close", close_and_check)
        fork()
        assert checks == ["passed"] * len(threads)
    else:
        monkeypatch.setattr(sqlite_file, "identity_of", lambda path: fork() or identity_of(path))
        file._check()
    monkeypatch.undo()
    assert not Path(f"{path}-wal").exists()
    await write()
    assert Path(f"{path}-wal").exists()
    await file.close()
