"""A store in a few dictionaries: the rules of the contract, as plain as they can be said.

It has no clock: `now_ms` is an argument. Times that a store writes by its own clock are left as
they were, for whoever compares to leave out.
"""

from contracts.stores import (
    conflict,
    holds,
    repeated,
    timing,
)
from tickwheel.durable.store import LEASE_MS
from tickwheel.values.schedule import firing_keys
from tickwheel.values.task import (
    FINAL,
    TRANSITIONS,
    Attempt,
    Due,
    Event,
    KeyConflict,
    RepeatedRequest,
    State,
    Verdict,
)


class ModelStore:
    """A model of a store: what it should contain and answer."""

    def __init__(self, shards):
        self.live = {}
        self.final = {}
        self.log = {}
        self.epochs = dict.fromkeys(range(shards), 0)
        self.schedules = {}
        self.requests = {}  # digest and task id, by caller and key
        self.accepted = set()  # ids of tasks that run without a node

    def get(self, task_id):
        return self.live.get(task_id) or self.final.get(task_id)

    def holder(self, service, key):
        """The live task that has the key, or None."""
        if key is None:
            return None
        same = (one for one in self.live.values() if (one.service, one.key) == (service, key))
        return next(same, None)

    def insert(self, submissions, epochs, *, again):
        return [self._insert(one, epochs, again) for one in submissions]

    def _insert(self, submission, epochs, again):
        task, on_conflict, named = submission
        if again and (known := self.get(task.id)):
            return known._replace(body=task.body, result_body=None)
        if self._stale(task.shard, epochs):
            return None
        if named is None:
            return self._settle(task, on_conflict)
        caller, key, digest = named
        if (caller, key) in self.requests:
            used, task_id = self.requests[caller, key]
            return repeated(self.get(task_id)) if used == digest else RepeatedRequest(False, None)
        answer = self._settle(task, on_conflict)
        holder = answer.holder if isinstance(answer, KeyConflict) else answer
        if holder is answer or on_conflict == "keep":
            self.requests[caller, key] = digest, holder.id
        return answer

    def _settle(self, task, on_conflict):
        holder = self.holder(task.service, task.key)
        if holder is None:
            self.live[task.id] = task
            return task
        if on_conflict == "replace" and holder.state is State.DELAY:
            kept = {
                name: getattr(holder, name) for name in ("id", "shard", "attempt", "node", "epoch")
            }
            kept |= {"created_at_ms": holder.created_at_ms, "replay_of": holder.replay_of}
            self.live[holder.id] = task._replace(**kept)
            return self.live[holder.id]
        return conflict(holder)

    def _stale(self, shard, epochs):
        return shard in epochs and epochs[shard] != self.epochs[shard]

    def due(self, service, shards, low_ms, high_ms):
        """All unclaimed tasks of a service due in (low, high], in order."""
        found = [
            due_of(one)
            for one in self.live.values()
            if one.service == service
            and one.state is State.DELAY
            and one.shard in shards
            and low_ms < one.due_at_ms <= high_ms
        ]
        return sorted(found, key=lambda due: (due.due_at_ms, due.id))

    def claim(self, wanted, node, epochs, now_ms):
        """The ids that are claimed, and what is due later."""
        claimed, later = [], []
        for due in wanted:
            task = self.live.get(due.id)
            if task is None or task.state is not State.DELAY:
                continue
            if epochs.get(due.shard) != self.epochs[due.shard]:
                continue
            if task.due_at_ms != due.due_at_ms or task.due_at_ms > now_ms:
                later.append(due_of(task))
                continue
            self.live[task.id] = task._replace(
                state=TRANSITIONS[State.DELAY, Event.CLAIM],
                attempt=task.attempt + 1,
                node=node,
                epoch=self.epochs[task.shard],
                lease_until_ms=now_ms + LEASE_MS,
                started_at_ms=now_ms,
            )
            claimed.append(task.id)
        return claimed, later

    def record(self, endings):
        return [self._record(one) for one in endings]

    def _record(self, end):
        task = self.live.get(end.id)
        if not self._runs(task, end.attempt, end.epoch):
            return False
        if end.lease_until_ms not in (None, task.lease_until_ms):
            return False
        self.log.setdefault(task.id, []).append(
            Attempt(
                task.id,
                task.attempt,
                end.event,
                task.node,
                task.epoch,
                task.started_at_ms,
                end.at_ms,
                end.error,
            )
        )
        self.accepted.discard(task.id)
        state = TRANSITIONS[State.RUNNING, end.event]
        task = task._replace(
            state=state, failures=end.failures, error=end.error, lease_until_ms=None
        )
        if state in FINAL:
            del self.live[task.id]
            self.final[task.id] = task._replace(result_body=end.result_body)
        else:
            self.live[task.id] = task._replace(due_at_ms=end.due_at_ms)
        return True

    def _runs(self, task, attempt, epoch):
        return (
            task is not None
            and task.state is State.RUNNING
            and (task.attempt, task.epoch) == (attempt, epoch)
        )

    def renew(self, attempts, until_ms):
        return [self._move(one, until_ms, unless=self.accepted) for one in attempts]

    def accept(self, leases):
        answers = [self._move(one[:3], one.until_ms) for one in leases]
        self.accepted |= {lease.id for lease, still in zip(leases, answers, strict=True) if still}
        return answers

    def _move(self, attempt, until_ms, unless=()):
        task_id, number, epoch = attempt
        task = self.live.get(task_id)
        if not self._runs(task, number, epoch):
            return False
        if task.id not in unless:
            self.live[task.id] = task._replace(lease_until_ms=until_ms)
        return True

    def running(self, shards, until_ms):
        """Return the running tasks to find; an accepted task is due when its lease ends."""
        return [
            one._replace(due_at_ms=one.lease_until_ms) if one.id in self.accepted else one
            for one in self.live.values()
            if one.state is State.RUNNING and one.shard in shards and one.lease_until_ms <= until_ms
        ]

    def cancel(self, ids):
        return [self._unclaimed(one, self._cancel, State.CANCELLED) for one in ids]

    def reschedule(self, ids, due_at_ms):
        def move(task):
            self.live[task.id] = task._replace(due_at_ms=due_at_ms)

        return [self._unclaimed(one, move, State.DELAY) for one in ids]

    def _cancel(self, task):
        self.final[task.id] = self.live.pop(task.id)._replace(state=State.CANCELLED)

    def _unclaimed(self, task_id, change, state):
        task = self.get(task_id)
        if task is None:
            return None
        if task.state is not State.DELAY:
            return Verdict(task_id, False, task.state)
        change(task)
        return Verdict(task_id, True, state)

    def find(self, which, now_ms, *, final=None):
        """Every task that a filter holds for, newest first."""
        tasks = [*([] if final else self.live.values())]
        tasks += [] if final is False else self.final.values()
        found = [one for one in tasks if holds(which, one, now_ms)]
        return sorted(found, key=lambda one: one.id, reverse=True)

    def replay(self, replays, now_ms, *, force):
        return [self._replay(one, now_ms, force) for one in replays]

    def _replay(self, replay, now_ms, force):
        old = self.final.get(replay.id)
        if old is None or (old.replayed_as and not force):
            return None
        if holder := self.holder(old.service, old.key):
            return conflict(holder)
        self.final[old.id] = old._replace(replayed_as=replay.new_id)
        self.live[replay.new_id] = old._replace(
            id=replay.new_id,
            state=State.DELAY,
            due_at_ms=replay.due_at_ms,
            shard=replay.shard,
            attempt=0,
            failures=0,
            deadline_at_ms=None,
            created_at_ms=now_ms,
            replay_of=old.id,
            error=None,
            node=None,
            epoch=0,
            lease_until_ms=None,
            started_at_ms=None,
            result_body=None,
            replayed_as=None,
        )
        return self.live[replay.new_id]

    def forget(self, task_id):
        """Remove one final task, as a prune does."""
        del self.final[task_id]
        self.log.pop(task_id, None)

    def take(self, shards):
        for shard in set(shards):
            self.epochs[shard] += 1
        return {shard: self.epochs[shard] for shard in shards}

    def put_schedule(self, schedule):
        there = self.schedules.get(schedule.name)
        if there is not None and there.same_as(schedule):
            return there
        self._cancel_firings(schedule.name)
        self.schedules[schedule.name] = schedule
        return schedule

    def delete_schedule(self, name):
        self._cancel_firings(name)
        return self.schedules.pop(name, None) is not None

    def _cancel_firings(self, name):
        first, end = firing_keys(name)
        for task in list(self.live.values()):
            if task.state is State.DELAY and task.key is not None and first <= task.key < end:
                self._cancel(task)

    def fire(self, firings):
        moved = {}
        return [self._fire(one, moved) for one in firings]

    def _fire(self, firing, moved):
        """It counts while the schedule is as it was read, or as those before it have left it."""
        given, until_ms, task = firing
        there = self.schedules.get(given.name)
        read = given._replace(fired_until_ms=moved.get(given, given.fired_until_ms))
        if there is None or timing(there) != timing(read) or not there.enabled:
            return False
        if there.fired_until_ms >= until_ms:
            return False
        moved[given] = until_ms
        self.schedules[given.name] = there._replace(fired_until_ms=until_ms)
        if task is not None and self.holder(task.service, task.key) is None:
            self.live[task.id] = task
        return True


def due_of(task):
    """Return the part of a task that the wheel holds."""
    return Due(task.id, task.due_at_ms, task.service, task.priority, task.shard)
