"""The writer: commits in groups, ranks, jobs that fail alone, and its end."""

import asyncio
import threading

import pytest
import pytest_asyncio

from contracts.stores import Place, insert, task, watchdog
from stage import HandClock
from tickwheel.durable.stores.sqlite import connection as sqlite_connection
from tickwheel.durable.stores.sqlite import writer as sqlite_writer
from tickwheel.durable.stores.sqlite.connection import BUSY_MS, DRIVERS, LOOK_SECONDS, ForkSafe
from tickwheel.durable.stores.sqlite.writer import (
    BREATH_SECONDS,
    GROUP_BYTES,
    GROUP_SECONDS,
    URGENT_SECONDS,
    Checkpointer,
    Rank,
    Writer,
)
from tickwheel.errors import StoreUnavailable

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _watched():
    with watchdog():
        yield


@pytest.fixture(params=sorted(DRIVERS))
def connect(request, tmp_path):
    """Connects to a file with a table of words."""

    def connect():
        return DRIVERS[request.param](str(tmp_path / "words.db"))

    connection = connect()
    connection.run("CREATE TABLE word (text TEXT NOT NULL UNIQUE)")
    connection.close()
    return connect


class Gate:
    """A job that holds the writer until it is opened, so that others queue behind it."""

    def __init__(self):
        self._entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, connection):
        self._entered.set()
        assert self._opened.wait(30)

    async def entered(self):
        await asyncio.to_thread(self._entered.wait, 30)

    def open(self):
        self._opened.set()


class Witness:
    """A writer on a connection, and what was committed when."""

    def __init__(self, connect):
        self.commits_heard = 0
        self.writer = Writer(ForkSafe(connect), lambda: None, self._committed)
        self.writer.start()

    def _committed(self):
        self.commits_heard += 1

    def add(self, rank, text):
        """Return a job that inserts `text` and returns it."""

        def work(connection):
            connection.run("INSERT INTO word VALUES (?)", (text,))
            return text

        return self.writer.write(rank, work)

    def words(self):
        """All words, in the order in which they were written."""
        return self.writer.write(
            Rank.SUBMIT,
            lambda connection: [
                text for (text,) in connection.run("SELECT text FROM word ORDER BY rowid")
            ],
        )

    async def held(self):
        """Keep the writer busy until the gate is opened; later writes wait."""
        gate = Gate()
        job = self.writer.write(Rank.CLAIM, gate)
        await gate.entered()
        return gate, job


@pytest_asyncio.fixture
async def witness(connect):
    witness = Witness(connect)
    yield witness
    await witness.writer.stop()


