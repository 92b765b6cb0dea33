"""The audit: what clients and the callee noted is compared with the tables.

Each check is one guarantee. A violation is a sentence in `violations`; `figures` has the counts.
"""

import json
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import psycopg

from chaos import ledger
from durable.ledger import plain

ENDS = {"finished": "finish", "failed": ("fail", "expire")}
EXPECTED = {  # codes of answers that faults explain
    "server_unavailable", "server_timed_out", "store_unavailable", "locked", "overloaded",
    "attempt_over", "not_started", "unavailable", "not_ready",
}  # fmt: skip


class Row(NamedTuple):
    """A final task."""

    id: str
    state: str
    attempt: int
    failures: int
    shard: int
    key: str | None
    payload: str
    result: str | None
    replay_of: str | None
    service: str
    due_at_ms: int


class Try(NamedTuple):
    """A row of the execution log."""

    attempt: int
    event: str
    epoch: int
    error: str | None


class Claim(NamedTuple):
    """A claim, as the database's trigger has recorded it."""

    number: int
    id: str
    attempt: int
    shard: int
    epoch: int
    current: int
    node: str
    early_ms: int


class Audit:
    """Reads everything; `run` checks it."""

    def __init__(self, url, answers, calls):
        self.answers = defaultdict(list, ledger.read(answers))
        self.calls = defaultdict(list, ledger.read(calls))
        self.violations = []
        self.figures = {}
        with psycopg.connect(url) as database:
            self._read(lambda statement: database.execute(statement).fetchall())

    def _read(self, rows):
        self.live = rows("SELECT count(*) FROM tickwheel.task")[0][0]
        final = rows(
            "SELECT id, state, attempt, failures, shard, key, payload, result, replay_of, service,"
            " due_at_ms FROM tickwheel.backlog WHERE service <> 'bait'"
        )
        self.final = {}
        for task_id, *values in final:
            row = Row(plain(task_id), *values)
            row = row._replace(
                payload=json.loads(row.payload), replay_of=row.replay_of and plain(row.replay_of)
            )
            self._check(row.id not in self.final, f"{row.id} is in the backlog twice")
            self.final[row.id] = row
        self.log = defaultdict(list)
        columns = "task_id, attempt, event, epoch, error"
        for task_id, *values in rows(
            f"SELECT {columns} FROM tickwheel.attempt ORDER BY task_id, attempt"
        ):
            self.log[plain(task_id)].append(Try(*values))
        columns = "number, task_id, attempt, shard, epoch, current, node, early_ms"
        self.claims = [
            Claim(number, plain(task_id), *values)
            for number, task_id, *values in rows(
                f"SELECT {columns} FROM chaos.claim ORDER BY number"
            )
        ]

    def _check(self, holds, otherwise):
        if not holds:
            self.violations.append(otherwise)

    def run(self):
        """Check everything; return the figures."""
        self._check(not self.live, f"{self.live} tasks are still live")
        self.every_acknowledged_task_is_there_once()
        self.every_acknowledged_cancel_holds()
        self.every_task_ended_once()
        self.every_call_was_claimed_and_repeated_for_a_reason()
        self.every_stored_result_is_the_one_of_its_attempt()
        self.no_stale_claim_won()
        self.epochs_rise()
        self.every_feedback_that_won_is_stored()
        self.every_key_was_called_with_its_last_payload()
        self.every_failed_task_was_replayed_once()
        self.every_firing_happened_once()
        self.no_answer_is_unexplained()
        return self.figures

    def every_acknowledged_task_is_there_once(self):
        names = defaultdict(set)
        for note in self.answers["stored"]:
            names[note["name"]].add(note["id"])
        stored = set().union(*names.values())
        for one in stored - self.final.keys():
            self._check(False, f"acknowledged and gone: {one}")
        for name, ids in names.items():
            self._check(len(ids) == 1, f"{name}: one idempotency key, several answers: {ids}")
        there = Counter(
            row.payload for row in self.final.values()
            if not row.replay_of and not row.payload.startswith("schedule")
        )  # fmt: skip
        for name, number in there.items():
            self._check(number == 1, f"{name}: {number} tasks of one idempotency key")
        self.figures |= {
            "acknowledged": len(stored),
            "not acknowledged, and there": len(there.keys() - names.keys()),
            "ended": dict(Counter(row.state for row in self.final.values())),
        }

    def every_acknowledged_cancel_holds(self):
        calls = defaultdict(list)
        for call in self.calls["call"]:
            calls[call["id"]].append(call)
        acknowledged = late = 0
        for note in self.answers["cancel"]:
            if note["state"] != "cancelled":
                continue
            acknowledged += 1
            row = self.final.get(note["id"])
            self._check(row and row.state == "cancelled", f"cancelled, and then: {row}")
            for call in calls[note["id"]]:
                if call["at"] > note["at"]:  # still on its way when its attempt had been lost
                    late += 1
                    tries = [one for one in self.log[note["id"]] if one.attempt == call["attempt"]]
                    self._check(tries, f"called after its cancel: {call}, {note}")
        self.figures |= {"cancels": acknowledged, "late calls of lost attempts": late}

    def every_task_ended_once(self):
        """Attempts are numbered without a gap, and only the last one can be an end."""
        for row in self.final.values():
            log = self.log[row.id]
            events = [one.event for one in log]
            whole = [one.attempt for one in log] == list(range(1, row.attempt + 1))
            self._check(whole, f"attempts are missing: {row}, {log}")
            ends = [event for event in events if event in ("finish", "fail", "expire")]
            if row.state == "cancelled":
                self._check(not ends, f"cancelled, with an end: {row}, {log}")
            else:
                wanted = ENDS[row.state]
                once = len(ends) == 1 and events[-1] in wanted
                self._check(once, f"an outcome is missing or recorded twice: {row}, {log}")

    def every_call_was_claimed_and_repeated_for_a_reason(self):
        """A second call has a later attempt, and the log says why the earlier one did not count.

        Or it repeats the attempt's request, because a kept connection closed without an answer.
        """
        claimed = {(one.id, one.attempt): one for one in self.claims}
        self._check(len(claimed) == len(self.claims), "one attempt was claimed twice")
        seen = defaultdict(set)
        first = {}
        on_connection = defaultdict(list)
        for call in self.calls["call"]:
            on_connection[call["connection"]].append((call["id"], call["attempt"]))
        repeated = 0
        for call in self.calls["call"]:
            place = call["id"], call["attempt"]
            self._check(place in claimed, f"called, and never claimed: {call}")
            earlier = first.setdefault(place, call)
            if earlier is not call:
                repeated += 1
                closed, new = (on_connection[one["connection"]] for one in (earlier, call))
                kept = len(closed) > 1 and closed[-1] == place and new[0] == place
                self._check(kept, f"one attempt, two calls: {earlier}, {call}")
                self._check(closed is not new, f"repeated on one connection: {earlier}, {call}")
            seen[call["id"]].add(call["attempt"])
            if place in claimed:
                epoch = claimed[place].epoch
                self._check(call["epoch"] == epoch, f"claimed with {epoch}: {call}")
        why = Counter()
        for task_id, attempts in seen.items():
            log = {one.attempt: one for one in self.log[task_id]}
            for attempt in sorted(attempts)[:-1]:
                one = log.get(attempt)
                explained = one and one.event not in ("finish", "fail") and (one.error or one.event)
                self._check(explained, f"called again, and why? {task_id}: {attempts}, {log}")
                why[reason_of(one)] += 1
        self.figures |= {
            "calls": len(self.calls["call"]),
            "requests repeated because a kept connection closed": repeated,
            "repeated, because": dict(why.most_common()),
            "attempts that were not the last": dict(
                Counter(
                    reason_of(one) for log in self.log.values() for one in log
                    if one.event not in ("finish", "fail")
                ).most_common()
            ),
        }  # fmt: skip

    def every_stored_result_is_the_one_of_its_attempt(self):
        answered = {(note["id"], note["attempt"]) for note in self.calls["answer"]}
        checked = 0
        for row in self.final.values():
            if row.state != "finished":
                continue
            checked += 1
            wanted = {"task": row.id, "attempt": row.attempt}
            result = json.loads(row.result) if row.result else None
            self._check(result == wanted, f"the result of another attempt: {row}")
            self._check((row.id, row.attempt) in answered, f"finished without an answer: {row}")
        self.figures["results compared"] = checked

    def no_stale_claim_won(self):
        for claim in self.claims:
            self._check(claim.epoch == claim.current, f"a stale claim has won: {claim}")
            self._check(claim.node != "impostor", f"the impostor has won: {claim}")
            self._check(claim.early_ms <= 0, f"claimed before it was due: {claim}")
        self.figures["claims"] = len(self.claims)

    def epochs_rise(self):
        """By the order of claims, per shard; and at the callee, except for calls under way."""
        highest = {}
        for claim in self.claims:
            last = highest.get(claim.shard)
            fell = last is not None and claim.epoch < last.epoch
            self._check(not fell, f"an epoch fell: {claim} after {last}")
            highest[claim.shard] = claim
        claims = {(one.id, one.attempt): one for one in self.claims}
        newest, behind = {}, 0
        for call in self.calls["call"]:
            claim = claims.get((call["id"], call["attempt"]))
            if claim is None:
                continue
            last = newest.get(claim.shard)
            if last is None or claim.epoch >= last.epoch:
                newest[claim.shard] = claim
                continue
            behind += 1  # claimed before the shard moved, arrived after
            self._check(claim.number < last.number, f"an epoch fell at the callee: {claim}, {last}")
        self.figures |= {
            "shards that moved": sum(1 for one in highest.values() if one.epoch > 1),
            "highest epoch": max((one.epoch for one in highest.values()), default=0),
            "calls under way while their shard moved": behind,
        }

    def every_feedback_that_won_is_stored(self):
        won = 0
        for note in self.calls["feedback"]:
            if not note["won"] or note["outcome"] == "progress":
                continue
            won += 1
            log = [one for one in self.log[note["id"]] if one.attempt == note["attempt"]]
            wanted = "finish" if note["outcome"] == "finished" else "retry"
            held = [one.event for one in log] == [wanted]
            self._check(held, f"a feedback has won, and is not stored: {note}, {log}")
        self.figures["feedbacks that won"] = won

    def every_key_was_called_with_its_last_payload(self):
        """The last stored payload, or a later one whose answer was lost."""
        asked, stored = defaultdict(list), {}
        for note in self.answers["replacing"]:
            asked[note["name"]].append(note["payload"])
        for note in self.answers["replaced"]:
            stored[note["name"]] = note["payload"]
        called = defaultdict(set)
        for call in self.calls["call"]:
            called[call["id"]].add(call["payload"])
        for row in self.final.values():
            name = row.payload.rpartition("/")[0]
            if name not in stored or row.state != "finished":
                continue
            allowed = asked[name][asked[name].index(stored[name]) :]
            mine = [one for one in self.final.values() if one.key == row.key]
            if len(mine) > 1:
                continue  # the first had ended when the next was submitted
            self._check(row.payload in allowed, f"{name}: {row.payload} instead of {allowed}")
        self.figures["keys replaced"] = len(stored)

    def every_failed_task_was_replayed_once(self):
        replays = Counter(row.replay_of for row in self.final.values() if row.replay_of)
        for one, number in replays.items():
            self._check(number == 1, f"{one} was replayed {number} times")
        for note in self.answers["replay"]:
            row = self.final.get(note["new_id"])
            self._check(row and row.replay_of == note["id"], f"a replay is gone: {note}, {row}")
        self.figures["replays"] = len(self.answers["replay"])

    def every_firing_happened_once(self):
        """The firings of a schedule have different due times, apart from retries and moves."""
        firings = defaultdict(list)
        for row in self.final.values():
            if row.payload.startswith("schedule-"):
                firings[row.payload].append(row)
        for name, rows in firings.items():
            first = [row.due_at_ms for row in rows if row.attempt <= 1]
            self._check(len(first) == len(set(first)), f"{name} has fired twice: {sorted(first)}")
        self.figures |= {
            "schedules": len(firings), "firings": sum(map(len, firings.values())),
        }  # fmt: skip

    def no_answer_is_unexplained(self):
        codes = Counter(note["error"] for note in self.answers["unknown"])
        for note in self.answers["bug"]:
            self._check(False, f"the client: {note}")
        for note in self.answers["unknown"]:
            self._check(note["error"] in EXPECTED, f"an answer that no fault explains: {note}")
        self.figures["requests without a good answer"] = dict(codes.most_common())


def reason_of(one):
    """Return why an attempt was not the last, in a few words."""
    error = re.sub(r"https?://\S+|[0-9.]+(:\d+)?|'[^']*'", "…", one.error or "")
    return f"{one.event}: {error:.60}" if error else one.event
