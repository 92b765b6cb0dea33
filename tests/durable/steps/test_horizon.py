"""The horizon: due tasks, a clock that is set back, and random steps against a model."""

import os

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tickwheel.durable.steps import horizon as module
from tickwheel.durable.steps.horizon import Horizon
from tickwheel.values.task import Due, Ids

SERVICES = ["mail", "bill", "ship"]
SHARDS = 4
CAP = 40
WINDOW = 8
STEPS = int(os.environ.get("TICKWHEEL_HORIZON_STEPS", "60"))

numbers = st.integers(0, 59)
services = st.sampled_from(SERVICES)
soon_ms = st.integers(-20, 200)


class HorizonMachine(RuleBasedStateMachine):
    """Each task of the model is on the wheel, in a queue, taken, running, or not in memory."""

    def __init__(self):
        super().__init__()
        self.now = 1_000_000
        self.running = set()
        self.added = []
        self.known = {*SERVICES}
        self.horizon = Horizon(
            lambda: self.now, self.running, self.known, self.added.append, length_ms=100, cap=CAP
        )
        make = Ids().make
        self.ids = [make(n, n % SHARDS) for n in range(60)]  # the shard inside decides nothing
        self.memory = {}  # by id: the due of each task in memory that is not taken
        self.taken = {}  # by id: what `take` gave
        self.blocked = set()

    def due(self, number, service, in_ms, priority=0):
        task_id = self.ids[number]
        return Due(task_id, self.now + in_ms, service, priority, (number // 4) % SHARDS)

    def sync_drops(self):
        """The horizon may drop tasks to keep its bounds: the model drops the same."""
        entries = self.horizon.entries
        assert entries.keys() <= self.memory.keys() | self.taken.keys()
        for gone in (self.memory.keys() | self.taken.keys()) - entries.keys():
            self.memory.pop(gone, None)
            self.taken.pop(gone, None)

    @rule(number=numbers, service=services, in_ms=soon_ms, priority=st.integers(0, 2))
    def add(self, number, service, in_ms, priority):
        due = self.due(number, service, in_ms, priority)
        before = self.horizon.entries.get(due.id)
        moved = (
            before is None
            or before.expiry != due.due_at_ms
            or (before.pending and before.item != due)
        )
        count = len(self.horizon.entries)
        self.horizon.add(due)
        if due.id in self.running:
            assert due.id not in self.horizon.entries
        elif moved:
            assert self.added.pop() == due.due_at_ms
            self.taken.pop(due.id, None)
            self.memory[due.id] = due
            if count <= CAP:  # nothing had to be dropped
                assert self.horizon.entries[due.id].expiry == due.due_at_ms
        self.added.clear()
        self.sync_drops()

    @rule(found=st.lists(st.tuples(numbers, services, soon_ms), max_size=20), lost=numbers)
    def load(self, found, lost):
        """Read the store, while one task is claimed or cancelled."""
        removed = self.horizon.record_removals()
        self.cancel(lost)
        self.horizon.stop_recording()
        assert removed == {self.ids[lost]}
        for number, service, in_ms in found:
            if self.ids[number] not in removed:
                self.add(number, service, in_ms, 0)
        self.trim()
        assert self.ids[lost] not in self.horizon.entries

    @rule(ms=st.integers(-50, 150))
    def move_clock(self, ms):
        self.now += ms

    @rule()
    def advance(self):
        self.horizon.advance(self.blocked.__contains__)
        assert all(
            entry.expiry > self.now for entry in self.horizon.entries.values() if entry.pending
        )
        dropped = self.memory.keys() - self.horizon.entries.keys()
        names = {self.memory[one].service for one in dropped} & self.known
        assert names <= self.blocked
        assert names <= self.horizon.truncated_services
        self.sync_drops()

    @rule(service=services)
    def block_or_unblock(self, service):
        self.blocked ^= {service}

    @rule(service=services)
    def delete_service_or_put_it_again(self, service):
        self.known ^= {service}
        self.horizon.drop_unknown_services()
        dropped = self.memory.keys() - self.horizon.entries.keys()
        assert {self.memory[one].service for one in dropped} <= {service}
        self.sync_drops()

    @rule(service=services, limit=st.integers(0, 12))
    def take(self, service, limit):
        if service not in self.horizon.waiting_services():
            return
        waiting = [
            due for one, due in self.memory.items()
            if due.service == service and not self.horizon.entries[one].pending
        ]  # fmt: skip
        waiting.sort(key=lambda due: (-due.priority, due.due_at_ms, due.id))
        taken = self.horizon.take(service, limit)
        assert [due for due, _ in taken] == waiting[:limit]
        for due, entry in taken:
            del self.memory[due.id]
            self.taken[due.id] = due, entry

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), answer=st.sampled_from(["claimed", "left", "gone"]))
    def claim(self, data, answer):
        due, entry = self.taken.pop(data.draw(st.sampled_from(sorted(self.taken.items())))[0])
        if answer == "left":
            self.horizon.put_back(due, entry)
            if due.service in self.known:
                self.memory[due.id] = due
        elif answer == "gone":
            self.horizon.remove_taken(due, entry)
        else:
            self.horizon.remove(due.id)
            self.running.add(due.id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        self.running.discard(data.draw(st.sampled_from(sorted(self.running))))

    @rule(number=numbers)
    def cancel(self, number):
        self.horizon.remove(self.ids[number])
        self.memory.pop(self.ids[number], None)
        self.taken.pop(self.ids[number], None)

    @rule(number=numbers, service=services, in_ms=soon_ms)
    def reschedule_while_taken(self, number, service, in_ms):
        """A claim whose task was moved in between neither queues nor drops the moved one."""
        before = self.taken.get(self.ids[number])
        self.add(number, service, in_ms, 0)
        if before is not None and self.ids[number] not in self.taken:
            self.horizon.put_back(*before)
            self.horizon.remove_taken(*before)
            self.sync_drops()

    @rule(kept=st.sets(st.integers(0, SHARDS - 1)))
    def lose_shards(self, kept):
        self.horizon.drop_shards(kept)
        self.memory = {one: due for one, due in self.memory.items() if due.shard in kept}

    @rule()
    def trim(self):
        self.horizon.trim()
        assert len(self.horizon.entries) <= CAP
        self.sync_drops()

    @rule(names=st.sets(services))
    def compact(self, names):
        self.horizon.compact(names)
        for name in names:
            live = [
                one for one, due in self.memory.items()
                if due.service == name and not self.horizon.entries[one].pending
            ]  # fmt: skip
            assert self.horizon.waiting(name) == len(live)

    @invariant()
    def every_task_has_one_place(self):
        self.horizon._check()
        assert self.horizon.entries.keys() == self.memory.keys() | self.taken.keys()
        assert not self.memory.keys() & self.taken.keys()
        assert not self.horizon.entries.keys() & self.running
        wakeup, pending = self.horizon.sleep_ms(), [
            entry.expiry for entry in self.horizon.entries.values() if entry.pending
        ]  # fmt: skip
        assert (wakeup is None) == (not pending)


@pytest.fixture
def _small_window(monkeypatch):
    monkeypatch.setattr(module, "WINDOW", WINDOW)


@pytest.mark.usefixtures("_small_window")
def test_random_steps_keep_every_task_in_one_place():
    run_state_machine_as_test(
        HorizonMachine, settings=settings(stateful_step_count=STEPS, max_examples=100)
    )


class Memory:
    """A horizon, and a clock set by hand."""

    def __init__(self):
        self.now_ms = 1_000_000
        self.horizon = Horizon(
            lambda: self.now_ms, set(), {"mail"}, lambda _: None, length_ms=60_000, cap=1_000
        )
        self._ids = Ids()

    def add(self, *delays_ms):
        """Add tasks that are due after these delays; return their ids."""
        ids = [self._ids.make(self.now_ms, 0) for _ in delays_ms]
        for task_id, delay_ms in zip(ids, delays_ms, strict=True):
            self.horizon.add(Due(task_id, self.now_ms + delay_ms, "mail", 0, 0))
        return ids

    def take_due(self):
        """Take the tasks that have come due; return their ids in order."""
        self.horizon.advance(lambda _: False)
        names = self.horizon.waiting_services()
        return [due.id for name in names for due, _ in self.horizon.take(name, 1_000)]


class TestWheel:
    def test_due_tasks_come_in_order_and_stay_in_memory(self):
        memory = Memory()
        late, early, _ = memory.add(2_000, 1_000, 3_000)
        assert memory.take_due() == []
        memory.now_ms += 2_000
        assert memory.take_due() == [early, late]
        assert len(memory.horizon.entries) == 3
        assert 0 < memory.horizon.sleep_ms() <= 1_000

    def test_an_empty_horizon_has_no_time_to_wake_up(self):
        assert Memory().horizon.sleep_ms() is None

    def test_a_removed_task_is_gone_wherever_it_was(self):
        memory = Memory()
        pending, due = memory.add(5_000, 1_000)
        memory.now_ms += 1_000
        memory.take_due()
        for task_id in (pending, due, "unknown"):
            memory.horizon.remove(task_id)
        assert (len(memory.horizon.entries), len(memory.horizon.wheel)) == (0, 0)

    def test_another_due_time_moves_a_task(self):
        memory = Memory()
        (task_id,) = memory.add(5_000)
        memory.horizon.add(Due(task_id, memory.now_ms + 9_000, "mail", 0, 0))
        assert memory.horizon.entries[task_id].expiry == memory.now_ms + 9_000
        assert len(memory.horizon.wheel) == 1

    def test_no_task_is_early_or_lost_after_the_clock_is_set_back(self):
        memory = Memory()
        first, second = memory.add(10_000, 20_000)
        memory.now_ms += 5_000
        assert memory.take_due() == []
        memory.now_ms -= 5_000
        assert memory.take_due() == []
        assert memory.horizon.entries.keys() == {first, second}
        memory.now_ms += 9_999
        assert memory.take_due() == []
        memory.now_ms += 1
        assert memory.take_due() == [first]

    def test_a_task_added_after_the_clock_is_set_back_is_not_early(self):
        memory = Memory()
        memory.now_ms += 50_000
        assert memory.take_due() == []
        memory.now_ms -= 50_000
        (task_id,) = memory.add(5_000)
        assert memory.take_due() == []
        assert 0 < memory.horizon.sleep_ms() <= 5_000
        memory.now_ms += 5_000
        assert memory.take_due() == [task_id]

    def test_a_task_taken_before_the_clock_is_set_back_is_taken_once(self):
        memory = Memory()
        (task_id,) = memory.add(1_000)
        memory.now_ms += 1_000
        assert memory.take_due() == [task_id]
        memory.now_ms -= 100_000
        assert memory.take_due() == []
        assert memory.horizon.entries.keys() == {task_id}