class TestGroups:
    async def test_what_queued_during_a_commit_goes_into_the_next(self, witness):
        witness.writer._clock = HandClock()  # a group has all the time it needs
        jobs = [witness.add(Rank.SUBMIT, f"w{number}") for number in range(200)]
        gate, job = await witness.held()
        before = witness.writer.commits
        jobs += [witness.add(Rank.SUBMIT, f"x{number}") for number in range(200)]
        gate.open()
        await job
        assert await asyncio.gather(*jobs[200:]) == [f"x{number}" for number in range(200)]
        assert witness.writer.commits - before == 1
        assert len(await witness.words()) == 400

    async def test_many_submits_at_once_share_few_commits(self, tmp_path):
        for driver in DRIVERS:
            store = Place(f"sqlite-{driver}", str(tmp_path / f"{driver}.db")).store()
            await store.open()
            store._file.writer._clock = HandClock()
            tasks = [task(store) for _ in range(500)]
            gate = Gate()
            job = store._file.writer.write(Rank.CLAIM, gate)
            await gate.entered()
            before = store._file.writer.commits
            inserting = asyncio.gather(*[insert(store, one) for one in tasks])
            await asyncio.sleep(0)
            gate.open()
            await job
            assert await inserting == [[one] for one in tasks]
            assert store._file.writer.commits - before <= 2
            await store.close()

    async def test_a_group_ends_when_its_time_is_over(self, witness):
        clock = witness.writer._clock = HandClock()
        gate, job = await witness.held()

        def slow(connection):
            clock.add(GROUP_SECONDS * 0.6)

        jobs = [witness.writer.write(Rank.SUBMIT, slow) for _ in range(6)]
        before = witness.writer.commits
        gate.open()
        await asyncio.gather(job, *jobs)
        # One with the gate, which is a claim; then two each.
        assert witness.writer.commits - before == 4

    async def test_a_group_ends_when_its_payloads_are_many_bytes(self, witness):
        witness.writer._clock = HandClock()
        gate, job = await witness.held()
        half = GROUP_BYTES // 2
        jobs = [witness.writer.write(Rank.SUBMIT, lambda _: None, half) for _ in range(6)]
        before = witness.writer.commits
        gate.open()
        await asyncio.gather(job, *jobs)
        assert witness.writer.commits - before == 3

    @pytest.mark.parametrize("rank", [Rank.CLAIM, Rank.OUTCOME])
    async def test_a_commit_that_a_claim_waits_for_takes_one_long_submit(self, witness, rank):
        clock = witness.writer._clock = HandClock()
        committed = []

        def slow(connection):
            clock.add(URGENT_SECONDS * 1.1)
            committed.append(witness.writer.commits)

        gate, job = await witness.held()
        submits = [witness.writer.write(Rank.SUBMIT, slow) for _ in range(3)]
        gate.open()
        await asyncio.gather(job, *submits)
        assert committed == [committed[0], committed[0] + 1, committed[0] + 1]

        gate, job = await witness.held()
        submit = witness.writer.write(Rank.SUBMIT, slow)
        urgent = witness.writer.write(rank, lambda _: witness.writer.commits)
        gate.open()
        assert await urgent == witness.writer.commits - 1  # the gate's own commit has it
        await asyncio.gather(job, submit)

    async def test_a_lock_that_was_long_in_coming_is_used(self, witness):
        """Waiting for another process is not the group's time: else it never gets to work."""
        clock = witness.writer._clock = HandClock()
        begin = witness.writer._begin
        waits = iter([GROUP_SECONDS * 2] * 3)

        def late():
            begin()
            clock.add(next(waits, 0))

        witness.writer._begin = late
        assert await witness.add(Rank.SUBMIT, "a") == "a"
        assert len(list(waits)) == 2

    async def test_the_checkpointer_hears_of_each_commit(self, witness):
        await witness.add(Rank.SUBMIT, "a")
        await witness.add(Rank.SUBMIT, "b")
        await witness.words()
        assert witness.commits_heard >= 2

    async def test_the_checkpointer_ends_whenever_it_is_stopped(self, connect, monkeypatch):
        """Between the last look whether it shall end and the next wait, too."""
        monkeypatch.setattr(sqlite_writer, "CHECKPOINT_SECONDS", 0)
        checkpointer = Checkpointer(ForkSafe(connect), lambda: None)
        at_it, released = threading.Event(), threading.Event()
        clear = checkpointer._written.clear

        def clear_late():
            at_it.set()
            released.wait()
            clear()

        checkpointer._written.clear = clear_late
        checkpointer.notify_written()
        await asyncio.to_thread(at_it.wait)
        ending = asyncio.ensure_future(checkpointer.stop())
        await asyncio.sleep(0)
        released.set()
        await ending

    async def test_an_answer_comes_after_its_commit(self, witness, connect):
        other = connect()
        for number in range(20):
            await witness.add(Rank.SUBMIT, f"w{number}")
            (count,) = other.run("SELECT count(*) FROM word")[0]
            assert count == number + 1
        other.close()


class TestRanks:
    async def test_claims_then_outcomes_then_submits_each_in_their_order(self, witness):
        witness.writer._clock = HandClock()
        gate, job = await witness.held()
        jobs = [
            witness.add(rank, f"{rank.name} {number}")
            for number in range(3)
            for rank in (Rank.SUBMIT, Rank.OUTCOME, Rank.CLAIM)
        ]
        gate.open()
        await asyncio.gather(job, *jobs)
        assert await witness.words() == [
            f"{rank.name} {number}"
            for rank in (Rank.CLAIM, Rank.OUTCOME, Rank.SUBMIT)
            for number in range(3)
        ]


