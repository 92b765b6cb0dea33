"""The words of a task's life: states, transitions, ids and times."""

import itertools
import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.stores import EVENTS, Place, ending, task
from tickwheel.values.task import (
    FAILURE_EVENTS,
    FIELDS,
    FINAL,
    MAX_AT_MS,
    MAX_SHARDS,
    TRANSITIONS,
    Attempt,
    Event,
    Ids,
    State,
    Task,
    datetime_of,
    namespace_of,
    qualified_name,
)

NOW = 1_800_000_000_123
moments = st.integers(0, MAX_AT_MS)
shards = st.integers(0, MAX_SHARDS - 1)


@pytest.fixture
def made(tmp_path):
    """Makes a task, with some fields."""
    store = Place("sqlite-sqlite3", str(tmp_path / "never.db")).store()
    return lambda **fields: task(store, **fields)


class TestTransitions:
    def test_these_and_no_others_are_possible(self):
        possible = {
            State.DELAY: {
                Event.CLAIM: State.RUNNING,
                Event.CANCEL: State.CANCELLED,
                Event.RESCHEDULE: State.DELAY,
                Event.EXPIRE: State.FAILED,
            },
            State.RUNNING: {
                Event.ACCEPT: State.RUNNING,
                Event.FINISH: State.FINISHED,
                Event.RETRY: State.DELAY,
                Event.FAIL: State.FAILED,
                Event.EXPIRE: State.FAILED,
                Event.SNOOZE: State.DELAY,
                Event.RELEASE: State.DELAY,
            },
        }
        for state, event in itertools.product(State, Event):
            assert TRANSITIONS.get((state, event)) == possible.get(state, {}).get(event)

    def test_final_states_have_no_way_out(self):
        assert {State.FINISHED, State.FAILED, State.CANCELLED} == FINAL
        assert not [state for state, _ in TRANSITIONS if state in FINAL]

    def test_ready_is_only_shown(self):
        assert State.READY not in {state for state, _ in TRANSITIONS}
        assert State.READY not in TRANSITIONS.values()

    def test_every_state_but_ready_can_be_reached_and_every_event_happens(self):
        reached, news = {State.DELAY}, {State.DELAY}
        while news:
            news = {TRANSITIONS[pair] for pair in TRANSITIONS if pair[0] in news} - reached
            reached |= news
        assert reached == set(State) - {State.READY}
        assert {event for _, event in TRANSITIONS} == set(Event)

    def test_only_what_went_wrong_counts(self):
        assert {Event.RETRY, Event.FAIL} == FAILURE_EVENTS

    def test_states_and_events_are_their_words(self):
        assert [f"{state}" for state in State] == [state.value for state in State]
        assert {"delay", "running"} <= set(State)
        assert Event("snooze") is Event.SNOOZE

    @pytest.mark.parametrize("event", EVENTS)
    def test_an_ending_leads_where_the_table_says(self, made, event):
        running = made(state=State.RUNNING, started_at_ms=NOW)
        assert ending(running, event).state is TRANSITIONS[State.RUNNING, event]


class TestIds:
    @given(moments, shards)
    def test_an_id_is_a_uuid_of_version_7_with_the_shard_inside(self, now_ms, shard):
        made = Ids().make(now_ms, shard)
        parsed = uuid.UUID(hex=made)
        assert (len(made), made, parsed.hex) == (32, made.lower(), made)
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert parsed.int >> 80 == now_ms
        assert int(made[13:16], 16) == shard

    def test_a_hundred_thousand_differ_and_are_in_order(self):
        ids = Ids()
        made = [ids.make(NOW, 5) for _ in range(100_000)]
        assert all(first < second for first, second in itertools.pairwise(made))

    def test_the_ids_of_many_makers_differ(self):
        made = {maker.make(NOW, 5) for maker in [Ids() for _ in range(1_000)] for _ in range(100)}
        assert len(made) == 100_000

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=50))
    def test_time_comes_first_and_a_clock_that_goes_back_gives_no_id_twice(self, steps):
        ids = Ids()
        made = [(NOW + ms, shard, ids.make(NOW + ms, shard)) for ms, shard in steps]
        assert len({task_id for _, _, task_id in made}) == len(made)
        for (early, _, first), (late, _, second) in itertools.permutations(made, 2):
            if early < late:
                assert first < second


class TestTimes:
    @given(moments)
    def test_a_time_is_exact_to_the_millisecond(self, ms):
        moment = datetime_of(ms)
        assert moment.tzinfo is UTC
        whole = datetime(1970, 1, 1, tzinfo=UTC)
        assert (moment - whole).total_seconds() * 1_000 == pytest.approx(ms, abs=0.2)
        assert moment.microsecond == ms % 1_000 * 1_000

    def test_the_first_and_the_last_moment(self):
        assert datetime_of(0) == datetime(1970, 1, 1, tzinfo=UTC)
        assert datetime_of(MAX_AT_MS) == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
        with pytest.raises((ValueError, OverflowError)):
            datetime_of(MAX_AT_MS + 1)


class TestTask:
    def test_its_times_are_aware_datetimes(self, made):
        one = made(due_at_ms=NOW, created_at_ms=NOW + 1, updated_at_ms=NOW + 2)
        assert (one.due_at, one.created_at, one.updated_at) == (
            datetime_of(NOW),
            datetime_of(NOW + 1),
            datetime_of(NOW + 2),
        )
        assert one.deadline_at is None
        assert one._replace(deadline_at_ms=NOW).deadline_at == datetime_of(NOW)

    def test_its_payload_is_decoded_from_the_bytes(self, made):
        assert made(body='{"größe": [1, 2.5, null]}'.encode()).payload == {"größe": [1, 2.5, None]}
        assert made(body=b"null").payload is None
        assert made(body=b"").payload is None
        with pytest.raises(ValueError):
            _ = made(body=b"\xff").payload

    def test_its_result_is_decoded_from_the_text(self, made):
        assert made().result is None
        assert made(result_body="null").result is None
        assert made(result_body='{"ok": true}').result == {"ok": True}

    def test_it_is_final_in_the_final_states(self, made):
        assert {state for state in State if made(state=state).final} == FINAL

    def test_an_attempts_times_are_aware_datetimes(self):
        row = Attempt("0" * 32, 1, Event.FINISH, "n1", 1, NOW, NOW + 5, None)
        assert (row.started_at, row.ended_at) == (datetime_of(NOW), datetime_of(NOW + 5))


class TestNamespaces:
    @given(st.sampled_from(["", "acme", "acme/eu"]), st.sampled_from(["mail", "mail.send", "a:b"]))
    def test_a_full_name_knows_its_namespace(self, namespace, name):
        full = qualified_name(namespace, name)
        assert namespace_of(full) == namespace
        assert full.endswith(name)

    def test_no_namespace_adds_nothing(self):
        assert qualified_name("", "mail") == "mail"
        assert qualified_name("acme", "mail") == "acme/mail"


def test_the_table_of_fields_has_those_of_a_task_in_their_order():
    assert [field.name for field in FIELDS] == [*Task._fields]


def test_what_only_final_tasks_have_comes_last():
    """A row of a live task ends before it."""
    live = [field.live for field in FIELDS]
    assert live == sorted(live, reverse=True)
