"""The contract of an overflow buffer when its server fails, or an answer is lost."""

import itertools
import random
import threading

import pytest

import servers
from contracts.overflow_buffer.places import DURABLE, Place, on_cores
from stage import LONG
from tickwheel import Wheel
from tickwheel.durable.stores.sqlite import connection as sqlite_connection
from tickwheel.errors import StoreUnavailable
from tickwheel.overflow_buffers import rows


class Outage:
    """A server that can be taken away from its buffers and given back, with all that it has."""

    def __init__(self, place, down, up):
        self.place, self.down, self.up = place, down, up


@pytest.fixture(scope="module")
def mortal():
    """Servers to kill: by kind, started at the first use."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = {"postgres": servers.PostgresServer, "redis": servers.RedisServer}[kind]()
        return made[kind].start()

    yield get
    for server in made.values():
        server.close()


_databases = itertools.count(1)


def fresh_url(server):
    if isinstance(server, servers.RedisServer):
        server.execute("FLUSHALL")
        return server.url
    name = f"mortal_{next(_databases)}"
    server.execute(f"CREATE DATABASE {name}")
    return server.url_for(name)


@pytest.fixture(params=DURABLE)
def outage(request, tmp_path, mortal, monkeypatch):
    if request.param == "sqlite":
        monkeypatch.setattr(sqlite_connection, "BUSY_MS", 1)
        path = str(tmp_path / "overflow.db")
        place = Place("sqlite", path)
        place.buffer()._own.get()  # the file is there
        holder = sqlite_connection.DRIVERS[sqlite_connection.default_driver()](path)
        outage = Outage(
            place, lambda: holder.run("BEGIN EXCLUSIVE"), lambda: holder.run("ROLLBACK")
        )
        yield outage
        holder.close()
    else:
        server = mortal(request.param)
        place = Place(request.param, fresh_url(server))
        yield Outage(place, server.kill, server.start)
        server.start()
    place.close()


class TestWithoutTheServer:
    @on_cores("outage", *DURABLE)
    def test_each_verb_says_so_and_nothing_has_changed(self, outage, core):
        buffer = outage.place.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        far, near = wheel.schedule(600, "far"), wheel.schedule(5, "near")
        assert wheel.next_wakeup() == 5
        outage.down()
        for attempt in (
            lambda: wheel.schedule(700, "refused"),
            lambda: wheel.schedule_many([700, 800, 6], ["refused", "refused", "refused"]),
            lambda: far.cancel(),
            lambda: far.reschedule(700),
            lambda: far.reschedule(6),
            lambda: near.reschedule(700),
            lambda: buffer.restore(wheel),
        ):
            with pytest.raises(StoreUnavailable) as refused:
                attempt()
            assert refused.value.code == "store_unavailable"
            assert isinstance(refused.value, ConnectionError)
            assert (len(wheel), len(buffer)) == (2, 1)
            assert (far.expiry, near.expiry) == (600, 5)
            wheel._check()
        wheel.schedule(7, "needs no server").cancel()
        assert wheel.advance(130) == ["near"]
        with pytest.raises(StoreUnavailable):
            wheel.advance(130)
        wheel._check()
        outage.up()
        assert outage.place.stored() == [(600, "far")]
        wheel.schedule(700, "accepted")
        assert wheel.advance(700) == ["far", "accepted"]
        assert outage.place.stored() == []

    def test_a_long_outage_leaves_few_rows_in_doubt(self, outage, entries):
        buffer = outage.place.buffer()
        first, *others, last = entries(*range(10, 30))
        buffer.put(first)
        outage.down()
        for entry in others:
            with pytest.raises(StoreUnavailable):
                buffer.put(entry)
        assert len(buffer._doubtful) <= 1  # only the first put was sent
        outage.up()
        buffer.put(last)
        assert outage.place.stored() == [(10, "item 10"), (29, "item 29")]

    def test_it_may_be_made_and_wait_for_its_server(self, outage, entries):
        outage.down()
        buffer = outage.place.buffer()
        (entry,) = entries(10)
        assert len(buffer) == 0
        assert buffer.next_expiry() is None
        with pytest.raises(StoreUnavailable):
            buffer.put(entry)
        outage.up()
        buffer.put(entry)
        assert outage.place.stored() == [(10, "item 10")]

    @on_cores("outage", *DURABLE)
    def test_a_server_that_was_restarted_meanwhile_is_not_noticed(self, outage, core):
        buffer = outage.place.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        first = wheel.schedule(600, "a")
        for _ in range(2):
            outage.down()
            outage.up()
            wheel.schedule(700, "b")
            outage.down()
            outage.up()
            assert first.reschedule(601)
            outage.down()
            outage.up()
            assert wheel.next_expiry() == 601
        outage.down()
        outage.up()
        assert wheel.advance(601) == ["a"]
        assert wheel.advance(700) == ["b", "b"]
        assert outage.place.stored() == []

    @on_cores("outage", *DURABLE)
    def test_a_reschedule_that_is_cut_in_two_keeps_the_entry(self, outage, core):
        """The old row is gone, and the new one cannot be put: nor can the old one again."""
        buffer = outage.place.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        entry, _ = wheel.schedule(600, "a"), wheel.schedule(601, "b")
        discard = buffer.discard

        def discard_and_die(entry):
            discard(entry)
            outage.down()

        buffer.discard = discard_and_die
        with pytest.raises(StoreUnavailable):
            entry.reschedule(700)
        del buffer.discard
        assert (entry.expiry, len(wheel), len(buffer)) == (600, 2, 2)
        wheel._check()
        outage.up()
        assert wheel.next_expiry() == 600
        wheel.schedule(800, "c")
        assert outage.place.stored() == [(600, "a"), (601, "b"), (800, "c")]
        assert wheel.advance(1000) == ["a", "b", "c"]

    @on_cores("outage", *DURABLE)
    def test_a_batch_that_failed_halfway_leaves_nothing(self, outage, core):
        buffer = outage.place.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        put = buffer.put

        def put_and_die(entry):
            put(entry)
            outage.down()

        buffer.put = put_and_die
        with pytest.raises(StoreUnavailable):
            wheel.schedule_many([600, 700], "ab")
        del buffer.put
        outage.up()
        wheel.schedule(800, "c")
        assert outage.place.stored() == [(800, "c")]
        wheel._check()
        assert wheel.advance(1000) == ["c"]


STATEMENTS = ["_insert", "_remove", "_remove_until", "_replace"]


class Lossy:
    """Makes statements of a buffer fail: before the server did them, or only their answers."""

    def __init__(self, buffer, done):
        self.buffer, self.done, self.left = buffer, done, 0
        for name in STATEMENTS:
            setattr(buffer, name, self._wrapped(getattr(buffer, name)))

    def _wrapped(self, statement):
        def lossy(*arguments):
            if not self.left:
                return statement(*arguments)
            left, self.left = self.left - 1, 0  # a statement may be made of another one
            if self.done:
                statement(*arguments)
            self.left = left
            raise StoreUnavailable("the answer was lost")

        return lossy


@pytest.mark.parametrize("done", [True, False], ids=["answer-lost", "request-lost"])
class TestAnswersThatAreLost:
    @pytest.fixture
    def lossy(self, durable, core, done):
        buffer = durable.buffer()
        lossy = Lossy(buffer, done)
        lossy.wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        lossy.entries = lossy.wheel.schedule_many([600, 601, 650], "abc")
        lossy.all = buffer._tries  # this number of losses in a row is an error
        return lossy

    def check(self, durable, lossy, expected):
        """Check that exactly this is stored, kept and fired."""
        lossy.left = 0
        lossy.wheel.schedule(2000, "later").cancel()
        assert durable.stored() == expected
        assert len(lossy.buffer) == len(expected)
        lossy.wheel._check()
        fired = []
        while (time := lossy.wheel.next_wakeup()) is not None:
            fired += [(time, item) for item in lossy.wheel.advance(time)]
        assert [item for _, item in fired] == [item for _, item in expected]
        assert durable.stored() == []

    @on_cores("durable", *DURABLE)
    def test_one_is_made_good_in_silence(self, durable, lossy):
        a, b, _ = lossy.entries
        one = lossy.all - 1  # 0 for a file, which has no connection to open again
        lossy.left = one
        lossy.wheel.schedule(700, "d")
        lossy.left = one
        assert a.cancel() is True
        lossy.left = one
        assert b.reschedule(660) is True
        self.check(durable, lossy, [(650, "c"), (660, "b"), (700, "d")])

    @on_cores("durable", *DURABLE)
    def test_of_a_put(self, durable, lossy):
        lossy.left = lossy.all
        with pytest.raises(StoreUnavailable):
            lossy.wheel.schedule(700, "d")
        self.check(durable, lossy, [(600, "a"), (601, "b"), (650, "c")])

    @on_cores("durable", *DURABLE)
    def test_of_a_discard(self, durable, lossy):
        lossy.left = lossy.all
        with pytest.raises(StoreUnavailable):
            lossy.entries[1].cancel()
        self.check(durable, lossy, [(600, "a"), (601, "b"), (650, "c")])

    @on_cores("durable", *DURABLE)
    def test_of_a_take(self, durable, lossy):
        lossy.left = lossy.all
        with pytest.raises(StoreUnavailable):
            lossy.wheel.advance(140)
        self.check(durable, lossy, [(600, "a"), (601, "b"), (650, "c")])

    @on_cores("durable", *DURABLE)
    def test_of_the_settling_itself(self, durable, lossy):
        for _ in range(3):
            lossy.left = lossy.all + 2
            with pytest.raises(StoreUnavailable):
                lossy.entries[1].cancel()
            with pytest.raises(StoreUnavailable):
                lossy.wheel.schedule(700, "d")
        self.check(durable, lossy, [(600, "a"), (601, "b"), (650, "c")])

    @on_cores("durable", *DURABLE)
    def test_of_a_restore(self, durable, core, done, monkeypatch):
        monkeypatch.setattr(rows, "RESTORE_ROWS", 2)
        dead = durable.buffer()
        lost = core.Wheel(sizes=(8, 8, 8), overflow=dead)
        lost.schedule_many([600, 601, 602, 603, 604], "abcde")
        buffer = durable.buffer()
        lossy = Lossy(buffer, done)
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer, start=90)  # a and b fit on levels
        lossy.left = 2
        restored = 0
        for _ in range(10):
            try:
                restored += buffer.restore(wheel)
            except StoreUnavailable:
                continue
            break
        assert buffer.restore(wheel) == 0
        wheel._check()
        fits = [e for e in (600, 601, 602, 603, 604) if e - 90 < 512]
        assert durable.stored() == [(600 + n, "abcde"[n]) for n in range(len(fits), 5)]
        assert wheel.advance(604) == list("abcde")
        assert durable.stored() == []


class TestRealFaults:
    """Where the moment is chance, what must hold does not depend on it."""

    @pytest.mark.parametrize("kind", ["postgres", "redis"])
    def test_killed_at_any_moment_it_loses_and_doubles_nothing(self, mortal, kind):
        server = mortal(kind)
        place = Place(kind, fresh_url(server))
        buffer = place.buffer()
        wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
        over = threading.Event()

        def kill():
            try:
                for _ in range(4):
                    over.wait(0.1)
                    server.kill()
                    server.start()
            finally:
                over.set()

        killer = threading.Thread(target=kill)
        killer.start()
        chance, waiting, fired = random.Random(3), {}, []
        accepted = []
        for number in itertools.count():
            if over.is_set():
                break
            try:
                verb = chance.random()
                if verb < 0.6:
                    expiry = wheel.now + chance.randrange(513, 2000)
                    waiting[number] = wheel.schedule(expiry, number)
                    accepted.append(number)
                elif verb < 0.8 and waiting:
                    chosen = chance.choice(list(waiting))
                    if waiting[chosen].cancel():
                        accepted.remove(chosen)
                    del waiting[chosen]
                else:
                    fired += wheel.advance(wheel.now + chance.randrange(40))
            except StoreUnavailable:
                pass
        killer.join(LONG)
        server.start()
        wheel.schedule(wheel.now + 600, "probe").cancel()
        assert len(place.stored()) == len(buffer)
        wheel._check()
        while (time := wheel.next_wakeup()) is not None:
            fired += wheel.advance(time)
        assert sorted(fired) == accepted
        assert place.stored() == []
        place.close()

    @pytest.mark.parametrize("kind", ["postgres", "redis"])
    def test_standing_still_it_is_given_up_and_may_do_the_work_later(self, mortal, kind):
        server = mortal(kind)
        place = Place(kind, fresh_url(server))
        buffer = place.buffer(timeout=0.2)
        wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
        entries = wheel.schedule_many([600, 601, 650], "abc")
        assert wheel.next_wakeup() == 128
        server.pause()
        try:
            for attempt in (
                lambda: wheel.schedule(700, "d"),
                entries[1].cancel,
                lambda: wheel.advance(140),
            ):
                with pytest.raises(StoreUnavailable):
                    attempt()
        finally:
            server.resume()
        assert len(wheel) == len(buffer) == 3
        assert wheel.next_expiry() == 600
        assert wheel.advance(1000) == ["a", "b", "c"]
        wheel._check()
        place.close()
