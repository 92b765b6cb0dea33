"""The clock of the store on PostgreSQL: the database's time, from this host's clock."""

import time

import pytest

from contracts.stores import (
    HOUR,
    SECOND,
)
from durable.postgres_stage import ALL, opened, until
from tickwheel import ManualClock
from tickwheel.durable.store import Window
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres import store as postgres
from tickwheel.durable.stores.postgres.clock import DatabaseClock

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class TestTime:
    def clock(self):
        local = ManualClock(100.0)
        return local, DatabaseClock(local)

    async def test_it_is_the_databases_and_never_ahead_of_it(self, store):
        for _ in range(20):
            mine = store.now_ms()
            ((theirs,),) = await store.fetch(sql.CLOCK)
            assert mine <= theirs + 0.5  # as far as two clocks of one host drift apart
            assert mine > theirs - 5_000

    async def test_the_latest_that_it_can_be_is_never_behind_it(self, store):
        for _ in range(20):
            ((theirs,),) = await store.fetch(sql.CLOCK)
            latest = store.latest_ms()
            assert latest >= theirs - 0.5
            assert store.now_ms() <= latest + 0.5
            assert latest < theirs + 5_000

    async def test_the_latest_counts_from_when_the_question_was_sent(self):
        local, clock = self.clock()
        sent = clock.local_ms()
        local.advance(0.5)
        clock.sample(1_000_000.0, sent)
        assert clock.latest_ms() == 1_000_500.0
        local.advance(0.25)
        assert clock.latest_ms() == 1_000_750.0

    async def test_the_truth_is_between_the_two_and_the_quickest_answer_counts_for_both(self):
        local, clock = self.clock()
        for before, after in ((0.3, 0.2), (0.001, 0.4), (0.5, 0.001), (0.2, 0.2)):
            sent = clock.local_ms()
            local.advance(before)
            truth = 1_000_000.0 + clock.local_ms()
            local.advance(after)
            clock.sample(truth, sent)
            assert clock.now_ms() <= 1_000_000.0 + clock.local_ms() <= clock.latest_ms()
        assert clock.latest_ms() - clock.now_ms() == pytest.approx(2)

    async def test_old_answers_are_forgotten(self):
        local, clock = self.clock()
        for delay in (0.001, *[0.1] * 8):
            sent = clock.local_ms()
            local.advance(delay)
            clock.sample(1_000_000.0 + sent + delay * 500, sent)
        assert clock.latest_ms() - clock.now_ms() == pytest.approx(100)

    async def test_an_answer_counts_from_when_it_arrived(self):
        local, clock = self.clock()
        sent = clock.local_ms()
        local.advance(0.5)
        clock.sample(1_000_000.0, sent)
        assert clock.now_ms() == 1_000_000.0
        local.advance(0.25)
        assert clock.now_ms() == 1_000_250.0

    async def test_the_quickest_answer_counts(self):
        local, clock = self.clock()
        for delay in (0.5, 0.001, 0.2):
            sent, truth = clock.local_ms(), 1_000_000.0 + clock.local_ms()
            local.advance(delay)
            clock.sample(truth, sent)
        assert clock.now_ms() == pytest.approx(1_000_000.0 + clock.local_ms() - 1)

    async def test_a_step_forward_is_followed_at_once(self):
        _, clock = self.clock()
        for truth in (1_000.0, 1_000.0 + HOUR):
            clock.sample(truth, clock.local_ms())
        assert clock.now_ms() == clock.latest_ms() == 1_000.0 + HOUR

    async def test_a_step_back_is_followed_at_once(self):
        _, clock = self.clock()
        for truth in (1_000.0 + HOUR, 1_000.0):
            clock.sample(truth, clock.local_ms())
        assert clock.now_ms() == clock.latest_ms() == 1_000.0

    async def test_it_goes_on_while_the_machine_is_suspended(self, store, monkeypatch):
        read, before = time.clock_gettime_ns, store.now_ms()
        monkeypatch.setattr(time, "clock_gettime_ns", lambda which: read(which) + HOUR * 1_000_000)
        assert store.now_ms() >= before + HOUR

    async def test_what_is_due_is_read_with_the_time(self, store):
        before = store.clock.sampled_ms
        assert await store.due([Window("mail", 1, 1)], ALL, 0, 1) == []
        assert store.clock.sampled_ms > before

    async def test_a_process_that_reads_nothing_looks_by_itself(self, postgres_url, monkeypatch):
        monkeypatch.setattr(postgres, "CLOCK_SECONDS", 0.01)
        async with opened(postgres_url) as store:
            before = store.clock.sampled_ms

            async def looked():
                return store.clock.sampled_ms > before

            await until(looked)

    async def test_the_offset_to_this_host_is_a_metric(self, store):
        assert abs(store.offset_ms) < 5 * SECOND