class TestFailures:
    async def test_a_job_that_fails_fails_alone(self, witness):
        witness.writer._clock = HandClock()
        await witness.add(Rank.SUBMIT, "there")
        gate, job = await witness.held()
        words = ["a", "there", "b", "c", "there", "d"]
        jobs = [witness.add(Rank.SUBMIT, word) for word in words]
        gate.open()
        answers = await asyncio.gather(job, *jobs, return_exceptions=True)
        failed = [isinstance(answer, Exception) for answer in answers[1:]]
        assert failed == [word == "there" for word in words]
        assert await witness.words() == ["there", "a", "b", "c", "d"]

    async def test_a_job_that_fails_half_way_leaves_nothing(self, witness):
        def half(connection):
            connection.run("INSERT INTO word VALUES ('half')")
            raise LookupError("no more")

        with pytest.raises(LookupError, match="no more"):
            await witness.writer.write(Rank.SUBMIT, half)
        assert await witness.words() == []

    async def test_a_file_that_is_not_there_any_more_fails_all_that_wait(self, connect):
        gone = False

        def check():
            if gone:
                raise StoreUnavailable("gone")

        writer = Writer(ForkSafe(connect), check, lambda: None)
        writer.start()
        gate = Gate()
        job = writer.write(Rank.CLAIM, gate)
        await gate.entered()
        writer._clock = HandClock(1e9)  # the gate's group is over: the rest needs another
        jobs = [writer.write(Rank.SUBMIT, lambda connection: 1) for _ in range(5)]
        gone = True
        gate.open()
        answers = await asyncio.gather(job, *jobs, return_exceptions=True)
        assert answers[0] is None
        assert {str(answer) for answer in answers[1:]} == {"gone"}
        gone = False
        assert await writer.write(Rank.SUBMIT, lambda connection: 2) == 2
        await writer.stop()

    async def test_a_caller_that_went_away_harms_nobody(self, witness):
        gate, job = await witness.held()
        gone, stays = witness.add(Rank.SUBMIT, "gone"), witness.add(Rank.SUBMIT, "stays")
        gone.cancel()
        gate.open()
        assert (await job, await stays) == (None, "stays")

    async def test_what_its_caller_gave_up_before_it_began_is_not_done(self, witness):
        """Nobody would hear of a claim that is made after all."""
        gate, job = await witness.held()
        gone, stays = witness.add(Rank.CLAIM, "gone"), witness.add(Rank.SUBMIT, "stays")
        gone.cancel()
        gate.open()
        assert (await job, await stays) == (None, "stays")
        assert await witness.words() == ["stays"]

    async def test_what_was_given_up_while_the_file_was_locked_is_not_done(self, witness, connect):
        other = connect()
        other.run("BEGIN IMMEDIATE")
        gone = witness.add(Rank.CLAIM, "gone")
        stays = witness.add(Rank.SUBMIT, "stays")
        gone.cancel()
        other.run("COMMIT")
        other.close()
        assert await stays == "stays"
        assert await witness.words() == ["stays"]


class TestStop:
    async def test_what_is_queued_is_finished_first(self, witness):
        gate, job = await witness.held()
        jobs = [witness.add(Rank.SUBMIT, f"w{number}") for number in range(50)]
        stopping = asyncio.ensure_future(witness.writer.stop())
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="closed"):
            witness.add(Rank.SUBMIT, "too late")
        gate.open()
        await stopping
        await job
        assert await asyncio.gather(*jobs) == [f"w{number}" for number in range(50)]

    async def test_stopping_twice_is_no_error(self, witness):
        await witness.writer.stop()
        await witness.writer.stop()

    async def test_its_connection_is_closed(self, witness):
        connection = witness.writer._own.get()
        await witness.writer.stop()
        with pytest.raises(Exception, match=r"(?i)closed"):
            connection.run("SELECT 1")


class TestOtherProcesses:
    """Another process writes to the same file."""

    async def test_the_lock_is_looked_for_until_it_is_free(self, connect, monkeypatch):
        other, ours = connect(), connect()
        other.run("BEGIN IMMEDIATE")
        ours.run(sqlite_connection.NO_WAITING)
        waits = []

        def sleep(seconds):
            waits.append(seconds)
            if len(waits) == 10:
                other.run("COMMIT")

        monkeypatch.setattr(sqlite_connection.time, "sleep", sleep)
        sqlite_connection.begin(ours)
        assert waits == [LOOK_SECONDS] * 10
        ours.run("COMMIT")
        for one in (other, ours):
            one.close()

    async def test_one_that_is_never_free_is_an_error(self, connect, monkeypatch):
        other, ours = connect(), connect()
        other.run("BEGIN IMMEDIATE")
        ours.run(sqlite_connection.NO_WAITING)
        waits = []
        monkeypatch.setattr(sqlite_connection.time, "sleep", waits.append)
        with pytest.raises(StoreUnavailable, match=r"(?i)locked|busy"):
            sqlite_connection.begin(ours)
        assert sum(waits) == pytest.approx(BUSY_MS / 1000, abs=0.01)
        for one in (other, ours):
            one.close()

    @pytest.mark.parametrize("polite", [True, False])
    async def test_commit_upon_commit_it_lets_others_in(self, witness, monkeypatch, polite):
        witness.writer.polite = polite
        clock = witness.writer._clock = HandClock()
        gate, job = await witness.held()
        witness.writer._rested = clock.time()
        breaths = []
        monkeypatch.setattr(witness.writer._breath, "wait", breaths.append)

        def long(connection):
            clock.add(GROUP_SECONDS * 1.1)  # a group of its own

        jobs = [witness.writer.write(Rank.SUBMIT, long) for _ in range(4)]
        gate.open()
        await asyncio.gather(job, *jobs)
        await witness.writer.stop()
        assert breaths == ([BREATH_SECONDS] * 4 if polite else [])

    async def test_whoever_dispatches_makes_no_pauses(self, tmp_path):
        store = Place("sqlite-sqlite3", str(tmp_path / "tasks.db")).store()
        await store.open()
        assert store._file.writer.polite
        store.notifications.subscribe_due(lambda: None)
        assert not store._file.writer.polite
        await store.close()
